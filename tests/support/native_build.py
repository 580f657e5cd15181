"""Compiles the tests' own C++ against the library's headers; builds are kept for later sessions."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from flashpage import kernels, native
from flashpage.base import env, paths
from flashpage.jit.compilers import fixed_flags
from flashpage.jit.targets import host_target
from flashpage.kernels.spec import KernelSpec, VariantSpec
from flashpage.variants.source import render

ROOT = Path(__file__).resolve().parents[2]
# -Og compiles little faster, and its code takes twice as long; compiling with -O2 costs more than all runs.
# Builds with _FORTIFY_SOURCE, the default of some systems, abort when longjmp changes to another fiber's stack.
# Without -fno-gnu-unique, libraries would share variables of the same name, such as the emulated card's barriers.
FLAGS = [
    "-std=c++20",
    "-O1",
    "-U_FORTIFY_SOURCE",
    "-fno-gnu-unique",
    "-fPIC",
    f"-I{ROOT / 'include'}",
    f"-I{ROOT / 'csrc'}",
]
FOLDER = "FLASHPAGE_TEST_BUILDS"  # environment variable: the folder of all builds, equal in all processes
QUICK_CXX = shlex.quote(str(Path(__file__).with_name("quick_cxx")))  # a value of FLASHPAGE_CXX
KEPT_SECONDS = 14 * 86400  # builds that no session has used for this long are removed


def share_builds() -> None:
    """Chooses the folder of builds, in the process that starts all others, and removes old builds."""
    if FOLDER in os.environ:
        return
    folder = env.cache_dir().with_name("flashpage-tests")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(folder)
    for build in folder.iterdir():
        if build.stat().st_mtime < time.time() - KEPT_SECONDS:
            shutil.rmtree(build, ignore_errors=True)


def quick_builds() -> dict[str, str]:
    """Environment variables with which kernels of the CPU compile at -Og, their headers precompiled for this machine's
    level, into a folder that only tests read."""
    flags = [flag for flag in fixed_flags(host_target())["g++"] if flag != "-shared" and not flag.startswith("-static")]
    command = ["g++", *("-Og" if flag == "-O3" else flag for flag in flags), f"-I{paths.include_dir()}"]
    text = "".join(f'#include "flashpage/{name}.h"\n' for name in ("cpu/attention", "params/variant"))
    prelude = _written(folder_of(text, *command) / "prelude.h", text)
    _built("prelude.h.gch", [*command, "-x", "c++-header", str(prelude)], prelude.parent)
    return {
        "FLASHPAGE_CXX": QUICK_CXX,
        "FLASHPAGE_CACHE_DIR": str(Path(os.environ[FOLDER]) / "quick-kernels"),
        "FLASHPAGE_TEST_PRELUDE": str(prelude),
        "FLASHPAGE_TEST_HEADERS": str(paths.include_dir()),
    }


@functools.cache
def _sources() -> str:
    """Hash of every file that a build may include, and of the compiler."""
    digest = hashlib.sha256(subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout)
    for folder in ("include", "csrc", "tests/native"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def folder_of(*words: str) -> Path:
    """The folder of the build with these words and the present sources."""
    key = hashlib.sha256("\0".join((_sources(), *words)).encode()).hexdigest()[:16]
    share_builds()
    folder = Path(os.environ[FOLDER], key)
    folder.mkdir(exist_ok=True)
    os.utime(folder)
    return folder


@functools.cache
def shared_library(source: str, name: str = "", first_include: str = "", flags: tuple[str, ...] = ()) -> Path:
    """tests/native/<source> as a shared library called `name` in its own folder.

    Headers in tests/native/<first_include> win over the library's.
    """
    name = name or Path(source).with_suffix(".so").name
    first = [f"-I{ROOT / 'tests' / 'native' / first_include}"] if first_include else []
    compiler = ["g++", *first, *FLAGS]
    path = str(ROOT / "tests" / "native" / source)
    if flags:  # such a source is built many times
        flags = ("-include", str(_prelude(source, tuple(compiler))), *flags)
    return _built(name, [*compiler, *flags, "-shared", path])


@functools.cache
def _prelude(source: str, compiler: tuple[str, ...]) -> Path:
    """A header of what tests/native/<source> includes, precompiled: a fifth of a build is reading headers."""
    lines = (ROOT / "tests" / "native" / source).read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if line.startswith('#include "'))
    header = _written(folder_of(text, *compiler) / "prelude.h", text)
    _built("prelude.h.gch", [*compiler, "-x", "c++-header", str(header)], header.parent)
    return header


def _built(name: str, command: list[str], folder: Path | None = None) -> Path:
    """The file that the command writes after -o, built by one process while others wait for it."""
    built = (folder or folder_of(name, *command)) / name
    with open(built.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            partial = built.with_name("partial")
            subprocess.run([*command, "-o", str(partial)], check=True)
            partial.rename(built)
    return built


@functools.cache
def variant_flags(spec: VariantSpec) -> tuple[str, ...]:
    """A build for sources that include VARIANT, the rendered struct."""
    return _included("VARIANT", render(spec))


@functools.cache
def traits_flags(spec: KernelSpec) -> tuple[str, ...]:
    """A build for sources that include TRAITS, the rendered structs of a kernel."""
    kernel = kernels.find(spec.kernel)
    assert kernel is not None
    lines = "\n".join(kernel.traits(spec))
    headers = (word for header in spec.format_headers for word in ("-include", header))
    return (*_included("TRAITS", f"{render(spec.variant)}\nstruct Traits {{\n{lines}\n}};\n"), *headers)


def _included(macro: str, text: str) -> tuple[str, ...]:
    """A build for sources that include the text as the file that the macro names."""
    return (f'-D{macro}="{_written(folder_of(text) / "included.h", text)}"',)


def _written(path: Path, text: str) -> Path:
    """The file with this text. Threads and processes that write it at the same time write files of their own first."""
    if not path.exists():
        partial = path.with_name(f"partial-{os.getpid()}-{threading.get_ident()}.h")
        partial.write_text(text)
        partial.rename(path)
    return path


@functools.cache
def function_tiles(spec: VariantSpec) -> Any:
    """The kernel that finds the tiles of this variant's mask, on the host, as function(params, args, grid)."""
    flags = variant_flags(spec)
    return ctypes.CDLL(str(shared_library("mask_tiles.cpp", first_include="card", flags=flags))).find_function_tiles


@functools.cache
def mask_tiles() -> ctypes.CDLL:
    """The kernel of mask tiles and the kernel after it, on the host."""
    library = ctypes.CDLL(str(shared_library("mask_tiles.cpp", first_include="card")))
    library.quad_at.restype = ctypes.c_int64
    library.tile_cell.restype = ctypes.c_uint32
    return library


@functools.cache
def gather_rows() -> Any:
    """gather_rows(params, grid): the kernel on the host."""
    return ctypes.CDLL(str(shared_library("gather_rows.cpp", first_include="hopper"))).gather_rows


@functools.cache
def plan_kernel() -> ctypes.CDLL:
    """The planner for lengths on the device, with the kernel itself on the host."""
    library = ctypes.CDLL(str(shared_library("plan_kernel.cpp", first_include="card")))
    library.fp_tables_plan.argtypes = native.load().fp_tables_plan.argtypes
    return library


def check_syntax(code: str, *flags: str) -> None:
    """Compiles without output; a static_assert that fails is a CalledProcessError with the compiler's text."""
    command = ["g++", *FLAGS, *flags, "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=code, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
