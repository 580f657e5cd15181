"""A fiftieth of tests/support/soak.py, in a process of its own, whose memory, threads and files must not grow."""

from __future__ import annotations

from pathlib import Path

import programs

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "soak.py"


def test_what_a_process_holds_does_not_grow(device: str) -> None:
    result = programs.run([SCRIPT, "--device", device.split(":")[0], "--size", "0.02", "--shared-cache"])
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
