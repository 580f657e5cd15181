"""Builds the host library with g++ alone and puts headers and templates into the wheel.

`python setup.py build_host` builds flashpage/lib/libflashpage.so and writes flashpage/native/structs.py in a checkout
if they are out of date.
`pip wheel --no-deps --no-build-isolation --config-settings=--build-option=--aot=all .` makes a wheel with the kernels
of aot/specs.py; instead of all: names of targets (`--aot=sm_90a,avx512`), or a program's manifest of its kernels
(`--aot=used.json`).
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    sys.exit("building flashpage needs setuptools 77 or newer: pip install 'setuptools>=77'")

ROOT = Path(__file__).resolve().parent
COMPILE = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{ROOT / 'include'}"]
COMPILE += [f"-I{ROOT / 'csrc'}"]  # for sources in folders of csrc/
COMPILE += ["-fno-trapping-math"]  # the floating-point flags are not read, and loops with a choice vectorise
# Of csrc/plan alone: a plan has the same bits on every host, and on a card (product of common/math.h).
OF_PLANS = ["-ffp-contract=off"]
# One library for every distribution: it contains the C++ runtime and needs only libc, libdl and libpthread.
LINK = ["-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--no-undefined", "-Wl,-z,nodelete", "-s"]
EXPORTS = ROOT / "csrc" / "exports.map"
LINK += [f"-Wl,--version-script={EXPORTS}"]
LIBRARIES = ["-ldl", "-lpthread"]
GLIBC = re.compile(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)")  # versions of symbols, in the table of strings
OLDEST_GLIBC = (2, 17)  # that installers know by this name
MACHINES = {62: "x86_64", 183: "aarch64"}
STRUCTS = ROOT / "flashpage" / "native" / "structs.py"  # written by csrc/abi_structs.py


def build_library(library: Path, objects: Path) -> None:
    """Compiles the out-of-date sources below csrc/ in parallel, links, and replaces the library by a rename.

    Also writes the Python mirrors of its structs, after the compiler has checked their layouts.
    """
    wanted = os.environ.get("FLASHPAGE_CXX") or os.environ.get("CXX") or "g++"
    try:
        compiler = shlex.split(wanted)
    except ValueError as error:
        sys.exit(f"the compiler is {wanted!r} (FLASHPAGE_CXX, CXX): {error}")
    objects.mkdir(parents=True, exist_ok=True)
    started = time.time_ns()
    with open(objects / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        structs, assertions = _abi_structs()
        _write_if_different(objects / "abi_layout.h", assertions)
        command = [*compiler, *COMPILE, f"-I{objects}"]  # csrc/abi.cpp includes abi_layout.h
        sources = sorted((ROOT / "csrc").rglob("*.cpp"))
        targets = [objects / source.relative_to(ROOT / "csrc").with_suffix(".o") for source in sources]
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            commands = [command + (OF_PLANS if source.parent.name == "plan" else []) for source in sources]
            list(pool.map(_compile, commands, sources, targets))
        _link(compiler, targets, library, objects / "link.command")
        _write_sources(objects, targets, library.with_suffix(".sources"), started)
        _write_if_different(STRUCTS, structs)


def _write_sources(objects: Path, targets: list[Path], path: Path, started: int) -> None:
    """Lists the files of the checkout that the library was made from, dated to the build's start. An import warns if
    one of them is newer (flashpage/native/library.py)."""
    files = {EXPORTS, *(file for target in targets for file in _files_read(target.with_suffix(".d")))}
    names = [os.path.relpath(file, ROOT) for file in files if file.is_relative_to(ROOT) and objects not in file.parents]
    path.write_text("\n".join(sorted(names)) + "\n")
    os.utime(path, ns=(started, started))


def _abi_structs() -> tuple[str, str]:
    """The Python module and the C++ header that csrc/abi_structs.py writes."""
    abi_structs = _module(ROOT / "csrc" / "abi_structs.py")
    try:
        return abi_structs.generate(ROOT, _paths_module().hash_declarations(ROOT, abi_structs.SOURCES))
    except abi_structs.UnreadableError as error:
        sys.exit(str(error))


def _write_if_different(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text)
        partial.replace(path)


def _compile(command: list[str], source: Path, target: Path) -> None:
    dependencies = target.with_suffix(".d")
    command = [*command, "-MMD", "-MF", str(dependencies), "-c", str(source), "-o", str(target)]
    record = target.with_suffix(".command")
    if _is_stale(target, command, record, _files_read(dependencies)):
        target.parent.mkdir(parents=True, exist_ok=True)
        _run_recorded(command, record)


def _link(compiler: list[str], targets: list[Path], library: Path, record: Path) -> None:
    partial = library.with_name(f"{library.name}.partial")
    command = [*compiler, *LINK, *map(str, targets), *LIBRARIES, "-o", str(partial)]
    # A partial library was linked by a build that ended before it was published.
    if partial.exists() or _is_stale(library, command, record, [EXPORTS, *targets]):
        library.parent.mkdir(parents=True, exist_ok=True)
        _run_recorded(command, record)
        partial.replace(library)


def _is_stale(product: Path, command: list[str], record: Path, files: list[Path]) -> bool:
    """Whether the product is missing, or another command made it, or a file it is made from is missing or newer."""
    try:
        product.stat()
        if record.read_text() != shlex.join(command):
            return True
        started = record.stat().st_mtime_ns
        return any(file.stat().st_mtime_ns > started for file in files)
    except FileNotFoundError:
        return True


def _files_read(dependencies: Path) -> list[Path]:
    """The files that a compilation read, from the compiler's list; if there is no list, its missing file."""
    if not dependencies.exists():
        return [dependencies]
    words = re.findall(r"(?:\\.|[^\s\\])+", dependencies.read_text().replace("\\\n", " "))
    names = [re.sub(r"\\(.)", r"\1", word).replace("$$", "$") for word in words]  # as make reads them
    return [Path(name) for name in names[1:]]  # after the target


