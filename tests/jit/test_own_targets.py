"""Cards for whose own target no kernels can be had: plans see an A100, and PTX or kernels of sm_80 serve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jit_sandbox import Sandbox

from flashpage.base.errors import SettingError
from flashpage.cli import info
from flashpage.errors import CompileError
from flashpage.jit import cache, compilers, loader, own_targets, source, targets
from flashpage.kernels import devices
from flashpage.kernels.spec import KernelSpec


@pytest.fixture(autouse=True)
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A card of each kind as cuda:0, cuda:1 ..., and an nvcc of CUDA 12.8."""
    sandbox = Sandbox.create(tmp_path)
    sandbox.enter(monkeypatch)
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\necho sm_80 sm_90\necho sm_100\necho sm_120\n")
    program.chmod(0o755)
    monkeypatch.setenv("FLASHPAGE_NVCC", str(program))
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: None)
    monkeypatch.setattr(devices, "of_index", lambda index: devices.CARDS[index])
    monkeypatch.setattr(targets, "device_info", lambda index: devices.CARDS[index])
    caches = (devices.of, targets.cuda_target, targets.runnable, compilers._listed_cards, own_targets.has_own_target)
    for cached in caches:
        cached.cache_clear()
    yield sandbox
    for cached in caches:
        cached.cache_clear()


def planned(name: str) -> devices.Device:
    own_targets.has_own_target.cache_clear()
    devices.of.cache_clear()
    return devices.of(torch.device("cuda", devices.CARDS.index(devices.named(name))))


def target(name: str) -> str:
    targets.cuda_target.cache_clear()
    return targets.cuda_target(devices.CARDS.index(devices.named(name))).name


def have_built(monkeypatch: pytest.MonkeyPatch, store: str, *names: str) -> None:
    """Puts kernels for these targets into the package or the cache."""
    entries = {name: cache.Entry(Path(), {"target": name}, b"") for name in names}
    built = SimpleNamespace(folders=lambda: [Path(name) for name in names], read=entries.get)
    monkeypatch.setattr(cache, store, lambda: built)


@pytest.mark.parametrize(
    ("sm", "expected"),
    [
        (80, ["sm_80", "compute_80"]),
        (86, ["sm_86", "sm_85", "sm_84", "sm_83", "sm_82", "sm_81", "sm_80", "compute_80"]),
        (90, ["sm_90a", "compute_80"]),
        (100, ["sm_100a", "compute_80"]),
    ],
)
def test_targets_that_a_card_can_run(monkeypatch: pytest.MonkeyPatch, sm: int, expected: list[str]) -> None:
    monkeypatch.setattr(targets, "device_info", lambda _: SimpleNamespace(sm=sm))
    assert [t.name for t in targets.runnable.__wrapped__(0)] == expected


def test_a_toolkit_that_is_too_old() -> None:
    for card in devices.CARDS:
        found, is_served = planned(card.name), card.sm >= 100 and card.sm not in (100, 120)
        assert found.sm == (80 if is_served else card.sm) and found.shared_bytes == card.shared_bytes
        assert found.abilities == (() if is_served else card.abilities)
        assert (target(card.name) == targets.PTX) == is_served
    index = devices.CARDS.index(devices.named("GB10"))
    assert [target.name for target in targets.runnable(index)] == ["sm_121a", targets.PTX]


def test_a_later_compiler_that_knows_the_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    newer = tmp_path / "nvrtc"
    newer.write_text("#!/bin/sh\necho sm_80 sm_103\n")
    newer.chmod(0o755)
    nvrtc = compilers.Compiler("nvrtc", (str(newer),))
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: nvrtc)
    assert planned("B300").sm == 103 and target("B300") == "sm_103a" and target("GB10") == targets.PTX
    assert compilers.find_compiler(targets.Target("cuda", 103)) == nvrtc
    assert compilers.find_compiler(targets.Target("cuda", 100)).name == "nvcc"


def test_a_compile_for_a_card_that_no_compiler_knows() -> None:
    unknown = targets.Target("cuda", 121)
    assert compilers.find_compiler(unknown) is None
    assert re.search(r"; neither knows sm_121a: nvcc is ", compilers.looked_for(unknown))


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 120])
def test_a_toolkit_without_cpp20(monkeypatch: pytest.MonkeyPatch, cards: Sandbox, sm: int) -> None:
    """CUDA 11 compiles no kernel, and hides no NVRTC that does."""
    (cards.folder / "nvcc").write_text("#!/bin/sh\necho Cuda compilation tools, release 11.8, V11.8.89 sm_80 sm_120\n")
    compilers._version.cache_clear()
    target = targets.Target("cuda", sm)
    newer, older = (compilers.Compiler("nvrtc", ("true", f"/lib/libnvrtc.so.{version}")) for version in (13, "11.2"))
    monkeypatch.setattr(compilers, "known_cards", lambda _: frozenset({80, 120}))
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: newer)
    assert compilers.find_compiler(target) == newer
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: older)
    assert compilers.find_compiler(target) is None and not compilers.may_compile(target)
    told = compilers.looked_for(target)
    assert "nvcc is release 11.8, V11.8.89 (no C++20: CUDA 12 or newer is needed)" in told
    assert "nvrtc is libnvrtc.so.11.2 (no C++20" in told


