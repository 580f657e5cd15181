"""The README's example prints what the README shows, and files named in pages and sources exist."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from pathlib import Path

import programs
import pytest

from flashpage.base import env, refused

ROOT = Path(__file__).resolve().parents[2]


def test_example_prints_what_is_shown(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```\s*```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, "README.md has no python block followed by a text block"
    example = tmp_path / "example.py"
    example.write_text(found[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = programs.run([example], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == found[2]


HISTORY = ("history.md", "tried.md")  # they also name programs and files that are gone
PAGES = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_files_that_are_named_exist(page: str) -> None:
    """Links, and paths in backticks; a bare file name is in the folder of the path before it."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    folder = Path()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / link).exists(), link
    if page.endswith(HISTORY):
        return
    for name in re.findall(r"`([\w./*]+\.(?:py|h|cpp|txt|md)|[\w.]+/[\w./]*)`", text):
        if "*" in name:
            assert any(ROOT.glob(name)), name
        elif (ROOT / name).exists():
            folder = Path(name).parent
        elif "NAME" not in name and not name.startswith(
            ".venv/"
        ):  # `make` creates .venv; CI's environment is elsewhere
            assert (ROOT / folder / name).exists() or (ROOT / folder.parent / name).exists(), name


def test_every_page_is_listed() -> None:
    """On the first page, and in the menu of the built pages."""
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert pages < set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


def test_refused_names_are_listed() -> None:
    page = (ROOT / "docs" / "coming-from" / "flashinfer.md").read_text()
    for name, reason in refused.REASONS.items():
        assert f"| `{name}` | {reason} |" in page


HEADER_FOLDERS = ("common", "cpu", "kernels", "params", "plan", "ptx", "tile")


def prose(path: Path) -> str:
    """A file's text; for a test only its comments and docstrings, as tests write other files."""
    text = path.read_text()
    if path.suffix != ".py" or not path.is_relative_to(ROOT / "tests"):
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return "\n".join(comments + docstrings)


def test_files_that_sources_name_exist() -> None:
    """Paths from the root; in headers also from include/flashpage."""
    folders = ("aot", "csrc", "flashpage", "include", "templates", "tests")
    sources = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in (".py", ".h", ".cpp", ".cu", ".jinja")]
    suffix = r"\.(?:py|h|cpp|cu|md|jinja)\b"
    from_root = re.compile(rf"(?<![\w/.])(?:{'|'.join(folders)}|docs)/[a-z0-9_./]*{suffix}")
    from_headers = re.compile(rf"(?<![\w/.])(?:{'|'.join(HEADER_FOLDERS)})/[a-z0-9_./]*{suffix}")
    stale = []
    for path in sources:
        text = prose(path)
        places = dict.fromkeys(from_root.findall(text), (ROOT, ROOT / "include", ROOT / "tests" / "native"))
        if path.is_relative_to(ROOT / "include"):
            places |= dict.fromkeys(from_headers.findall(text), (ROOT / "include" / "flashpage",))
        absent = [name for name, roots in places.items() if not any((root / name).exists() for root in roots)]
        stale += [f"{path.relative_to(ROOT)}: {name}" for name in absent]
    assert not stale, "\n".join(sorted(stale))


def test_environment_variables_are_listed() -> None:
    page = (ROOT / "docs" / "reference" / "command.md").read_text()
    for name, meaning in env.VARIABLES.items():
        assert f"| `{name}` | {meaning} |" in page
