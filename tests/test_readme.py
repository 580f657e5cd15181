"""The README's example is run as it stands, and prints what the README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_example_prints_what_is_shown(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```\s*```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, "README.md has no python block followed by a text block"
    example = tmp_path / "example.py"
    example.write_text(found[1])
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == found[2]


def test_files_that_the_readme_links_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README.read_text())
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
