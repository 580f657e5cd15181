"""Hooks of `make docs`: every public name stands in the reference and has a docstring, and so have its methods.
Links to files at the root, which readers of the sources can follow, become names of files.

Public are the names in `__all__` of the modules below. Names that are refused (flashpage/base/refused.py) stand in
coming-from/flashinfer.md instead, as a test holds.
"""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import Any

import griffe

log = logging.getLogger("mkdocs.hooks.public_names")  # strict mode fails on warnings of mkdocs' loggers

ROOT = Path(__file__).resolve().parent.parent
MODULES = """
    attention cascade compat decode engine errors flash_attn flash_mla hf integrations jit log mla ops page parallel
    plan pod prefill quantization sparse timeline torch_attention utils variants vllm_ops
""".split()  # noqa: SIM905


def public_names(module: str) -> list[str]:
    """`__all__` of a front door."""
    path = ROOT / "flashpage" / f"{module}.py"
    tree = ast.parse((path if path.exists() else ROOT / "flashpage" / module / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"flashpage/{module} has no __all__")


def refused_names() -> set[str]:
    """The keys of REASONS."""
    for node in ast.parse((ROOT / "flashpage" / "base" / "refused.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REASONS":
            return {ast.literal_eval(key) for key in node.value.keys}  # type: ignore[attr-defined]
    raise ValueError("flashpage/base/refused.py has no REASONS")


def without_docstring(name: str, item: Any) -> list[str]:
    """The object itself and its public methods and properties; an override may take its base's docstring."""
    item = item.final_target if item.is_alias else item
    missing = [] if item.docstring or not (item.is_class or item.is_function) else [name]
    if not item.is_class:
        return missing
    for key, member in item.all_members.items():
        member = member.final_target if member.is_alias else member
        is_method = member.is_function or "property" in member.labels
        bases = [base.members[key] for base in item.mro() if key in base.members]
        if not key.startswith("_") and is_method and not any(m.docstring for m in (member, *bases)):
            missing.append(f"{name}.{key}")
    return missing


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """`[text](../SECURITY.md)` becomes `SECURITY.md`: the built pages hold docs/ alone."""
    return re.sub(r"\[[^\]]+\]\((?:\.\./)+([A-Z]+\.(?:md|cff))(?:#[\w-]+)?\)", r"`\1`", markdown)


def on_files(files: Any, config: Any) -> None:
    """Warns of each public name that the reference lacks, and of each that has no docstring."""
    package = griffe.load("flashpage", search_paths=[str(ROOT)], resolve_aliases=True)
    pages = [file for file in files.documentation_pages() if file.src_uri.startswith("reference/")]
    shown = set(re.findall(r"^::: (\S+)$", "\n".join(page.content_string for page in pages), re.MULTILINE))
    for module in MODULES:
        for name in set(public_names(module)) - refused_names():
            path = f"flashpage.{module}.{name}"
            if path not in shown:
                log.warning(f"{path} is public but stands in no page of docs/reference")
            for missing in without_docstring(path, package[f"{module}.{name}"]):
                log.warning(f"{missing} has no docstring")
