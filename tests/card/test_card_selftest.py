"""`flashpage selftest --quick` on a card, as a user starts it: kernels are compiled, right, and in the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda
RIGHT, SLOW = 0, 3  # exit codes; other tests on the same card make it slow


def test_quick(tmp_path: Path) -> None:
    cache, report = tmp_path / "cache", tmp_path / "report.json"
    cache.mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, "-m", "flashpage", "selftest", "--quick", "--device", "cuda", "--json", str(report)],
        env=os.environ | {"FLASHPAGE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (RIGHT, SLOW), done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["verdict"] in ("right", "slow") and found["device"].startswith("cuda:")
    assert min(found["read_gbps"], found["matmul_tflops"]) > 0
    results = found["results"]
    assert all(not result["failure"] and not result["skipped"] for result in results), results
    checked = [result for result in results if result["error"] is not None]
    assert checked and all(0.0 < result["error"] < result["most_error"] for result in checked)
    assert {result["unit"] for result in results} == {"", "GB/s", "TFLOP/s"}
