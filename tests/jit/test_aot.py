"""Kernels built ahead of time: the list, build and check, look-up, and NVRTC."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import os
import zipfile
from pathlib import Path

import programs
import pytest
import torch
from jit_sandbox import Sandbox, toy

from aot import build as aot_build
from aot import specs
from aot import wheel as aot_wheel
from aot.elf import shared_bytes
from flashpage import jit
from flashpage.base import paths
from flashpage.base.dtypes import DType
from flashpage.base.version import VERSION
from flashpage.jit import cache, compilers
from flashpage.jit.targets import FIRST_OF_ITS_OWN, PTX
from flashpage.kernels import ATTENTION, choose, devices, helpers
from flashpage.kernels.ahead import BF16, FP16, HEAD_DIMS, Ahead
from flashpage.kernels.context_classes import ContextClass
from flashpage.kernels.options import Options
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.work import Problem
from flashpage.serving import gather
from flashpage.variants import builtin

ROOT = Path(__file__).resolve().parents[2]
# The kernel has head_dim_qk live values, with at most 32 registers a thread.
CUDA_TEMPLATE = """#include "flashpage/params/params.h"
extern "C" __device__ const int flashpage_launch[3] = {1024, 4096, 0};
using flashpage::MergeParams;
extern "C" __global__ void __launch_bounds__(1024, 2) {{ spec.entry }}(const __grid_constant__ MergeParams p) {
  constexpr int n = {{ spec.head_dim_qk }};
  __shared__ float first;
  if (threadIdx.x == 0) first = p.partial_out[0];
  float x[n];
#pragma unroll
  for (int i = 0; i < n; i++) x[i] = p.partial_out[i + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; i++) p.lse[i * threadIdx.x] = x[i] + first;
}
"""
SHARED = 4096 + 4  # bytes of the template: given at the launch, and fixed


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    sandbox = Sandbox.create(tmp_path)
    sandbox.enter(monkeypatch)
    monkeypatch.delenv("FLASHPAGE_CXX")  # these tests do not depend on nvcc's host compiler
    (sandbox.templates / "kernel.cu.jinja").write_text(CUDA_TEMPLATE)
    return sandbox


def cuda_toy(live_values: int) -> KernelSpec:
    return KernelSpec("merge", head_dim_qk=live_values)


def cuda_compilers() -> list[compilers.Compiler]:
    return [found for found in (compilers.find_nvcc(), compilers.find_nvrtc()) if found]


CUDA_TARGETS = [target for target in map(jit.Target.parse, aot_build.WHEEL_TARGETS) if target.backend == "cuda"]


def test_list_is_lean() -> None:
    checked: set[KernelSpec] = set()
    for target in CUDA_TARGETS:
        listed = specs.cuda_specs(target)
        assert len(listed) == len(set(listed))
        assert set(specs.default_cuda_specs(target)) <= set(listed)
        assert all(target.fits(spec) for spec in listed)
        assert not set(specs.only_checked_specs(target)) & set(listed)
        checked.update(listed if target.name in aot_build.CHECK_TARGETS else ())
        # PTX has tiles for three sizes of shared memory, and Hopper's decode kernel others over fp8 for few rows;
        # its prefill kernel reads V of e4m3 by rows and by columns.
        assert len(listed) <= {PTX: 145, 90: 147}.get(target.arch, 130)
    assert len(checked) <= 197
    assert all(spec.backend == "cpu" for spec in specs.cpu_specs())
    kernels = aot_build.listed(aot_build.WHEEL_TARGETS)
    assert {target.name for _, target in kernels} == set(aot_build.WHEEL_TARGETS)
    assert all(target.fits(spec) for spec, target in kernels)


@pytest.mark.parametrize(("machine", "levels"), [("x86_64", ["avx2", "avx512"]), ("aarch64", ["neon"])])
def test_the_list_has_the_cpu_levels_of_its_machine(machine: str, levels: list[str]) -> None:
    """g++ compiles for no other machine."""
    code = (
        f"import os; os.uname = lambda: os.uname_result(('Linux', '', '', '', {machine!r}))\n"
        "from aot.build import WHEEL_TARGETS; print(*WHEEL_TARGETS)"
    )
    done = programs.run(["-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.split() == ["sm_80", "sm_90a", "compute_80", *levels]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_nvrtc_of_a_distribution(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"/usr/lib/{machine}-linux-gnu/libnvrtc.so"
    files = [f"{place}.12", f"{place}.12.8.93", f"{place}.alt.13"]
    monkeypatch.setattr(compilers.glob, "glob", lambda pattern: files if pattern == f"{place}.*" else [])
    assert compilers.nvrtc_library() == f"{place}.12.8.93"


def test_the_check_leaves_out_twins_alone() -> None:
    """The check leaves out kernels over fp16 and over ragged KV, and compiles their twins over bf16 and pages."""
    targets = aot_build.CHECK_TARGETS
    every, checked = {*aot_build.listed(targets), *aot_build.only_checked(targets)}, set(aot_build.checked(targets))
    assert checked < every
    for spec, target in every - checked:
        types = {n: DType.BFLOAT16 for n in ("q_dtype", "kv_dtype", "out_dtype") if getattr(spec, n) is DType.FLOAT16}
        source = "paged" if spec.kv_source == "ragged" else spec.kv_source
        assert (dataclasses.replace(spec, kv_source=source, **types), target) in checked, spec.name
    for kernel, loader in {(spec.kernel, spec.loader) for spec, _ in every}:
        for name, value in (("q_dtype", DType.FLOAT16), ("kv_source", "ragged")):
            one_of = {(s, t) for s, t in every if (s.kernel, s.loader, getattr(s, name)) == (kernel, loader, value)}
            assert not one_of or one_of & checked, (kernel, loader, value)


def test_a_target_fits_where_a_kernel_is_chosen() -> None:
    """A target that needs one architecture is used on that architecture only, and the reverse."""
    for kernel in ATTENTION:
        archs = [card.sm for card in devices.CARDS if jit.Target("cuda", card.sm).fits(KernelSpec(kernel.name))]
        assert set(archs) == set(kernel.archs or ([] if kernel.backend == "cpu" else {c.sm for c in devices.CARDS}))
    hopper, ampere = jit.Target("cuda", 90), jit.Target("cuda", 80)
    assert hopper.fits(KernelSpec("decode_sm90")) and not ampere.fits(KernelSpec("decode_sm90"))
    assert hopper.fits(KernelSpec("merge")) and ampere.fits(KernelSpec("merge"))
    assert not hopper.fits(KernelSpec("cpu_attention"))


LISTED = {(spec, target.name) for target in CUDA_TARGETS for spec in specs.cuda_specs(target)}
LISTED |= {(spec, "avx2") for spec in specs.cpu_specs()}
PLANNED = sorted((pair for pair in LISTED if pair[0].tile), key=lambda pair: (pair[0].name, pair[1]))


@pytest.mark.parametrize(("spec", "target"), PLANNED, ids=[f"{spec.name}-{target}" for spec, target in PLANNED])
def test_the_list_has_what_plans_need(spec: KernelSpec, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every spec is chosen for some number of packed rows: otherwise a wheel would hold kernels that no plan uses."""
    options = Options(
        kv_source=spec.kv_source,
        num_q_heads=8,
        num_kv_heads=1 if spec.loader == "boxes" else 8,
        head_dim_qk=spec.head_dim_qk,
        head_dim_vo=spec.head_dim_vo,
        page_size=0 if spec.kv_source == "ragged" else 1 if spec.loader == "rows" else 16,
        q_dtype=spec.q_dtype,
        kv_dtype=spec.kv_dtype,
        out_dtype=spec.out_dtype,
        latent_format=spec.latent_format,
        k_format=spec.k_format,
        v_format=spec.v_format,
        has_value_columns=spec.loader == "columns",
        has_soft_cap=spec.variant == builtin(soft_cap=50.0).spec,
        position_encoding="ROPE_LLAMA" if spec.position_encoding == "rope" else "NONE",
        has_mask=spec.mask_source == "packed_bits",
    )
    variant = builtin(soft_cap=30.0).spec if options.has_soft_cap else spec.variant
    device = torch.device("cpu" if spec.backend == "cpu" else "cuda:0")
    problems = [Problem(options, 1 << i, contexts=contexts) for i in range(12) for contexts in ContextClass]
    is_found = False
    for card in specs.cards_of(jit.Target.parse(target)):
        monkeypatch.setattr(devices, "of", lambda _, card=card: card)
        is_found = is_found or any(choose.choose(problem, device, variant).spec == spec for problem in problems)
    assert is_found


