"""A table of commands that were tried, each with its time and result: for release.py and other_torch.py, which try
flashpage in environments of their own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_README_EXAMPLE = re.compile(r"```python\n(.*?)```\s*```text\n(.*?)```", re.DOTALL)


def found(pattern: str, name: str) -> str:
    """The first group of the pattern in a file of the project."""
    match = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
    assert match is not None, f"{name} has no {pattern}"
    return match[1]


class Row(NamedTuple):
    """A line of the table."""

    what: str
    seconds: float
    result: str


class Attempts:
    """Runs commands one after the other; a failure is shown at once, and ends nothing."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def step(
        self, what: str, *command: object, env: Mapping[str, str] | None = None, cwd: Path = ROOT, expected: str = ""
    ) -> str:
        """Runs a command, adds a row, and returns its output, which must contain `expected`."""
        print(f"== {what}", flush=True)
        start = time.monotonic()
        done = subprocess.run(
            [str(part) for part in command],
            env=env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        passed = done.returncode == 0 and expected in done.stdout
        row = Row(what, time.monotonic() - start, "passed" if passed else f"FAILED ({done.returncode})")
        if not passed:
            print(done.stdout[-4000:])
        print(f"-- {row.result}: {row.seconds:.0f} s", flush=True)
        self.rows.append(row)
        return done.stdout

    def note(self, what: str, problem: str) -> None:
        """A row of a check that runs no command."""
        self.rows.append(Row(what, 0, f"FAILED: {problem}" if problem else "passed"))

    def environment(self, what: str, folder: Path) -> Path:
        """The Python of an environment in this folder, which is made if there is none."""
        if not (folder / "bin" / "python").exists():
            self.step(f"{what}: empty environment", sys.executable, "-m", "venv", folder)
        return folder / "bin" / "python"

    def install(self, what: str, python: Path, *arguments: object, env: Mapping[str, str] | None = None) -> None:
        self.step(f"{what}: pip install", python, "-m", "pip", "install", "-q", *arguments, env=env)

    def readme_and_demo(self, what: str, python: list[str], env: Mapping[str, str], folder: Path) -> None:
        """The README's ten lines, which become `ten_lines.py` in the folder, and the demo."""
        readme = _README_EXAMPLE.search((ROOT / "README.md").read_text())
        assert readme, "README.md has no python block followed by a text block"
        (folder / "ten_lines.py").write_text(readme[1])
        self.step(f"{what}: the README's ten lines", *python, "ten_lines.py", env=env, cwd=folder, expected=readme[2])
        self.step(f"{what}: flashpage demo", *python, "-m", "flashpage", "demo", env=env, cwd=folder)

    def show(self) -> int:
        """Prints the table; returns 1 if something failed."""
        print()
        for row in self.rows:
            print(f"{row.seconds:7.1f} s  {row.what:72s} {row.result}")
        return int(any(row.result.startswith("FAILED") for row in self.rows))
