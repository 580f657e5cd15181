"""Imports and includes go one way. Folders are the rooms; the tables below only order them."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "include" / "flashpage"
PACKAGE = ROOT / "flashpage"
MAX_LINES = 400
LONG_FILES = {
    "flashpage/native/structs.py": "written by csrc/abi_structs.py",
}  # path: the reason why the file is one concept

# Python, from the top. A room imports the rooms below its row; the rooms of one row do not import each other.
ROOMS = [
    {"cli"},
    {"demo", "selftest"},
    {"watch"},
    {"engines", "serving"},
    {"parallel"},
    {"wrappers"},
    {"run"},
    {"plan"},
    {"jit"},
    {"kernels"},
    {"variants"},
    {"native"},
    {"base"},
]
FRONT_DOOR_LINES = 45  # lines of a docstring, imports and __all__
IMPORTS_FRONT_DOORS = {"flashpage.selftest.cases": "it checks what users call"}
IMPORTS_BY_NAME = {  # modules that compute the names of their imports, which this test cannot read
    "flashpage": "names are found at first use",
    "flashpage.cli": "a command's module is imported when it is given",
    "flashpage.watch.calls": "the front doors, whose public names it wraps",
    "flashpage.watch.replay": "the front door of a kept call's public name",
    "flashpage.engines.overlay": "modules of other packages are served by front doors, which their facades name",
}

# C++: folders of include/flashpage from the top, read like the rooms of Python.
HEADER_FOLDERS = [{"kernels"}, {"cpu", "tile"}, {"formats"}, {"params"}, {"plan", "ptx"}, {"common"}]
TILE_FOLDERS = {"layout", "load", "mask", "merge", "product", "rope", "softmax"}
# Sources of csrc/: those at its root may use every folder, and every folder may use the headers at its root.
CSRC_FOLDERS = [{"plan"}, {"cuda"}, {"cpu"}]


def rank(name: str, rows: list[set[str]]) -> int | None:
    """The row of a room, 0 on top."""
    return next((i for i, row in enumerate(rows) if name in row), None)


def wrong_way(source: str, target: str, rows: list[set[str]]) -> str:
    """Why `source` must not use `target`; empty if it may."""
    above, below = rank(source, rows), rank(target, rows)
    assert above is not None and below is not None, f"{source if above is None else target} is in no row: add it"
    if source == target or above < below:
        return ""
    return f"{target} lies above {source}" if below < above else f"{target} lies next to {source}"


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of a circle in their order; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


# ---------------------------------------------------------------- C++


def headers(folder: str) -> list[Path]:
    found = HEADERS.glob("*.h") if folder == "." else (HEADERS / folder).rglob("*.h")
    return sorted(found)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def header_graph() -> dict[str, set[str]]:
    """Headers of the package by their name in includes, and the includes of each."""
    paths = {f"flashpage/{path.relative_to(HEADERS).as_posix()}": path for path in HEADERS.rglob("*.h")}
    return {name: {to for to in includes(path) if to.startswith("flashpage/")} for name, path in paths.items()}


def test_every_header_folder_is_known() -> None:
    assert {path.name for path in HEADERS.iterdir()} == set().union(*HEADER_FOLDERS)
    assert {path.name for path in (HEADERS / "tile").iterdir() if path.is_dir()} <= TILE_FOLDERS
    homes = {path.stem for path in (PACKAGE / "kernels").glob("*.py")}
    assert {path.name for path in (HEADERS / "kernels").iterdir() if path.is_dir()} <= homes, "a kernel has one home"


def test_headers_include_downwards() -> None:
    for name, included in header_graph().items():
        folder = name.split("/")[1]
        for other in included:
            assert (ROOT / "include" / other).exists(), f"{name} includes {other}, which is not there"
            why = wrong_way(folder, other.split("/")[1], HEADER_FOLDERS)
            assert not why, f"{name} includes {other}: {why}"


def test_kernels_do_not_include_each_other() -> None:
    """Code that several kernels share is in tile/, or at the root of kernels/, whose files use no kernel."""
    for name, included in header_graph().items():
        for other in included:
            if name.startswith("flashpage/kernels/") and other.startswith("flashpage/kernels/"):
                own, others = name.split("/")[2], other.split("/")[2]
                assert own == others or others.endswith(".h"), f"{name} includes {other}: share it through tile/"


def test_headers_include_in_no_circle() -> None:
    circle = find_circle(header_graph())
    assert not circle, " includes ".join(circle)


def test_device_code_includes_no_library() -> None:
    """Only the host's folders use the standard library's headers: cpu, plan and kernels/cpu_NAME."""
    for path in HEADERS.rglob("*.h"):
        foreign = [name for name in includes(path) if not name.startswith("flashpage/")]
        folder, inner = path.relative_to(HEADERS).parts[:2]
        is_of_host = folder in ("cpu", "plan") or (folder == "kernels" and inner.startswith("cpu_"))
        assert is_of_host or not foreign, f"{path.relative_to(ROOT)} includes {foreign}"


def test_sources_include_downwards() -> None:
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in (".h", ".cpp"):
            continue
        parts = path.relative_to(ROOT / "csrc").parts
        for other in includes(path):
            if "/" not in other or other.startswith("flashpage/") or not (ROOT / "csrc" / other).exists():
                continue
            folder = other.split("/")[0]
            if len(parts) == 1:
                assert path.suffix == ".cpp", f"csrc/{parts[0]} includes {other}: the ABI's headers use no folder"
            else:
                why = wrong_way(parts[0], folder, CSRC_FOLDERS)
                assert not why, f"csrc/{'/'.join(parts)} includes {other}: {why}"


def test_planner_headers_know_no_cuda() -> None:
    for path in headers("plan"):
        assert not re.search(r"__CUDA|__device__|cuda", path.read_text()), path.relative_to(ROOT)


ASM = re.compile(r"\b(asm|__asm__)\b\s*(volatile)?\s*\(")
ASM_WRITERS = ["flashpage/kernels/wgmma_source.py"]  # it renders wgmma, whose registers must be named one by one


def test_asm_stands_in_ptx_alone() -> None:
    """Only headers of ptx/ have inline assembly, and one Python module, for what C++ templates cannot write."""
    csrc = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".py")]
    sources = [*HEADERS.rglob("*.h"), *csrc, *(ROOT / "templates").glob("*.jinja")]
    with_asm = [path for path in sources if ASM.search(path.read_text())]
    assert with_asm, "no asm found at all: the pattern above matches nothing"
    assert all(path.parent.name == "ptx" for path in with_asm), with_asm
    modules = [*PACKAGE.rglob("*.py"), *(ROOT / "aot").rglob("*.py")]
    writers = [path.relative_to(ROOT).as_posix() for path in modules if any(ASM.search(text) for text in strings(path))]
    assert writers == ASM_WRITERS


def strings(path: Path) -> list[str]:
    """Every string literal of a module, including the parts of f-strings."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_include_has_a_literal_name() -> None:
    """The scanner that finds a kernel's headers (jit/source.py) does not expand macros."""
    from flashpage.jit.source import INCLUDE

    sources = [*HEADERS.rglob("*.h"), *(ROOT / "templates").glob("*.jinja")]
    lines = [line for path in sources for line in path.read_text().splitlines() if re.match(r"\s*#\s*include", line)]
    assert lines
    assert [line for line in lines if not INCLUDE.match(line)] == []


