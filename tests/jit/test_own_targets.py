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
from flashpage.errors import CompileError
from flashpage.jit import cache, compilers, own_targets, targets
from flashpage.kernels import devices


@pytest.fixture(autouse=True)
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
    yield
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


def test_a_toolkit_that_is_too_old() -> None:
    for card in devices.CARDS:
        found, is_served = planned(card.name), card.sm in (103, 121)
        assert found.sm == (80 if is_served else card.sm) and found.shared_bytes == card.shared_bytes
        assert found.abilities == (() if is_served else card.abilities)
        assert (target(card.name) == targets.PTX) == is_served
    index = devices.CARDS.index(devices.named("GB10"))
    assert targets.runnable(index) == (targets.Target("cuda", targets.PTX),)


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
