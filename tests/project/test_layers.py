"""Imports and includes go one way; the rules are the tables here, and whoever adds a module adds it to its layer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from flashpage.jit.source import INCLUDE

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "include" / "flashpage"
PACKAGE = ROOT / "flashpage"
MAX_LINES = 400
LONG_FILES: dict[str, str] = {}  # path: why it is one concept all the same

# C++: which folders of include/flashpage a folder may include. "." are the files beside the folders.
MAY_INCLUDE = {
    "common": {"common"},
    "plan": {"plan", "common"},
    "ptx": {"ptx", "common"},
    "memory": {"memory", "ptx", "common", "plan", "."},
    "tile": {"tile", "memory", "ptx", "common", "plan", "."},
    "kernels": {"kernels", "tile", "memory", "ptx", "common", "plan", "."},
    "cpu": {"cpu", "common", "plan", "."},
    ".": {".", "ptx", "common", "plan"},
}

# Python: layers from the bottom; a module imports its own layer and those below.
LAYERS = [
    {"dtypes", "errors", "env", "paths"},
    {"spec", "tiles", "host", "plan_bytes", "direct", "arguments", "refused"},
    {
        "products",
        "variants",
        "variant_capture",
        "variant_operations",
        "variant_source",
        "variant_trace",
        "variant_values",
    },
    {"jit"},
    {
        *(
            "problem",
            "contexts",
            "backends",
            "boxes",
            "gathered",
            "lengths",
            "caches",
            "multi_item",
            "row_mask",
            "prepare",
        ),
        *("quantization", "slots", "table_lengths"),
    },
    {"plan", "plan_parts", "plan_picture", "plan_units"},
    {
        *("binding", "capacity", "combination", "engine_plan", "engine_state", "mask_tiles", "ops", "plan_inputs"),
        *("parts", "planner", "run_checks", "wrapper"),
    },
    {
        *("attention", "cascade", "cascade_fold", "cascade_levels", "cascade_prefix", "cascade_window", "decode"),
        *(
            "decode_options",
            "device_plan",
            "jit_module",
            "merge",
            "mla",
            "page",
            "pod",
            "pod_batch",
            "prefill",
            "prefill_common",
            "prefill_paged",
        ),
        *("parallel", "parallel_attention", "parallel_heads", "parallel_layout", "parallel_mask", "parallel_merge"),
        *("prefill_ragged", "single", "sink", "sparse", "sparse_variable", "utils"),
    },
    {
        *("__init__", "compat", "hf", "integrations"),
        *("vllm_attention", "vllm_cache", "vllm_card", "vllm_ops", "vllm_write"),
    },
    {"engine"},
    {"demo", "cli", "__main__"},
]
FORBIDDEN = {  # on top of the layers: (importing module, imported modules)
    "jit": {"wrapper", "problem", "backends"},
    "spec": {"host"},
    "tiles": {"host", "spec"},
}


def headers(folder: str) -> list[Path]:
    found = HEADERS.glob("*.h") if folder == "." else (HEADERS / folder).rglob("*.h")
    return sorted(found)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def test_every_folder_has_a_rule() -> None:
    assert {path.name for path in HEADERS.iterdir() if path.is_dir()} <= set(MAY_INCLUDE)


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_headers_include_downwards(folder: str) -> None:
    for path in headers(folder):
        for name in includes(path):
            if not name.startswith("flashpage/"):
                assert folder in ("cpu", "plan"), (
                    f"{path.relative_to(ROOT)} includes <{name}>: device code sees no other"
                )
                continue
            parts = name.split("/")[1:]
            target = parts[0] if len(parts) > 1 else "."
            assert target in MAY_INCLUDE[folder], (
                f"{path.relative_to(ROOT)} includes {name}: {folder} is below {target}"
            )
            assert (ROOT / "include" / name).exists(), f"{path.relative_to(ROOT)} includes {name}, which is not there"


def test_planner_headers_know_no_cuda() -> None:
    for path in headers("plan"):
        assert not re.search(r"__CUDA|__device__|cuda", path.read_text()), path.relative_to(ROOT)


ASM = re.compile(r"\b(asm|__asm__)\b\s*(volatile)?\s*\(")
ASM_WRITERS = ["kernels/wgmma_source.py"]  # renders wgmma, whose registers must be named one by one


def test_asm_stands_in_ptx_alone() -> None:
    """Inline assembly is in the headers of ptx/. One Python module may write it too, for the instruction that no C++
    template can spell."""
    sources = [*HEADERS.rglob("*.h"), *(ROOT / "csrc").glob("*"), *(ROOT / "templates").glob("*.jinja")]
    with_asm = [path for path in sources if path.is_file() and ASM.search(path.read_text())]
    assert with_asm, "no asm found at all: the pattern above has gone blind"
    assert all(path.parent.name == "ptx" for path in with_asm), with_asm
    modules = [*PACKAGE.rglob("*.py"), *(ROOT / "aot").rglob("*.py")]
    writers = [path.name for path in modules if any(ASM.search(text) for text in strings(path))]
    assert writers == ASM_WRITERS


def strings(path: Path) -> list[str]:
    """Every string literal of a module, the parts of f-strings included."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_include_has_a_literal_name() -> None:
    """The scanner that finds a kernel's headers (jit/source.py) expands no macros."""
    sources = [*HEADERS.rglob("*.h"), *(ROOT / "templates").glob("*.jinja")]
    lines = [line for path in sources for line in path.read_text().splitlines() if re.match(r"\s*#\s*include", line)]
    assert lines
    assert [line for line in lines if not INCLUDE.match(line)] == []


