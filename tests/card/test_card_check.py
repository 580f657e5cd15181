"""card_check.py: which tests it runs, and that it reports every failure."""

from __future__ import annotations

import sys
from pathlib import Path

import card_check
import programs
import pytest
import torch
from card_check import Check
from profiles import PROFILES


def test_every_file_is_run() -> None:
    files = {path.stem for path in Path(card_check.__file__).parents[1].rglob("test_*.py")}
    files -= {"test_card_profiles", "test_cases"}
    table = [f"case table {i}" for i in range(card_check.PARTS_OF_TABLE)]
    tools = ["memcheck", "racecheck", "synccheck", "kernels of NVRTC"]
    assert [check.name for check in card_check.checks(True)] == [*tools, *table, *sorted(files)]
    assert [check.name for check in card_check.checks(False)] == [*table, *sorted(files)]
    profiles = [f"profile {name}" for name in PROFILES]
    assert [check.name for check in card_check.checks(False, True)] == [*profiles, *table, *sorted(files)]


def test_parts_are_all_tests() -> None:
    def listed(*options: str) -> list[str]:
        result = programs.run(["-m", "pytest", "-q", "--co", "tests/planner/test_contexts.py", *options])
        return [line for line in result.stdout.splitlines() if "::" in line]

    parts = [listed(f"--part={i}/3") for i in range(3)]
    assert all(parts) and sorted(test for part in parts for test in part) == sorted(listed())


def test_tools_run_under_profiles() -> None:
    own = {check.name: check.command for check in card_check.sanitizers()}
    built = {check.name: check.command for check in card_check.builds(True)}
    for name in card_check.SANITIZED_PROFILES:
        assert name in PROFILES
        assert built[f"kernels {name}"][:2] == ("env", f"FLASHPAGE_CARD={name}")
        found = {check.name: check.command for check in card_check.sanitizers(name)}
        assert found == {f"{tool} {name}": ("env", f"FLASHPAGE_CARD={name}", *own[tool]) for tool in own}
    assert [check.name for check in card_check.builds(False)] == ["kernels"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print('1 passed')", 0),
        ("raise SystemExit(5)", 0),  # no test of the file is marked
        ("raise SystemExit(1)", 1),
        ("raise SystemExit(2)", 1),  # an error during collection
        ("import os; os.abort()", 1),
        ("import time; time.sleep(60)", 1),
    ],
)
def test_a_failure_is_reported(code: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine = Check("fine", (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"))
    tried = Check("tried", (sys.executable, "-c", code))
    assert card_check.run_all([fine, tried, fine], ["3", "7"], 2, tmp_path, limit_seconds=5.0) == status
    output = capsys.readouterr().out
    assert "fine: 3,7\n" in output and f"failed: {'tried' if status else 'nothing'};" in output


def test_a_missing_tool_is_a_failure(tmp_path: Path) -> None:
    missing = Check("memcheck", (str(tmp_path / "no-such-tool"),))
    assert card_check.run_all([missing], ["0"], 1, tmp_path, limit_seconds=5.0) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card, all its tests would run")
def test_without_a_card_it_says_so() -> None:
    result = programs.run([card_check.__file__])
    assert (result.returncode, result.stderr) == (2, "torch finds no GPU here\n")


@pytest.mark.parametrize(
    ("argument", "said"),
    [("--jobs=0", "--jobs 0: pass 1 or more"), ("--limit=0", "--limit 0.0: pass more than 0 seconds")],
)
def test_a_wrong_number_is_reported(argument: str, said: str) -> None:
    result = programs.run([card_check.__file__, argument])
    assert result.returncode == 2 and said in result.stderr