def test_templates_include_the_package_alone() -> None:
    for path in (ROOT / "templates").glob("*.cu.jinja"):
        foreign = {name for name in includes(path) if not name.startswith("flashpage/")}
        assert foreign <= {"{{ kernel.header }}"}, f"{path.name} includes {foreign}"


def test_templates_hold_no_logic() -> None:
    for path in (ROOT / "templates").glob("*.jinja"):
        text = path.read_text()
        assert len(text.splitlines()) <= 45, path.name
        assert "{%" not in text, f"{path.name}: a choice is a field of the spec"


# ---------------------------------------------------------------- Python


def module_of(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if "aot_kernels" not in path.parts}


def imported(name: str, modules: dict[str, Path] = MODULES) -> set[str]:
    """The package's modules that a module imports, anywhere in the file and also for type checkers."""
    path, found = modules[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in modules else source for a in node.names}
    return {other for other in found if other in modules} - {name}


def room_of(name: str) -> str:
    """A module's folder; empty for modules at the package's root."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ""


def shown(name: str) -> str:
    return MODULES[name].relative_to(ROOT).as_posix()


@functools.cache
def module_graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {name: imported(name) for name in MODULES}


def test_every_room_is_known() -> None:
    """Every folder has a place in ROOMS."""
    assert {room_of(name) for name in MODULES if room_of(name)} == set().union(*ROOMS)


@pytest.mark.parametrize("name", [name for name in MODULES if room_of(name)], ids=lambda name: shown(name))
def test_modules_import_downwards(name: str) -> None:
    for other in sorted(module_graph()[name]):
        if not room_of(other):
            assert name in IMPORTS_FRONT_DOORS, f"{shown(name)} imports {shown(other)}: import what it re-exports"
            continue
        why = wrong_way(room_of(name), room_of(other), ROOMS)
        assert not why, f"{shown(name)} imports {shown(other)}: {why}"


def test_modules_import_in_no_circle() -> None:
    circle = find_circle({name: others for name, others in module_graph().items() if room_of(name)})
    assert not circle, " imports ".join(shown(name) for name in circle)


@pytest.mark.parametrize(
    "line",
    [
        "from .b import thing",
        "from . import b",
        "from . import thing",
        "from ..plan import b",
        "from .. import plan",
        "import flashpage.plan.b",
        "from flashpage.plan.b import thing",
        "if TYPE_CHECKING:\n    from .b import thing",
        "def late():\n    from .b import thing",
    ],
)
def test_a_circle_is_seen_however_it_is_written(line: str, tmp_path: Path) -> None:
    texts = {"__init__": "", "plan/__init__": "from .b import thing", "plan/a": line, "plan/b": "from .a import other"}
    modules = {}
    for name, text in texts.items():
        path = tmp_path / "flashpage" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        modules[module_of(path, tmp_path)] = path
    graph = {name: imported(name, modules) for name in modules}
    assert {"flashpage.plan.a", "flashpage.plan.b"} <= set(find_circle(graph))
    modules["flashpage.plan.a"].write_text(f"text = {line!r}")
    assert not find_circle({name: imported(name, modules) for name in modules})


def test_imports_are_written_as_imports() -> None:
    by_name = re.compile(r"\b(import_module|__import__)\(")
    assert {name for name, path in MODULES.items() if by_name.search(path.read_text())} == set(IMPORTS_BY_NAME)


def test_exceptions_are_still_needed() -> None:
    for name in IMPORTS_FRONT_DOORS:
        assert any(not room_of(other) for other in module_graph()[name]), (
            f"{name} imports no front door: remove it from the list"
        )


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_the_root_holds_front_doors(path: Path) -> None:
    if path.name in ("__init__.py", "__main__.py"):
        return
    text = path.read_text()
    docstring, *body = ast.parse(text).body
    assert isinstance(docstring, ast.Expr)
    for node in body:
        is_all = isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
        assert is_all or isinstance(node, ast.ImportFrom), (
            f"flashpage/{path.name}:{node.lineno} is neither an import nor __all__: give it a place in a room"
        )
    assert len(text.splitlines()) <= FRONT_DOOR_LINES


def reachable(name: str) -> set[str]:
    found, left = set(), [name]
    while left:
        for other in module_graph()[left.pop()] - found:
            found.add(other)
            left.append(other)
    return found


def test_a_kernels_identity_needs_no_library() -> None:
    """Builds name kernels without the host library, and compile from a spec alone."""
    assert not [name for name in reachable("flashpage.kernels.spec") if room_of(name) == "native"]
    choosing = {"flashpage.kernels.options", "flashpage.kernels.choose"}
    for name, others in module_graph().items():
        assert room_of(name) != "jit" or not choosing & others, f"{shown(name)} imports {choosing & others}"


def test_a_kernel_is_named_in_its_home_alone() -> None:
    """Other rooms take attention kernels from the list, and read their differences from the record's fields."""
    from flashpage.kernels import ATTENTION

    homes = {f"flashpage.kernels.{kernel.name}" for kernel in ATTENTION}
    assert homes <= set(MODULES)
    for name, path in MODULES.items():
        imports = set() if room_of(name) == "kernels" else homes & module_graph()[name]
        assert not imports, f"{shown(name)} imports {imports}: a field of AttentionKernel?"
        if name not in homes:
            named = {kernel.name for kernel in ATTENTION} & set(strings(path))
            assert not named, f"{shown(name)} names {named}: a field of AttentionKernel?"


