"""Compiles the tests' own C++ against the library's headers; what it built stays for later sessions."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from flashpage import native
from flashpage.base import env
from flashpage.kernels.spec import VariantSpec
from flashpage.variants.source import render

ROOT = Path(__file__).resolve().parents[2]
# -Og compiles little faster and runs for twice as long; what -O2 compiles longer is more than all the runs take.
# Fortified, as some systems' compilers are by default, longjmp takes a fiber's stack for a broken one.
FLAGS = ["-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-fPIC", f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}"]
FOLDER = "FLASHPAGE_TEST_BUILDS"  # an environment variable: the folder of all builds, the same for every process
KEPT_SECONDS = 14 * 86400  # a build that no session used for as long is removed


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


@functools.cache
def _sources() -> str:
    """Digest of every file that a build may include, and of the compiler."""
    digest = hashlib.sha256(subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout)
    for folder in ("include", "csrc", "tests/native"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _folder_of(*words: str) -> Path:
    """The folder of the build that these words and the sources decide."""
    key = hashlib.sha256("\0".join((_sources(), *words)).encode()).hexdigest()[:16]
    share_builds()
    folder = Path(os.environ[FOLDER], key)
    folder.mkdir(exist_ok=True)
    os.utime(folder)
    return folder


@functools.cache
def shared_library(source: str, name: str = "", first_include: str = "", flags: tuple[str, ...] = ()) -> Path:
    """tests/native/<source> as a shared library called `name` in a folder of its own.

    Headers in tests/native/<first_include> win over the library's.
    """
    name = name or Path(source).with_suffix(".so").name
    first = [f"-I{ROOT / 'tests' / 'native' / first_include}"] if first_include else []
    command = ["g++", *first, *FLAGS, *flags, "-shared", str(ROOT / "tests" / "native" / source)]
    library = _folder_of(name, *command) / name
    with open(library.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_name("partial.so")
            subprocess.run([*command, "-o", str(partial)], check=True)
            partial.rename(library)
    return library


@functools.cache
def variant_flags(spec: VariantSpec) -> tuple[str, ...]:
    """For sources that include VARIANT: the rendered struct."""
    struct = render(spec)
    path = _folder_of(struct) / "variant.h"
    if not path.exists():
        partial = path.with_name(f"partial-{os.getpid()}.h")
        partial.write_text(struct)
        partial.rename(path)
    return (f'-DVARIANT="{path}"',)


@functools.cache
def function_tiles(spec: VariantSpec) -> Any:
    """find_function_tiles(params, args, grid): the kernel that asks this variant's mask function, on the host."""
    flags = variant_flags(spec)
    return ctypes.CDLL(str(shared_library("mask_tiles.cpp", first_include="card", flags=flags))).find_function_tiles


@functools.cache
def mask_tiles() -> ctypes.CDLL:
    """The kernel of mask tiles on the host, and what follows it."""
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
    """The host library's planner on the device, with the kernel itself on the host."""
    library = ctypes.CDLL(str(shared_library("plan_kernel.cpp", first_include="card")))
    library.fp_tables_plan.argtypes = native.load().fp_tables_plan.argtypes
    return library


def check_syntax(code: str, *flags: str) -> None:
    """Passes the code to the compiler; a static_assert that fails is a CalledProcessError with the compiler's text."""
    command = ["g++", *FLAGS, *flags, "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=code, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