def test_what_compilers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every toolkit here knows the targets that CI compiles."""
    monkeypatch.undo()
    for compiler in filter(None, (compilers.find_nvcc(), compilers.find_nvrtc())):
        known = compilers.known_cards(compiler)
        assert {80, 90} <= known, (compiler, known)


@pytest.mark.parametrize("switch", ["FLASHPAGE_NVCC", "FLASHPAGE_JIT"])
def test_without_a_compiler_built_kernels_decide(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv(switch, "off")
    have_built(monkeypatch, "aot_store", "sm_80", "sm_90a", targets.PTX)
    have_built(monkeypatch, "jit_store")
    assert planned("RTX 5090").sm == 80 and target("RTX 5090") == targets.PTX
    assert planned("L40S").sm == 80 and target("L40S") == "sm_80"
    assert planned("H200").sm == 90 and target("H200") == "sm_90a"
    assert planned("A10").sm == 86 and target("A10") == "sm_86"
    have_built(monkeypatch, "jit_store", "sm_120a", "sm_89")  # some of another machine: the package has all
    assert planned("RTX 5090").sm == 80 and planned("L40S").sm == 80
    have_built(monkeypatch, "aot_store", "avx2")  # the package has none, and the cache was copied
    assert planned("RTX 5090").sm == 120 and target("RTX 5090") == "sm_120a"
    assert planned("L40S").sm == 89 and target("L40S") == "sm_89"


def test_a_cache_with_some_kernels_of_a_newer_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler here makes all kernels, but as PTX."""
    have_built(monkeypatch, "jit_store", "sm_121a")
    assert planned("GB10").sm == 80 and target("GB10") == targets.PTX


def build_all(sandbox: Sandbox, spec: KernelSpec, package: str, copied: str) -> None:
    """Puts the kernel into the package and the cache, for the targets of each."""
    (sandbox.templates / "kernel.cu.jinja").write_text("// {{ spec.entry }}\n")
    binary = sandbox.folder / "kernel.cubin"
    binary.write_text("a kernel")
    for store, names in ((cache.aot_store(), package), (cache.jit_store(), copied)):
        for one in map(targets.Target.parse, names.split()):
            meta = {"name": spec.name, "spec": spec.to_json(), "target": one.name}
            store.publish(source.key_of(spec, one), binary, meta)


