r"""Every name that users import can be imported from the place in public_names.txt, wherever its code is now.

The program below wrote the file at commit a48e07a. Its first section is tested here. Moves may change the other two:
"deeper" has names inside of packages and outside of __all__ (flashpage.plan had none: CEILINGS was put there by hand),
"benchmarks" those that only tests/bench imports.

    import ast, importlib, pathlib, re
    top = "decode prefill cascade page pod sparse quantization attention mla utils compat vllm_ops hf engine".split()
    top += "integrations parallel jit errors plan variants ops".split()
    def imported(path):
        text = path.read_text()
        blocks = re.findall(r"```python\n(.*?)```", text, re.S) if path.suffix == ".md" else [text]
        for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
            chain = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flashpage":
                yield from (f"{node.module}:{alias.name}" for alias in node.names)
            elif re.fullmatch(r"flashpage(\.[a-zA-Z]\w*)+", chain):
                yield ":".join(chain.rsplit(".", 1))
    def defined(path):
        for node in ast.parse(path.read_text()).body:
            targets = getattr(node, "targets", [getattr(node, "target", node)])
            yield from (name for t in targets if (name := getattr(t, "name", getattr(t, "id", "_")))[0] != "_")
    package = importlib.import_module("flashpage")
    users = {f"flashpage:{name}" for name in (*package.__all__, *package._SUBMODULES, *top)}
    inner = set()
    for name in top:
        module = importlib.import_module(f"flashpage.{name}")
        own = list(defined(pathlib.Path(module.__file__)))
        users |= {f"flashpage.{name}:{public}" for public in getattr(module, "__all__", own)}
        inner |= {f"flashpage.{name}:{public}" for public in own}
        for path in pathlib.Path("flashpage", name).glob("[!_]*.py"):
            inner |= {f"flashpage.{name}.{path.stem}:{public}" for public in defined(path)}
    users |= {line for name in ("README.md", "CONTRIBUTING.md") for line in imported(pathlib.Path(name))}
    bench = {line for path in pathlib.Path("tests/bench").glob("*.py") for line in imported(path)}
    for title, lines in (("users", users), ("deeper", inner - users), ("benchmarks", bench - users - inner)):
        print(f"# {title}", *sorted(lines), sep="\n")
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import programs
import pytest

_TEXT = Path(__file__).with_name("public_names.txt").read_text()
SECTIONS = {lines[0]: lines[1:] for lines in map(str.split, _TEXT.split("# ")[1:])}


def test_the_list_is_whole() -> None:
    """An empty or misread section would test nothing."""
    assert list(SECTIONS) == ["users", "deeper", "benchmarks"]
    assert len(SECTIONS["users"]) == len(set(SECTIONS["users"])) > 150


@pytest.mark.parametrize("line", SECTIONS["users"])
def test_public_name(line: str) -> None:
    module, _, name = line.partition(":")
    try:
        exec(f"from {module} import {name}", {})
    except ModuleNotFoundError as error:
        package = (error.name or "flashpage").partition(".")[0]
        if package == "flashpage" or importlib.util.find_spec(package):
            raise
        pytest.skip(f"no {package}")


@pytest.mark.parametrize("name", ["errors", "engine", "integrations", "hf", "torch_attention"])
def test_front_doors_are_found_at_first_use(name: str) -> None:
    """In a process that has imported nothing else."""
    if name == "hf":
        pytest.importorskip("transformers")
    done = programs.run(["-c", f"import flashpage; flashpage.{name}; assert {name!r} in vars(flashpage)"])
    if "install torch 2.11 or newer" not in done.stderr:
        assert done.returncode == 0, done.stderr