def test_only_flashinfers_classes_are_adapters() -> None:
    """All else plans and runs by wrappers/base.py, and has none of the private names that engines read and write."""
    wrappers = "flashpage.wrappers."
    names = ("adapter", "prefill_base", "paged_decode", "paged_prefill", "ragged_prefill", "sinks", "latent")
    adapters = {wrappers + name for name in names}
    access = {name for name in MODULES if name.startswith(wrappers + "engine_access")}
    for name in module_graph().keys() - adapters - access:
        used = module_graph()[name] & (adapters | access)
        assert not room_of(name) or not used, f"{shown(name)} imports {used}: use Attention of wrappers/base.py"


def test_aot_sees_only_what_compiles() -> None:
    for path in (ROOT / "aot").glob("*.py"):
        for room in re.findall(r"^\s*(?:from|import) flashpage(?:\.(\w+))?", path.read_text(), re.MULTILINE):
            assert room in ("base", "jit", "kernels", "variants"), f"aot/{path.name} imports flashpage.{room}"


# ---------------------------------------------------------------- tests and sizes


def test_test_helpers_are_in_support() -> None:
    """Tests import tests/support and the package, but no other test."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if "bench" not in path.parts]
    tests = {path.stem for path in paths if path.stem.startswith("test_")}
    for path in paths:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        used = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        used |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        taken = tests & {part for name in used for part in name.split(".")}
        assert not taken, f"{path.relative_to(ROOT)} imports {', '.join(taken)}: move what they share to tests/support"
        is_helper = not path.stem.startswith("test_") and path.name != "conftest.py" and "support" not in path.parts
        assert not is_helper or '__name__ == "__main__"' in path.read_text(), (
            f"{path.relative_to(ROOT)} is neither a test nor a program: move it to tests/support"
        )


def test_files_are_short() -> None:
    """A longer file holds a second concept."""
    folders = ("include", "csrc", "flashpage", "templates", "aot", "tests")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".h", ".cpp", ".py", ".jinja")
    ]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert set(long) <= set(LONG_FILES), {path: n for path, n in long.items() if path not in LONG_FILES}
    assert set(LONG_FILES) <= set(long), "a file is short again: remove it from the list"