def test_templates_include_the_package_alone() -> None:
    for path in (ROOT / "templates").glob("*.cu.jinja"):
        assert all(name.startswith("flashpage/") for name in includes(path)), path.name


def test_templates_hold_no_logic() -> None:
    for path in (ROOT / "templates").glob("*.jinja"):
        text = path.read_text()
        assert len(text.splitlines()) <= 45, path.name
        assert "{%" not in text, f"{path.name}: what is chosen is a field of the spec"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(name: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if name in layer), None)


def top_name(path: Path) -> str:
    """The module or subpackage of flashpage that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, at any depth of the file, type checking aside."""
    tree = ast.parse(path.read_text())
    package = ["flashpage", *path.relative_to(PACKAGE).parts[:-1]]
    skipped = {id(node) for guard in ast.walk(tree) if _is_type_checking(guard) for node in ast.walk(guard)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("flashpage.")}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {f"{prefix}.{alias.name}" for alias in node.names if prefix.startswith("flashpage")}
    names = {name.split(".")[1] for name in found if name.count(".")}
    return {name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_import_downwards(path: Path) -> None:
    name = top_name(path)
    layer = layer_of(name)
    assert layer is not None, f"flashpage/{name} is in no layer: add it to LAYERS"
    for other in imported(path) - {name}:
        other_layer = layer_of(other)
        assert other_layer is not None, f"flashpage/{other} is in no layer: add it to LAYERS"
        assert other_layer <= layer, f"flashpage/{path.relative_to(PACKAGE)} imports {other}, which is above it"
        assert other not in FORBIDDEN.get(name, ()), f"flashpage/{path.relative_to(PACKAGE)} imports {other}"


def test_aot_sees_only_specs_tiles_and_jit() -> None:
    for path in (ROOT / "aot").glob("*.py"):
        names = re.findall(
            r"^\s*(?:from|import) flashpage(?:\.(\w+))?(?: import ([\w, ]+))?", path.read_text(), re.MULTILINE
        )
        for module, members in names:
            used = {module} if module else {member.strip() for member in members.split(",")}
            assert used <= {"spec", "tiles", "contexts", "jit", "dtypes", "errors", "variants"}, (
                f"{path.name} imports {used}"
            )


def test_files_are_short() -> None:
    """Past this length a file holds a second concept."""
    folders = ("include", "csrc", "flashpage", "templates", "aot", "tests")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".h", ".cpp", ".py", ".jinja")
    ]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert set(long) <= set(LONG_FILES), {path: n for path, n in long.items() if path not in LONG_FILES}
    assert set(LONG_FILES) <= set(long), "a file is short again: take it off the list"
