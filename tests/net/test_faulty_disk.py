"""Every call for a file of a compile fails once: there is a kernel all the same, or an error that names the path;
nothing is left, and the next compile works.

A library that is preloaded (tests/native/faulty_disk.cpp) stands between the process and the C library. Compilers run
without it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import programs
import pytest
from jit_sandbox import Sandbox
from native_build import shared_library

# It copies what is compiled already, or fails where $FAILS names a file that exists.
COMPILER = """#!/bin/sh
for argument; do last=$argument; done
[ "$1" = --version ] && exec echo toy compiler
[ -e "$FAILS" ] && echo "kernel.cpp:1: error: nonsense" && exit 1
exec cp "$BUILT" "$last"
"""
CODE = """
import ctypes, errno, os, re, shutil, sys, warnings
from pathlib import Path
del os.environ["LD_PRELOAD"]  # so that compilers are started as they are without it
from jit_sandbox import Sandbox, toy
from flashpage.errors import CompileError
from flashpage.jit import build, cache, compilers, host_target

folder, scenario = Path(sys.argv[1]), sys.argv[2]
sandbox = Sandbox(folder / "box")
sandbox.redirect()
fails, temporary = Path(os.environ["FAILS"]), Path(os.environ["TMPDIR"])
libc = ctypes.CDLL(None)
libc.faulty_failed.restype = ctypes.c_char_p
count = 2 if scenario == "many" else 1
calls = {"one": range(1000), "fresh": range(40), "many": range(0, 1000, 5), "failing": range(0, 1000, 5)}[scenario]
# Calls that are left out are among those of "one".

def compiled(number):
    return build.build_kernels((toy(i), host_target()) for i in range(number, number + count))

def kinds():
    "Names of files and folders of the cache and TMPDIR, without keys and random parts."
    paths = [*sandbox.cache.rglob("*"), *temporary.rglob("*")]
    names = [re.sub("[0-9a-f]{8,}", "*", str(path.relative_to(folder))) for path in paths]
    return {name for name in names if cache.FAILED not in name}

compiled(1000)
expected = kinds()
for after in calls:
    number = after * count
    if scenario == "fresh":
        shutil.rmtree(sandbox.cache)
    if scenario == "failing":
        fails.touch()
    compilers._version.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        libc.faulty_fail_call(after, str(folder).encode(), errno.ENOSPC)
        results = compiled(number)
        libc.faulty_fail_call(-1, b"", 0)
    fails.unlink(missing_ok=True)
    call, _, path = libc.faulty_failed().decode().partition(" ")
    said = [*(str(r.error) for r in results if r.error), *(str(w.message) for w in caught)]
    print(call, path, said)
    if call and scenario != "failing":
        assert all(result.entry or isinstance(result.error, CompileError) for result in results)
        named = [place for text in said for place in re.findall(f"{folder}[^' ]*", text)]
        is_kept = all(result.entry and result.entry.is_kept for result in results)
        assert is_kept or any(path.startswith(place) for place in named), f"{call} {path}: {said}"
        assert is_kept or "No space left on device" in str(said) or "does not read back" in str(said)
    elif call:
        assert "nonsense" in said[0] or path in said[0], f"{call} {path}: {said}"
    for result in results:
        if result.entry and not result.entry.is_kept:
            shutil.rmtree(result.entry.folder)
    again = compiled(number)
    if kinds() != expected:  # the next compile sweeps what could not be removed
        again += compiled(5000 + number)
    assert all(result.entry and result.entry.is_kept for result in again), f"after {call} {path}: {again}"
    assert kinds() == expected, f"{call} {path} leaves {kinds() - expected}"
    if not call:
        break
assert after > 35, after
"""


@pytest.mark.parametrize("scenario", [pytest.param("one", marks=pytest.mark.rare), "many", "fresh", "failing"])
def test_every_call_for_a_file_of_a_compile_fails_once(tmp_path: Path, scenario: str) -> None:
    sandbox = Sandbox.create(tmp_path / "box")
    sandbox.compiler.write_text(COMPILER)
    (tmp_path / "tmp").mkdir()
    built, source = tmp_path / "built.so", tmp_path / "empty.cpp"
    source.write_text("")
    subprocess.run(["g++", "-shared", "-o", built, source], check=True)
    own = {
        "LD_PRELOAD": str(shared_library("faulty_disk.cpp")),
        "TMPDIR": str(tmp_path / "tmp"),
        "FLASHPAGE_PROGRESS": "off",
        "BUILT": str(built),
        "FAILS": str(tmp_path / "fails"),
    }
    result = programs.run(["-c", CODE, tmp_path, scenario], env=os.environ | sandbox.environment | own)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr}"