@pytest.mark.parametrize("page_size", [1, 16], ids=["page 1", "page 16"])
@pytest.mark.parametrize(
    ("card", "target"),
    [
        (card, target)
        for card in devices.CARDS
        for target in (jit.Target("cuda", card.sm), jit.Target("cuda", PTX))
        if target.arch != PTX or not card.has_wgmma  # their kernels are in every wheel
    ],
    ids=lambda value: value.name,
)
def test_plain_decode_is_in_the_list(
    card: devices.Device, target: jit.Target, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any group size and page size, for the head dims of the default list, on every card of the table: the kernel is
    built for the card's target or as the PTX of a wheel."""
    planned = dataclasses.replace(card, sm=devices.PTX_SM) if target.arch == PTX else card
    monkeypatch.setattr(devices, "of", lambda _: planned)
    listed = set(specs.default_cuda_specs(target))
    for dtype, dim in itertools.product((DType.BFLOAT16, DType.FLOAT16), HEAD_DIMS):
        options = Options("paged", 8, 8, dim, dim, page_size, dtype, dtype, dtype, uniform_q_len=1)
        for rows in (1, 4, 8, 16) if page_size == 1 else (1, 4, 16, 32, 64, 128):
            assert choose.choose(Problem(options, rows), torch.device("cuda:0")).spec in listed


def test_a_target_without_a_card_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        aot_build.main(["--check", "--arch", "75"])
    error = capsys.readouterr().err
    assert "no row of flashpage/kernels/devices.py is of sm_75: the list knows " in error and ", sm_90a" in error


def test_helper_specs_are_those_of_operators() -> None:
    listed = set(helpers.AHEAD)
    assert {KernelSpec("append", kv_dtype=helpers.COPIED[dtype.size]) for dtype in DType} <= listed
    assert {
        KernelSpec("merge_states", q_dtype=DType.of(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)
    } <= listed
    assert {KernelSpec("plan"), gather._SPEC} <= listed
    assert {*listed, KernelSpec("gather_rows")} <= set(specs.default_cuda_specs(jit.Target("cuda", 90)))


def test_aot_folder_is_looked_at_first(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [jit.Target("cpu", level) for level in ("avx2", "avx512")]
    aot_build.build_into(sandbox.aot, [(toy(1), target) for target in levels])
    monkeypatch.setenv("FLASHPAGE_CXX", "no-such-compiler")
    monkeypatch.setattr("flashpage.jit.loader.runnable", lambda _: (jit.Target("cpu", "avx512bf16"), *reversed(levels)))
    assert jit.get_kernel(toy(1)).target.name == "avx512"  # the best target that is there
    assert not sandbox.cache.exists()


def test_a_broken_aot_entry_is_a_miss(sandbox: Sandbox) -> None:
    (result,) = aot_build.build_into(sandbox.aot, [(toy(), jit.host_target())])
    os.truncate(result.entry.path, 100)
    assert jit.get_kernel(toy()).handle
    assert len(cache.entries()) == 1


def test_build_into_holds_the_list_and_nothing_else(sandbox: Sandbox) -> None:
    target = jit.host_target()
    aot_build.build_into(sandbox.aot, [(toy(1), target), (toy(2), target)])
    results = aot_build.build_into(sandbox.aot, [(toy(2), target), (toy(3), target)])
    assert [r.is_new for r in results] == [False, True]
    assert [e.spec for e in cache.Store(sandbox.aot).entries()] == [toy(2), toy(3)]
    assert len(cache.Store(sandbox.aot).folders()) == 2


def test_kernels_of_a_wheel_are_found_without_rendering(sandbox: Sandbox) -> None:
    """build_into remembers the keys, for the kernels of the list only; other folders may be read-only."""
    target = jit.host_target()
    aot_build.build_into(sandbox.aot, [(toy(1), target), (toy(2), target)])
    for memo in (sandbox.aot / ".keys").iterdir():
        memo.write_text("from other sources")
    aot_build.build_into(sandbox.aot, [(toy(2), target)])  # the kernel is found, not compiled
    assert [path.name for path in sandbox.aot.iterdir() if path.name.startswith(".")] == [".keys"]
    (memo,) = (sandbox.aot / ".keys").iterdir()
    assert memo.name.startswith(toy(2).digest[:40])
    code = "import sys; print(get(toy(2)).spec == toy(2), 'jinja2' in sys.modules)"
    assert sandbox.run(code, FLASHPAGE_JIT="off", PATH="") == "True False\n"


def test_a_kernel_that_does_not_render_fails_alone(sandbox: Sandbox) -> None:
    target = jit.host_target()
    bad, good = aot_build.build_into(sandbox.aot, [(KernelSpec("cpu_nothing"), target), (toy(1), target)])
    assert "is not known" in str(bad.error)
    assert good.entry is not None


def test_manifest_is_an_aot_list(sandbox: Sandbox) -> None:
    path = sandbox.folder / "used.json"
    jit.write_manifest(path, [(toy(1), jit.host_target()), (cuda_toy(4), jit.Target("cuda", 90))])
    assert aot_build.from_manifest(path) == [(toy(1), jit.host_target()), (cuda_toy(4), jit.Target("cuda", 90))]
    assert aot_build.from_manifest(path, ["sm_80", "avx2"]) == [
        (toy(1), jit.Target("cpu", "avx2")),
        (cuda_toy(4), jit.Target("cuda", 80)),
    ]
    jit.write_manifest(path, [(KernelSpec("decode_sm90"), jit.Target("cuda", 90)), (toy(1), jit.host_target())])
    assert aot_build.from_manifest(path, ["sm_80"]) == []  # that target is not compiled there
    assert aot_build.from_manifest(path, ["sm_90a"]) == [(KernelSpec("decode_sm90"), jit.Target("cuda", 90))]
    assert aot_build.main(["--manifest", str(path), "--target", "avx2", "--output", str(sandbox.aot)]) == 0
    assert [e.target.name for e in cache.Store(sandbox.aot).entries()] == ["avx2"]


@pytest.mark.parametrize("compiler", cuda_compilers(), ids=lambda compiler: compiler.name)
def test_cuda_compilers(sandbox: Sandbox, compiler: compilers.Compiler) -> None:
    """Cubins of their architecture with the entry point, PTX for any driver, ptxas' numbers, and errors."""
    targets = [jit.Target("cuda", 80), jit.Target("cuda", 90), jit.Target.parse("compute_80")]
    results = jit.build_kernels([(cuda_toy(4), target) for target in targets], compiler=compiler)
    for result, mark in zip(results, (b"sm_80", b"sm_90a", b".target sm_80"), strict=True):
        assert result.entry is not None, result.error
        assert b"flashpage_merge" in result.entry.image
        assert b"flashpage_launch" in result.entry.image
        assert mark in result.entry.image or result.target.binary == "kernel.cubin"
        assert result.entry.meta["compiler"].startswith(compiler.name)
    sm_80, sm_90a, ptx = results
    assert sm_80.entry.image[:4] == sm_90a.entry.image[:4] == b"\x7fELF"
    assert sm_80.entry.image != sm_90a.entry.image
    assert 0 < sm_80.registers <= 32
    assert shared_bytes(sm_80.entry.image) == shared_bytes(sm_90a.entry.image) == SHARED
    assert shared_bytes(ptx.entry.image) is None
    assert sm_80.spill_bytes == sm_90a.spill_bytes == 0
    assert ptx.entry.path.suffix == ".ptx"
    (sandbox.templates / "kernel.cu.jinja").write_text("int x = y;\n")
    (bad,) = jit.build_kernels([(cuda_toy(5), targets[0])], compiler=compiler)
    assert 'kernel.cu, line 1: identifier "y" is undefined\n    int x = y;\n' in str(bad.error)


def test_check_fails_on_spilled_registers_and_large_ctas(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    if not cuda_compilers():
        pytest.skip("neither nvcc nor NVRTC is here")
    monkeypatch.setattr(specs, "only_checked_specs", lambda _: [])
    monkeypatch.setattr(specs, "cuda_specs", lambda _: [cuda_toy(4)])
    assert aot_build.main(["--check"]) == 0
    assert "2 kernels, 0 failed, 0 spill registers" in capsys.readouterr().out
    monkeypatch.setattr(specs, "only_checked_specs", lambda _: [cuda_toy(128)])
    assert aot_build.main(["--check", "--arch", "80"]) == 1
    assert "2 kernels, 0 failed, 1 spill registers" in capsys.readouterr().out
    monkeypatch.setattr(specs, "only_checked_specs", lambda _: [])
    monkeypatch.setattr(specs, "cards_of", lambda _: [dataclasses.replace(devices.H200, shared_bytes=SHARED - 1)])
    assert aot_build.main(["--check", "--arch", "90"]) == 1
    told = capsys.readouterr().err
    assert f"sm_90a: a CTA takes {SHARED} bytes of shared memory, and has {SHARED - 1}; give it a smaller tile" in told
    assert not sandbox.cache.exists()
    assert not sandbox.aot.exists()


def test_nvrtc_compiles_a_default_kernel_without_another_include_path(tmp_path: Path) -> None:
    """A real template; CI compiles all default specs with NVRTC."""
    nvrtc = compilers.find_nvrtc()
    if nvrtc is None:
        pytest.skip("NVRTC is not here: pip install nvidia-cuda-nvrtc")
    options = [*nvrtc.flags(jit.Target("cuda", 90)), *nvrtc.command(tmp_path, tmp_path, jit.Target("cuda", 90))[5:]]
    assert {o for o in options if o.startswith(("-I", "--include-path"))} == {f"-I{paths.include_dir()}"}
    kernels = [(specs.default_cuda_specs(target)[0], target) for target in CUDA_TARGETS]
    results = jit.build_kernels(kernels, tmp_path, compiler=nvrtc)
    assert [str(result.error) for result in results if result.error] == []


@pytest.mark.parametrize("card", [card.name for card in devices.CARDS])
def test_the_wheel_of_kernels_serves_every_paged_batch(card: str) -> None:
    """Any number of rows and class of contexts, for 16-bit elements and the usual head dims, without a compiler: by
    kernels of the card's own target, or else by PTX."""
    row = devices.named(card)
    target = jit.Target("cuda", row.sm)
    if target.name not in aot_wheel.TARGETS:
        target = jit.Target("cuda", PTX)
        row = row if row.sm < FIRST_OF_ITS_OWN else dataclasses.replace(row, sm=devices.PTX_SM)
    assert target.name in aot_wheel.TARGETS
    shipped = {spec for spec, _ in aot_wheel.kernels_of([target.name])}
    for dtype, dim, log, contexts in itertools.product((BF16, FP16), HEAD_DIMS, range(13), ContextClass):
        problem = Ahead(dtype, dtype, (dim, dim), 1 << log, contexts=contexts).problem
        assert choose.choose_for_card(problem, row).spec in shipped, (dtype, dim, 1 << log, contexts)


def test_a_wheel_of_kernels_has_what_its_record_says(tmp_path: Path) -> None:
    """Entries and memos lie where an installed flashpage looks for them, and the files are those of the record."""
    kernels, key = tmp_path / "kernels", "0" * 40
    for name in (f"{key}/kernel-1.cubin", f"{key}/meta.json", ".keys/1-sm_90a"):
        (kernels / name).parent.mkdir(parents=True, exist_ok=True)
        (kernels / name).write_text(name)
    path = aot_wheel.pack(kernels, ("sm_90a",), tmp_path / "dist")
    assert path.read_bytes() == aot_wheel.pack(kernels, ("sm_90a",), tmp_path / "again").read_bytes()
    with zipfile.ZipFile(path) as wheel:
        names, info = wheel.namelist(), aot_wheel.INFO
        record = dict(line.split(",", 1) for line in wheel.read(f"{info}/RECORD").decode().splitlines())
        inside = paths.aot_dir().relative_to(paths.PACKAGE.parent).as_posix()
        assert f"{inside}/{key}/kernel-1.cubin" in names and f"{inside}/.keys/1-sm_90a" in names
        assert set(record) == set(names) and record.pop(f"{info}/RECORD") == ","
        for name, proof in record.items():
            data = wheel.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert proof == f"sha256={digest},{len(data)}", name
        assert f"Requires-Dist: flashpage=={VERSION}\n" in wheel.read(f"{info}/METADATA").decode()
