"""Where the package's folders are: beside the package in a checkout (editable install), inside it in a wheel."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]

_SOURCES = (".h", ".jinja")
_WRITERS = (
    "kernels/wgmma_source.py",
    "variants/source.py",
    "jit/render.py",
)  # what they write is compiled, so they count as sources


def include_dir() -> Path:
    """The folder to give a compiler as -I: it holds flashpage/params/params.h and the rest."""
    return _data_dir("include")


def templates_dir() -> Path:
    """The folder of the jinja2 templates."""
    return _data_dir("templates")


def aot_dir() -> Path:
    """The folder of kernels built ahead of time; it exists only where some were built or shipped."""
    return PACKAGE / "aot_kernels"


def library() -> Path:
    """The host library, libflashpage.so."""
    return PACKAGE / "lib" / "libflashpage.so"


@functools.cache
def source_hash() -> str:
    """sha256 of what kernels are made from: frozen when a wheel is built, computed once a process in a checkout."""
    if (frozen := PACKAGE / "_build_info.json").is_file():
        return json.loads(frozen.read_text())["source_hash"]
    return hash_sources(include_dir(), templates_dir())


def hash_sources(*folders: Path) -> str:
    """sha256 over the relative names and bytes of all files below the folders, and of the modules that write C++."""
    files = {
        f"{f.name}/{p.relative_to(f).as_posix()}": p for f in folders for p in f.rglob("*") if p.suffix in _SOURCES
    }
    files |= {name: PACKAGE / name for name in _WRITERS}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _data_dir(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name
