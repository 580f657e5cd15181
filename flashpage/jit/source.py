"""The source of one kernel and its key, a hash of everything in the package that a compile reads."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..base import paths
from ..kernels.spec import KernelSpec
from .compilers import fixed_flags
from .render import include_dirs, render
from .targets import Target

# An include directive with a literal name, as all of the package's are (tests/project/test_layers.py).
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Source:
    """A translation unit, and the key that its binary has in a store."""

    text: str
    key: str


def source_of(spec: KernelSpec, target: Target, options: Sequence[str] = ()) -> Source:
    """Renders the spec; raises CompileError if it has no template.

    The key covers the text, every header of the package that the text reaches, the flags that the package chooses, and
    `options`, those that a user adds to them (compilers.own_options), where the entry is for this user alone.
    It leaves out which compiler is used and its version: any compiler's build of the same source serves. It includes
    the spec, because an entry records one spec and two specs may render to the same text.
    """
    text = render(spec)
    headers = sorted(included(text, include_dirs(spec)).items())
    parts = [spec.digest, target.name, fixed_flags(target), text, headers, *([list(options)] if options else [])]
    return Source(text, hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40])


def key_of(spec: KernelSpec, target: Target, options: Sequence[str] = ()) -> str:
    """The key of a kernel's entry, computed from its source. Store.recall finds an entry without rendering."""
    return source_of(spec, target, options).key


def included(text: str, folders: Sequence[Path] | None = None) -> dict[str, str]:
    """Every header of the include folders (default: the package's) that the text reaches, by its name, with its sha256.

    Directives in comments and in branches that the preprocessor skips count too. System headers do not.
    """
    roots = tuple(map(str, folders or [paths.include_dir()]))
    hashes: dict[str, str] = {}  # by path
    waiting = _resolve(text, None, roots)
    while waiting:
        path = waiting.pop()
        if path not in hashes:
            hashes[path], inner = _read_header(path, _stamp(path), roots)
            waiting += inner
    found: dict[str, str] = {}
    for path, digest in sorted(hashes.items(), key=lambda header: (_name(header[0], roots), header[1])):
        name = _name(path, roots)
        found[name] = found.get(name, "") + digest  # two folders may have headers of the same name
    return found


def _name(path: str, roots: tuple[str, ...]) -> str:
    """A header's path below its include folder, or relative to the last folder if it is in none."""
    return os.path.relpath(path, next((root for root in roots if path.startswith(root + os.sep)), roots[-1]))


def _stamp(path: str) -> tuple[int, ...]:
    """Changes with an edit: a long-lived process, such as a notebook, must not keep an old hash."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.cache
def _read_header(path: str, stamp: tuple[int, ...], roots: tuple[str, ...]) -> tuple[str, list[str]]:
    """The sha256 of a header, and the paths of the headers that it includes. Read once for each stamp."""
    with open(path, "rb") as file:
        content = file.read()
    inner = _resolve(content.decode(errors="replace"), os.path.dirname(path), roots)
    return hashlib.sha256(content).hexdigest(), inner


def _resolve(text: str, folder: str | None, roots: tuple[str, ...]) -> list[str]:
    """The package's headers that a text includes: a quoted name is searched in the text's own folder first, then, like
    a name in brackets, in the folders that compilers get as -I."""
    found = []
    for quoted, bracketed in INCLUDE.findall(text):
        folders = [folder, *roots] if quoted and folder else [*roots]
        candidates = [os.path.normpath(f"{place}/{quoted or bracketed}") for place in folders]
        found += [path for path in candidates if os.path.isfile(path)][:1]
    return found
