"""The command that asks a card everything: who is asked, and that no failure is passed over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import card_check
import pytest
import torch
from card_check import Check
from cases import CASES


def test_every_file_is_asked() -> None:
    files = {path.stem for path in Path(card_check.__file__).parent.glob("test_*.py")}
    names = [check.name for check in card_check.checks(with_sanitizers=True)]
    assert names[:5] == ["memcheck", "racecheck", "synccheck", "test_cases-0", "test_cases-1"]
    assert {name.split("-")[0] for name in names[3:]} == files and len(set(names)) == len(names)
    assert len(names) == len(card_check.checks(with_sanitizers=False)) + 3 == len(files) + 3 + 3  # parts of one file


def test_parts_have_every_case() -> None:
    """Each in one of them."""
    found = []
    for check in card_check.checks_of(card_check.ROOT / "tests" / "test_cases.py", 3):
        command = [*check.command[:4], *check.command[6:], "--collect-only"]  # without -m cuda
        collected = subprocess.run(command, cwd=card_check.ROOT, capture_output=True, text=True)
        found.append({line for line in collected.stdout.splitlines() if "::test_case[" in line})
    assert sum(map(len, found)) == len(set.union(*found)) >= len(CASES)
    assert max(map(len, found)) - min(map(len, found)) <= 2


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print('1 passed')", 0),
        ("raise SystemExit(5)", 0),  # no test of the file is marked
        ("raise SystemExit(1)", 1),
        ("raise SystemExit(2)", 1),  # an error while tests are collected
        ("import os; os.abort()", 1),
        ("import time; time.sleep(60)", 1),
    ],
)
def test_what_fails_is_told(code: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine = Check("fine", (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"))
    asked = Check("asked", (sys.executable, "-c", code))
    assert card_check.run_all([fine, asked, fine], ["3", "7"], 2, tmp_path, limit_seconds=5.0) == status
    said = capsys.readouterr().out
    assert "fine: 3\n" in said and f"failed: {'asked' if status else 'nothing'};" in said


def test_a_missing_tool_is_a_failure(tmp_path: Path) -> None:
    missing = Check("memcheck", (str(tmp_path / "no-such-tool"),))
    assert card_check.run_all([missing], ["0"], 1, tmp_path, limit_seconds=5.0) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card would be asked everything")
def test_without_a_card_it_says_so() -> None:
    result = subprocess.run([sys.executable, card_check.__file__], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, "torch finds no GPU here\n")
