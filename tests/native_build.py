"""Compiles the tests' own C++ against the library's headers, once a session."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from flashpage import host
from flashpage.spec import VariantSpec
from flashpage.variant_source import render

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "-Og", "-fPIC", f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}"]


@functools.cache
def shared_library(source: str, name: str = "", first_include: str = "", flags: tuple[str, ...] = ()) -> Path:
    """tests/native/<source> as a shared library called `name` in a folder of its own.

    Headers in tests/native/<first_include> win over the library's.
    """
    folder = Path(tempfile.mkdtemp(prefix="flashpage-test-"))
    library = folder / (name or Path(source).with_suffix(".so").name)
    first = [f"-I{ROOT / 'tests' / 'native' / first_include}"] if first_include else []
    command = ["g++", *first, *FLAGS, *flags, "-shared", str(ROOT / "tests" / "native" / source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


@functools.cache
def variant_flags(spec: VariantSpec) -> tuple[str, ...]:
    """For sources that include VARIANT: the rendered struct."""
    path = Path(tempfile.mkdtemp(prefix="flashpage-test-")) / "variant.h"
    path.write_text(render(spec))
    return (f'-DVARIANT="{path}"',)


@functools.cache
def asked_tiles(spec: VariantSpec) -> Any:
    """ask_for_tiles(params, args, grid): the kernel that asks this variant's mask function, on the host."""
    flags = variant_flags(spec)
    return ctypes.CDLL(str(shared_library("mask_tiles.cpp", first_include="card", flags=flags))).ask_for_tiles


@functools.cache
def mask_tiles() -> ctypes.CDLL:
    """The kernel of mask tiles on the host, and what follows it."""
    library = ctypes.CDLL(str(shared_library("mask_tiles.cpp", first_include="card")))
    library.tile_cell.restype = ctypes.c_uint32
    return library


@functools.cache
def plan_kernel() -> ctypes.CDLL:
    """The host library's planner on the device, with the kernel itself on the host."""
    library = ctypes.CDLL(str(shared_library("plan_kernel.cpp", first_include="card")))
    library.fp_tables_plan.argtypes = host.load().fp_tables_plan.argtypes
    return library


def check_syntax(code: str, *flags: str) -> None:
    """Passes the code to the compiler; a static_assert that fails is a CalledProcessError with the compiler's text."""
    command = ["g++", *FLAGS, *flags, "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=code, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
