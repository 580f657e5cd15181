"""The README's example is run as it stands, and prints what the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashpage.base import env

ROOT = Path(__file__).resolve().parents[2]


def test_example_prints_what_is_shown(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```\s*```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, "README.md has no python block followed by a text block"
    example = tmp_path / "example.py"
    example.write_text(found[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == found[2]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(page: str) -> None:
    """Links, and paths in backticks; a bare file name stands in the folder of the path before it."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    folder = Path()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"`([\w./]+\.(?:py|h|cpp|txt|md)|[\w.]+/[\w./]*)`", text):
        if (ROOT / name).exists():
            folder = Path(name).parent
        else:
            assert (ROOT / folder / name).exists() or (ROOT / folder.parent / name).exists(), name


def test_environment_variables_are_listed() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for name, meaning in env.VARIABLES.items():
        assert f"| `{name}` | {meaning} |" in page
