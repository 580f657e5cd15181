"""Code blocks of README, CONTRIBUTING and docs/ run on the CPU, and print what the page shows below them.

A page's python blocks run one after the other in one namespace. A `text` block that follows a block is its output. A
title says where a block runs instead: `needs a card`, `needs an engine`, `in a checkout` (make, pip), `two ranks`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import linecache
import os
import re
import shlex
import sys
import types
from pathlib import Path
from typing import NamedTuple

import programs
import pytest
import torch

pytestmark = pytest.mark.usefixtures("quick_kernels")

ROOT = Path(__file__).resolve().parents[2]
BY_HAND = ("docs/results.md", "docs/history.md", "docs/tried.md")  # commands of their time and machine
ELSEWHERE = {"needs a card", "needs an engine", "in a checkout"}
SILENT = {"text", "json", "cpp", ""}  # shown, not run
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$(\n+```text\n(.*?)^```$)?', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    title: str
    code: str
    output: str | None


def blocks(page: str) -> list[Block]:
    """Every fenced block; one that is an output belongs to the block above it."""
    found = _FENCE.findall((ROOT / page).read_text())
    return [Block(language, title, code, output if below else None) for language, title, code, below, output in found]


PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page not in BY_HAND]
WITH_PYTHON = [page for page in PAGES if any(b.language == "python" and not b.title for b in blocks(page))]
RANKS = [(page, i) for page in PAGES for i, block in enumerate(blocks(page)) if block.title == "two ranks"]
SHELL = [(page, i) for page in PAGES for i, b in enumerate(blocks(page)) if b.language == "sh" and not b.title]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_says_where(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.count("```") == 2 * sum(1 + (b.output is not None) for b in blocks(page)), "a block that is not read"
    for block in blocks(page):
        assert block.language in SILENT | {"python", "sh"}, block
        assert block.title in ELSEWHERE | {"two ranks", ""}, block
        assert block.language not in SILENT or not block.title, block
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(
        r"^make ([a-z-]+)", "\n".join(b.code for b in blocks(page) if b.language == "sh"), re.MULTILINE
    ):
        assert target in targets, f"make {target}"


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(page, ("",), tmp_path, monkeypatch)


@pytest.mark.cuda
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.title == "needs a card" for b in blocks(page))])
def test_python_blocks_on_a_card(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(page, ("", "needs a card"), tmp_path, monkeypatch)
    torch.cuda.synchronize()


def run_blocks(page: str, titles: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's blocks with these titles, in order."""
    monkeypatch.chdir(tmp_path)
    if "import transformers" in (text := (ROOT / page).read_text()) or "from transformers" in text:
        pytest.importorskip("transformers")
    if "import varlen_attn" in text:
        varlen = pytest.importorskip("torch.nn.attention.varlen")
        if "seqused_k" not in inspect.signature(varlen.varlen_attn).parameters:
            pytest.skip("this torch's varlen_attn takes no pages")
    module = types.ModuleType("page")  # torch.compile looks names up in a module
    monkeypatch.setitem(sys.modules, "page", module)
    for block in (b for b in blocks(page) if b.language == "python" and b.title in titles):
        name = f"<{page}, block at {block.code.splitlines()[0]!r}>"
        linecache.cache[name] = (len(block.code), None, block.code.splitlines(keepends=True), name)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.code, name, "exec"), vars(module))
        assert block.output is None or printed.getvalue() == block.output, name


def public_classes() -> list[tuple[str, str]]:
    """Page and path of every class of the reference; errors that need a broken compiler or a card have no example."""
    found = []
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            if module == "flashpage.hf" and not importlib.util.find_spec("transformers"):
                continue
            if isinstance(getattr(importlib.import_module(module), name), type):
                found.append((str(page.relative_to(ROOT)), name))
    return found


@pytest.mark.parametrize(("page", "name"), public_classes())
def test_every_public_class_has_an_example(page: str, name: str) -> None:
    if name in ("CompileError", "KernelMissingError", "DeviceError"):
        pytest.skip("needs a broken compiler, none, or a card")
    code = "\n".join(block.code for block in blocks(page) if block.language == "python")
    assert re.search(rf"\b{name}\b", code)


def environment() -> dict[str, str]:
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": python_path, "FLASHPAGE_PROGRESS": "off"}


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(("page", "index"), RANKS)
def test_two_ranks(page: str, index: int, tmp_path: Path) -> None:
    block = blocks(page)[index]
    (tmp_path / "example.py").write_text(block.code)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    done = programs.run(command, cwd=tmp_path, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert block.output is None or done.stdout == block.output


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(("page", "index"), SHELL)
def test_shell_blocks(page: str, index: int, tmp_path: Path) -> None:
    """Lines that call `flashpage`, without more of a shell: programs.py runs them in a tenth of the time."""
    printed = ""
    for line in blocks(page)[index].code.splitlines():
        name, *arguments = shlex.split(line)
        assert name == "flashpage" and not set(line) & set("|&;<>$`"), line
        done = programs.run(["-m", name, *arguments], cwd=tmp_path, env=environment(), timeout=120)
        is_slow = arguments[0] == "selftest" and done.returncode == 3  # other tests run next to it
        assert done.returncode == 0 or is_slow, done.stderr
        printed += done.stdout
    assert blocks(page)[index].output in (None, printed)
