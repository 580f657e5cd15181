"""The comparison of machine code: what it reads from a cubin, which differences count, and which kernels are paired."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import cubin
import pytest
import same_machine_code
from same_machine_code import Kernel, pair

SOURCE = """
extern "C" __device__ const int flashpage_launch[] = {128, SHARED MORE};
__device__ const int table[4] = {1, 2, 3, TABLE};
__constant__ float scale[2] = {1.0f, 2.0f};
__device__ __noinline__ float NAME_helper(float x) { return x * scale[1]; }
extern "C" __global__ void __launch_bounds__(128) NAME(float* x, int n) {
  __shared__ float staged[64];
  staged[threadIdx.x % 64] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = NAME_helper(staged[n % 64]) / (x[3] OPERATION table[n % 4]);
}
"""
PLAIN = {"NAME": "first", "SHARED": "4096", "MORE": "", "TABLE": "4", "OPERATION": "+"}
CHANGES = {
    "equal except for names": ({"NAME": "another_name"}, []),
    "code": ({"OPERATION": "-"}, ["instructions in place differ"]),
    "launch block": ({"SHARED": "8192"}, ["launch block (128, 4096) -> (128, 8192)"]),
    "more numbers for the host": ({"MORE": ", 7"}, []),
    "variable": ({"TABLE": "5"}, ["data differ"]),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """PLAIN and every change of it, compiled in one call."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or shutil.which("g++") is None:
        pytest.skip("no nvcc")
    folder = tmp_path_factory.mktemp("cubins")
    variations = {"plain": {}} | {name: change for name, (change, _) in CHANGES.items()}
    sources = [folder / f"{name.replace(' ', '_')}.cu" for name in variations]
    for source, change in zip(sources, variations.values(), strict=True):
        text = SOURCE
        for word, value in (PLAIN | change).items():
            text = text.replace(word, value)
        source.write_text(text)
    subprocess.run([nvcc, "-cubin", "-O3", "-arch=sm_80", *sources], cwd=folder, check=True)
    return {name: path.with_suffix(".cubin").read_bytes() for name, path in zip(variations, sources, strict=True)}


def test_reads_a_cubin(images: dict[str, bytes]) -> None:
    found = cubin.read_cubin(images["plain"])
    assert found.launch == (128, 4096) and found.shared_bytes == 256
    assert len(found.functions) == 1 and found.code_bytes % 16 == 0 and 0 < found.registers <= 32
    assert any(bank.startswith(".nv.constant3") and b"\0\0\0\x40" in data for bank, data in found.constants)


@pytest.mark.parametrize("name", CHANGES)
def test_differences_are_reported(images: dict[str, bytes], name: str) -> None:
    told = cubin.differences(cubin.read_cubin(images["plain"]), cubin.read_cubin(images[name]))
    expected = CHANGES[name][1]
    assert bool(told) == bool(expected), told
    assert all(any(words in line for line in told) for words in expected), told


def test_other_files_are_refused() -> None:
    with pytest.raises(ValueError, match="ELF64"):
        cubin.read_cubin(b"#!/bin/sh")


def kernel(code: bytes, tile: dict[str, int] | None = None, **fields: Any) -> Kernel:
    function = cubin.Function(code, 32, 0, 0, (), (), ())
    binary = cubin.Cubin((function,), (), (), 0, (), (128, 0))
    fields = {"kernel": "decode", "target": "sm_80"} | fields
    return Kernel(json.dumps([fields, tile]), fields, tile or {}, "nvcc", Path("kernel.cubin"), binary)


def codes(pairs: list[tuple[Kernel, Kernel]]) -> set[tuple[bytes, bytes]]:
    return {(old.cubin.functions[0].code, new.cubin.functions[0].code) for old, new in pairs}


def test_pairs_by_fields_of_both_sides() -> None:
    """The new side computes the stages and has one more field; one kernel of each side has no partner."""
    old = [kernel(b"a", {"rows": 16, "stages": 2}, dim=64), kernel(b"b", {"rows": 32, "stages": 2}, dim=64)]
    new = [kernel(b"B", {"rows": 32}, dim=64, cache="paged"), kernel(b"A", {"rows": 16}, dim=64, cache="paged")]
    alone = kernel(b"x", {"rows": 64, "stages": 2}, dim=64), kernel(b"y", {"rows": 16}, dim=128, cache="paged")
    pairs, only_old, only_new = pair([*old, alone[0]], [*new, alone[1]])
    assert codes(pairs) == {(b"a", b"A"), (b"b", b"B")}
    assert (only_old, only_new) == ([alone[0]], [alone[1]])


def test_one_number_of_a_tile_may_change() -> None:
    old = [kernel(b"a", {"rows": 16, "stages": 3}), kernel(b"b", {"rows": 64, "stages": 3})]
    new = [
        kernel(b"B", {"rows": 64, "stages": 4}),
        kernel(b"A", {"rows": 16, "stages": 4}),
        kernel(b"c", {"rows": 8, "stages": 2}),
    ]
    pairs, only_old, only_new = pair(old, new)
    assert codes(pairs) == {(b"a", b"A"), (b"b", b"B")} and not only_old and only_new == [new[2]]


def test_same_code_decides_where_fields_do_not() -> None:
    old = [
        kernel(b"2", {"rows": 16, "stages": 2}),
        kernel(b"3", {"rows": 16, "stages": 3}),
        kernel(b"m", kernel="merge"),
    ]
    new = [kernel(b"3", {"rows": 16}), kernel(b"2", {"rows": 16}), kernel(b"m", kernel="merge_parts")]
    pairs, only_old, only_new = pair(old, new)
    assert codes(pairs) == {(b"2", b"2"), (b"3", b"3"), (b"m", b"m")} and not only_old and not only_new


def test_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = tmp_path / "nvdisasm"
    program.write_text('#!/bin/sh\nhead -c 9 "$2"\n')
    program.chmod(0o755)
    old, new = kernel(b"a" * 32, {"rows": 16}), kernel(b"a" * 16 + b"b" * 16, {"rows": 16})
    for name, text in (("old", "FADD one\n"), ("new", "FMUL one\n")):
        (tmp_path / name).write_text(text)
    sides = [dataclasses.replace(side, path=tmp_path / name) for side, name in ((old, "old"), (new, "new"))]
    assert same_machine_code.report([sides[0]], [sides[0]], None, 3)
    assert not same_machine_code.report([sides[0]], [sides[1]], str(program), 3)
    printed = capsys.readouterr().out
    assert "1 of 2 instructions in place differ, the first at 0x10" in printed
    assert "-FADD one\n+FMUL one" in printed and "1 kernels compared, 1 differ, 0 only in the old list" in printed
    assert not same_machine_code.report([sides[0]], [], None, 3)