def _run_recorded(command: list[str], record: Path) -> None:
    """Runs a command, then writes its record, dated to the start: a file edited in between is then newer."""
    record.unlink(missing_ok=True)
    started = record.with_name(f"{record.name}.partial")
    started.write_text(shlex.join(command))
    _run(command)
    started.replace(record)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        sys.exit(f"{command[0]} is missing: install g++ (11 or newer), or name a compiler in FLASHPAGE_CXX")
    except subprocess.CalledProcessError as error:
        sys.exit(f"the host library did not build: `{shlex.join(command)}` exited with {error.returncode}")


def build_kernels(which: str) -> None:
    """Updates flashpage/aot_kernels in another process, which imports the package."""
    command = [sys.executable, "-m", "aot.build"]
    if which.endswith(".json"):
        command += ["--manifest", which]
    elif which != "all":
        command += [f"--target={target}" for target in which.split(",")]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(
            "--aot: not all kernels were built (it needs --no-build-isolation and flashpage's dependencies installed)"
        )


def _module(path: Path):
    """Imports one module without its package, which needs the library that is being built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _paths_module():
    return _module(ROOT / "flashpage" / "base" / "paths.py")


def platform_tag(libraries: list[Path]) -> str:
    """The machine that the libraries are for, and the oldest glibc that has all that they need (PEP 600).

    Without libraries, as in an editable install, and without glibc: this machine, which no registry accepts.
    """
    texts = [library.read_bytes() for library in libraries]
    versions = [tuple(map(int, found)) for text in texts for found in GLIBC.findall(text)]
    if not versions:
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    (machine,) = {int.from_bytes(text[18:20], "little") for text in texts}  # e_machine of an ELF file
    major, minor = max([OLDEST_GLIBC, *versions])
    return f"manylinux_{major}_{minor}_{MACHINES[machine]}"


class BuildHost(Command):
    """Builds the host library in the checkout."""

    description = "build flashpage/lib/libflashpage.so in place"
    user_options = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        build_library(ROOT / "flashpage" / "lib" / "libflashpage.so", ROOT / "build" / "host")


class BuildPackage(build_py):
    """Collects the Python files, the library, headers, templates, and a hash of all sources that stays fixed."""

    def run(self) -> None:
        self.run_command("build_host")
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "flashpage"
        shutil.rmtree(package, ignore_errors=True)  # files of an earlier build would be shipped too
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
        folder = Path(self.get_finalized_command("build").build_lib) / "flashpage"
        return "py3", "none", platform_tag(sorted(folder.rglob("*.so")))


class EditableWheel(editable_wheel):
    """An editable install by the checkout's path. Setuptools' import hook would come after a folder named flashpage in
    the folder of the user's script, such as the clone itself, which Python takes for a namespace package."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.mode = "compat"


class PlatformDistribution(Distribution):
    """A distribution with binaries, so that the wheel goes to platlib."""

    aot = ""

    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=PlatformDistribution,
    cmdclass={
        "build_host": BuildHost,
        "build_py": BuildPackage,
        "bdist_wheel": BuildWheel,
        "editable_wheel": EditableWheel,
    },
)