def have_compiler(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    """An nvcc that knows these targets; empty: none."""
    if not known:
        monkeypatch.setenv("FLASHPAGE_NVCC", "off")
    (sandbox.folder / "nvcc").write_text(f"#!/bin/sh\necho {known}\n")


NEW, OLD, NONE = "sm_80 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121", "sm_80 sm_90 sm_100 sm_120", ""


@pytest.mark.parametrize(
    ("card", "compiler", "package", "copied", "plans", "loads"),
    [
        # Ada: cubins of sm_80 run there, but few fit.
        ("L40S", NONE, "sm_80", "sm_89", 89, "copied sm_89"),
        ("L40S", NONE, "sm_89", "sm_80", 89, "package sm_89"),
        ("L40S", NONE, "sm_80 sm_90a compute_80", "sm_89", 80, "copied sm_89"),
        ("L40S", NONE, "sm_80 sm_90a compute_80", "", 80, "package sm_80"),
        ("L40S", NONE, "sm_90a", "sm_80", 80, "copied sm_80"),
        ("L40S", NONE, "compute_80", "sm_80", 80, "copied sm_80"),
        ("L40S", NONE, "sm_90a", "", 89, "nothing for sm_89"),
        ("L40S", NEW, "sm_80 compute_80", "sm_80", 89, "compiled sm_89"),
        ("L40S", NEW, "sm_89 compute_80", "sm_89", 89, "package sm_89"),
        ("L40S", NEW, "compute_80", "sm_89", 89, "copied sm_89"),
        # Cards whose kernels are those of sm_80.
        ("A10", NONE, "sm_80", "sm_86", 86, "copied sm_86"),
        ("A10", NONE, "sm_86", "sm_86", 86, "package sm_86"),
        ("A10", NONE, "sm_89 compute_80", "", 86, "package compute_80"),
        ("A10", NONE, "sm_89", "compute_80", 86, "copied compute_80"),
        ("A10", NEW, "compute_80", "", 86, "package compute_80"),
        ("A10", NEW, "sm_90a", "sm_80 compute_80", 86, "compiled sm_86"),
        # Cards that run no cubin of another architecture.
        ("H200", NONE, "compute_80", "sm_90a", 80, "copied sm_90a"),
        ("H200", NONE, "sm_80", "sm_90a compute_80", 90, "copied sm_90a"),
        ("H200", NEW, "sm_80 compute_80", "compute_80", 90, "compiled sm_90a"),
        ("RTX 5090", NONE, "sm_80 sm_89 sm_90a", "sm_120a", 120, "copied sm_120a"),
        ("RTX 5090", NONE, "sm_80 sm_89 sm_90a compute_80", "", 80, "package compute_80"),
        ("RTX 5090", NONE, "sm_80 sm_89 sm_90a", "", 120, "nothing for sm_120a"),
        # A compiler that is too old for the card: PTX can be had of every kernel.
        ("GB10", OLD, "sm_121a", "", 80, "package sm_121a"),
        ("GB10", OLD, "compute_80", "sm_121a", 80, "copied sm_121a"),
        ("GB10", OLD, "", "compute_80", 80, "copied compute_80"),
        ("GB10", OLD, "sm_120a", "sm_120a", 80, "compiled compute_80"),
        ("GB10", NONE, "sm_120a", "sm_121a compute_80", 121, "copied sm_121a"),
        ("B300", NONE, "sm_100a", "", 103, "nothing for sm_103a"),
    ],
)
def test_which_kernel_serves(
    cards: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    card: str,
    compiler: str,
    package: str,
    copied: str,
    plans: int,
    loads: str,
) -> None:
    """A kernel that every target has, built for `package` in the package, and for `copied` in the cache."""
    spec = KernelSpec("merge")
    build_all(cards, spec, package, copied)
    have_compiler(cards, monkeypatch, compiler)
    assert planned(card).sm == plans
    index = devices.CARDS.index(devices.named(card))
    best = targets.cuda_target(index)
    found = next(loader._built(spec, index), None)
    if found is not None:
        kind = "package" if found.folder.parent == cards.aot else "copied"
        assert loads == f"{kind} {found.target.name}"
    else:
        assert loads == f"{'compiled' if compilers.may_compile(best) else 'nothing for'} {best.name}"


@pytest.mark.parametrize(
    ("card", "compiler", "package", "told"),
    [
        ("L40S", NEW, "sm_89 compute_80", ["1 of sm_89; others are compiled for sm_89"]),
        ("L40S", NONE, "sm_89 sm_80 compute_80", ["1 of sm_89, 1 of sm_80, 1 of compute_80 (PTX); others are missing"]),
        ("A10", NONE, "sm_89 compute_80", ["1 of compute_80 (PTX); others are missing"]),
        ("RTX 5090", NONE, "sm_89 compute_80", ["1 of compute_80 (PTX); others are missing", "none are built for it"]),
        ("RTX 5090", NONE, "sm_89", ["none; others are missing"]),
        (
            *("GB10", OLD, "sm_121a"),
            [
                "1 of sm_121a; others are compiled for compute_80 (PTX)",
                "no compiler here knows it",
                "FLASHPAGE_JIT=off",
            ],
        ),
    ],
)
def test_info_says_which_kernels_serve(
    cards: Sandbox, monkeypatch: pytest.MonkeyPatch, card: str, compiler: str, package: str, told: list[str]
) -> None:
    build_all(cards, KernelSpec("merge"), package, "")
    have_compiler(cards, monkeypatch, compiler)
    row = devices.named(card)
    found = info._served_by(devices.CARDS.index(row), row.sm)
    assert len(found) == len(told)
    assert all(part in text for part, (_, text) in zip(told, found, strict=True)), found


def test_compilers_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o755)
    with pytest.raises(CompileError, match="does not start"):
        compilers.known_cards(compilers.Compiler("nvcc", (str(broken),)))
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nexit 1\n")
    killed.chmod(0o755)
    found = compilers.Compiler("nvcc", (str(killed),))
    assert compilers.known_cards(found) == frozenset()
    killed.write_text("#!/bin/sh\necho sm_100\n")
    assert compilers.known_cards(found) == {100}


def test_a_named_card_that_cannot_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_JIT", "off")
    monkeypatch.setenv("FLASHPAGE_CARD", "L40S")
    have_built(monkeypatch, "aot_store", "sm_80")
    with pytest.raises(SettingError, match="L40S without kernels of its own lacks"):
        planned("L40S")


def test_a_missing_kernel_is_named_by_the_cards_own_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built that could serve instead."""
    monkeypatch.setenv("FLASHPAGE_NVCC", "off")
    have_built(monkeypatch, "aot_store", "avx2")
    have_built(monkeypatch, "jit_store")
    own_targets.has_own_target.cache_clear()
    assert own_targets.has_own_target(120) and target("L40S") == "sm_89"
