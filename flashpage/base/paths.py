"""Where the package's folders are: next to the package in a checkout (editable install), inside it in a wheel."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]

_SOURCES = (".py", ".h", ".jinja")
_SLACK = 0.1  # seconds by which a file's time may lag the clock
_loading_since = time.time()


def include_dir() -> Path:
    """The folder to give a compiler as -I: it holds flashpage/params/params.h and the rest."""
    return _data_dir("include")


def templates_dir() -> Path:
    """The folder of the jinja2 templates."""
    return _data_dir("templates")


def aot_dir() -> Path:
    """The folder of kernels built ahead of time; it exists only if some were built or shipped."""
    return PACKAGE / "aot_kernels"


def library() -> Path:
    """The host library, libflashpage.so."""
    return PACKAGE / "lib" / "libflashpage.so"


def fingerprint() -> str:
    """hash_sources of this package: stored when a wheel is built, computed once a process in a checkout."""
    return _fingerprint(include_dir(), templates_dir())


@functools.cache
def _fingerprint(include: Path, templates: Path) -> str:
    if (frozen := _build_info()).is_file():
        return json.loads(frozen.read_text())["fingerprint"]
    return hash_sources(PACKAGE, include, templates)


def is_settled() -> bool:
    """Whether the modules in memory are those that `fingerprint` read: no source has changed since they were loaded.

    It compares the time of the inode's last change, which no copy and no checkout can set back.
    """
    if _build_info().is_file():
        return True
    try:
        times = [os.stat(path).st_ctime for _, path in _sources(PACKAGE, include_dir(), templates_dir())]
    except OSError:
        return False
    return max(times) < _loading_since - _SLACK


def hash_sources(*folders: Path) -> str:
    """sha256 over the names and bytes of all files in the folders that could change a kernel's source: modules,
    headers, templates. setup.py calls it with this file loaded alone."""
    digest = hashlib.sha256()
    for name, path in sorted(_sources(*folders)):
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def hash_declarations(root: Path, names: Iterable[str]) -> str:
    """sha256 of the files' lines without indentation and comments; "" if a file is missing."""
    files = [root / name for name in names]
    if not all(file.is_file() for file in files):
        return ""
    lines = [line.partition(b"//")[0].strip() for file in files for line in file.read_bytes().splitlines()]
    return hashlib.sha256(b"\n".join(line for line in lines if line)).hexdigest()


def _sources(*folders: Path) -> Iterator[tuple[str, str]]:
    """Files with names that do not depend on where the folders are. Hidden files are editors' locks and backups."""
    for folder in folders:
        for parent, _, files in os.walk(folder):
            inner = f"{folder.name}{parent[len(str(folder)) :]}"
            for name in files:
                if name.endswith(_SOURCES) and not name.startswith("."):
                    yield f"{inner}/{name}", f"{parent}/{name}"


def _build_info() -> Path:
    """Writes the file with the hash, when setup.py builds a wheel."""
    return PACKAGE / "_build_info.json"


def _data_dir(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name
