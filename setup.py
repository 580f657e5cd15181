"""Builds the host library with g++ alone and puts headers and templates into the wheel.

`python setup.py build_host` builds flashpage/lib/libflashpage.so in a checkout (only what changed).
`pip wheel --no-build-isolation --config-settings=--build-option=--aot=all .` makes a wheel with the kernels of
aot/specs.py; instead of all: names of targets (`--aot=sm_90a,avx512`), or a program's manifest of its kernels
(`--aot=used.json`).
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
COMPILE = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{ROOT / 'include'}"]
COMPILE += [f"-I{ROOT / 'csrc'}"]
COMPILE += ["-fno-trapping-math"]  # nobody reads the floating-point flags, and loops with a choice vectorise
# One library for every distribution: the C++ runtime inside, only libc, libdl and libpthread outside.
LINK = ["-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--no-undefined", "-Wl,-z,nodelete", "-s"]
LINK += [f"-Wl,--version-script={ROOT / 'csrc' / 'exports.map'}"]
LIBRARIES = ["-ldl", "-lpthread"]


def build_library(library: Path, objects: Path) -> None:
    """Compiles csrc/*.cpp side by side, leaving up-to-date objects alone, and links; publishes by rename."""
    compiler = shlex.split(os.environ.get("FLASHPAGE_CXX") or os.environ.get("CXX") or "g++")
    objects.mkdir(parents=True, exist_ok=True)
    with open(objects / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        headers = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("include/flashpage/*.h")]
        headers += [p for folder in ("common", "plan") for p in ROOT.glob(f"include/flashpage/{folder}/*.h")]
        newest = max(p.stat().st_mtime for p in [*headers, Path(__file__)])
        sources = sorted(ROOT.glob("csrc/**/*.cpp"))
        targets = [objects / f"{source.stem}.o" for source in sources]
        stale = [
            (source, target)
            for source, target in zip(sources, targets, strict=True)
            if not target.exists() or target.stat().st_mtime <= max(newest, source.stat().st_mtime)
        ]
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda pair: _compile(compiler, *pair), stale))
        library.parent.mkdir(parents=True, exist_ok=True)
        if stale or not library.exists():
            with tempfile.TemporaryDirectory(dir=library.parent) as private:
                linked = Path(private) / library.name
                _run([*compiler, *LINK, *map(str, targets), *LIBRARIES, "-o", str(linked)])
                linked.replace(library)


def _compile(compiler: list[str], source: Path, target: Path) -> None:
    partial = target.with_suffix(".tmp")
    _run([*compiler, *COMPILE, "-c", str(source), "-o", str(partial)])
    partial.replace(target)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        sys.exit(f"{command[0]} is missing: install g++ (11 or newer), or name a compiler in FLASHPAGE_CXX")
    except subprocess.CalledProcessError as error:
        sys.exit(f"the host library did not build: `{shlex.join(command)}` exited with {error.returncode}")


def build_kernels(which: str) -> None:
    """Brings flashpage/aot_kernels up to date, by the package itself in a process of its own."""
    command = [sys.executable, "-m", "aot.build"]
    if which.endswith(".json"):
        command += ["--manifest", which]
    elif which != "all":
        command += [f"--target={target}" for target in which.split(",")]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(
            "--aot: not all kernels were built (it needs --no-build-isolation and flashpage's dependencies installed)"
        )


def _paths_module():
    """flashpage/base/paths.py alone: the package itself needs the library that is being built."""
    spec = importlib.util.spec_from_file_location("flashpage_paths", ROOT / "flashpage" / "base" / "paths.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildHost(Command):
    """The host library, in the checkout."""

    description = "build flashpage/lib/libflashpage.so in place"
    user_options = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        build_library(ROOT / "flashpage" / "lib" / "libflashpage.so", ROOT / "build" / "host")


class BuildPackage(build_py):
    """The Python files, and next to them the library, headers, templates and the frozen hash of all sources."""

    def run(self) -> None:
        self.run_command("build_host")
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "flashpage"
        shutil.rmtree(package, ignore_errors=True)  # what an earlier build left would be shipped
        super().run()
        (package / "lib").mkdir(parents=True)
        shutil.copy2(ROOT / "flashpage" / "lib" / "libflashpage.so", package / "lib")
        for folder in ("include", "templates"):
            shutil.copytree(ROOT / folder, package / folder)
        digest = _paths_module().hash_sources(ROOT / "flashpage", ROOT / "include", ROOT / "templates")
        info = {"version": self.distribution.get_version(), "fingerprint": digest}
        (package / "_build_info.json").write_text(json.dumps(info) + "\n")
        if self.distribution.aot:
            build_kernels(self.distribution.aot)
            shutil.copytree(ROOT / "flashpage" / "aot_kernels", package / "aot_kernels")


class BuildWheel(bdist_wheel):
    """One wheel for every Python and every torch version."""

    user_options = [
        *bdist_wheel.user_options,
        ("aot=", None, "ship kernels: all, names of targets, or a manifest.json"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.aot = ""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.distribution.aot = self.aot

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", "linux_x86_64"


class PlatformDistribution(Distribution):
    """Not pure: the wheel goes to platlib."""

    aot = ""

    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_host": BuildHost, "build_py": BuildPackage, "bdist_wheel": BuildWheel},
)
