"""The programs that download engines: their help and wrong arguments, for which nothing is installed."""

from __future__ import annotations

from pathlib import Path

import programs
import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.parametrize("name", ["vllm", "sglang", "flashinfer"])
def test_help(name: str) -> None:
    done = programs.run([SUPPORT / f"get_{name}.py", "--help"])
    assert done.returncode == 0, done.stderr
    assert "VERSION" in done.stdout and f"`python tests/support/get_{name}.py" in done.stdout


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("vllm", ["--bogus"], "unrecognized arguments: --bogus"),
        ("sglang", ["0.1"], "VERSION 0.1: pass one of 0.5.15.post1, "),
    ],
)
def test_wrong_argument(name: str, words: list[str], says: str) -> None:
    done = programs.run([SUPPORT / f"get_{name}.py", *words])
    assert done.returncode == 2 and says in done.stderr, done.stderr
