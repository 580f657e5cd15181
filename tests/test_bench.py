"""The benchmarks run: on few repetitions or tiny shapes, for their output alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent / "bench"
SMALL = ("--small", "--device", "cpu", "--libraries", "flashpage", "--repeats", "1")
PROGRAMS = [  # program and arguments, a line that it prints
    (("host.py", "--device", "cpu", "--repeats", "3"), "| run, prefill, out= given | 1 |"),
    (("gpu.py", "decode", "--only", "Zipf", *SMALL), "| batch 64, context 4k, Zipf | flashpage |"),
    (("gpu.py", "prefill", "--only", "16 x 1k", *SMALL), "| ragged 16 x 1k | flashpage |"),
    (("gpu.py", "prefill", "--only", "append 8", *SMALL), "| append 8 rows on 8k, 32 requests | flashpage |"),
]


@pytest.mark.parametrize(("arguments", "line"), PROGRAMS, ids=[f"{a[0]} {a[1]} {a[3]}" for a, _ in PROGRAMS])
def test_runs(arguments: tuple[str, ...], line: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent.parent)}
    command = [sys.executable, str(BENCH / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(found for found in done.stdout.splitlines() if found.startswith(line))
    if arguments[0] == "gpu.py":
        assert float(row.split("|")[-2]) < 1e-2  # the error against fp32


def test_every_benchmark_has_its_program() -> None:
    sys.path.insert(0, str(BENCH))
    try:
        from run import BENCHMARKS
    finally:
        sys.path.remove(str(BENCH))
    for benchmark in BENCHMARKS.values():
        assert (BENCH / benchmark.program[0]).is_file(), benchmark.program
