"""A fiftieth of tests/support/soak.py, in a process of its own, whose memory, threads and files must not grow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "soak.py"


def test_what_a_process_holds_does_not_grow(device: str) -> None:
    command = [sys.executable, str(SCRIPT), "--device", device.split(":")[0], "--size", "0.02"]
    result = subprocess.run(command, capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
