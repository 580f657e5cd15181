"""Compilers and their flags: g++ for the CPU, nvcc or NVRTC for CUDA. Each is a command line: source in, binary out."""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..base import env, paths
from ..base.errors import CompileError, SettingError
from . import files
from .targets import CPU_LEVELS, PTX, Target

_NVRTC_SCRIPT = Path(__file__).with_name("nvrtc.py")
_FIRST_CHECKED = 100  # every toolkit that compiles C++20 for cards knows the older ones
_OLDEST_CUDA = 12000  # the first with -std=c++20
_RELEASE = re.compile(r"(?:release |libnvrtc\.so\.)(\d+)(?:\.(\d+))?")  # as Compiler.version has it


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler found on this machine."""

    name: str  # g++ | nvcc | nvrtc
    program: tuple[str, ...]  # what starts it

    @property
    def version(self) -> str:
        """For the entry's record."""
        if self.name == "nvrtc":
            return os.path.basename(os.path.realpath(self.program[-1]))
        return _version(self.program)

    @property
    def is_too_old(self) -> bool:
        """Whether it is of a CUDA without C++20. One that does not say is taken to be new enough."""
        if self.name == "g++":
            return False
        try:
            return 0 < toolkit_version(self.version) < _OLDEST_CUDA
        except OSError:  # no temporary file, or it does not start: a compile reports that
            return False

    @property
    def remark(self) -> str:
        """The version, and why it serves no card if it is too old; for people."""
        return f"{self.version} (no C++20: CUDA 12 or newer is needed)" if self.is_too_old else self.version

    def knows(self, target: Target) -> bool:
        """Whether it compiles for the target. One that does not say is taken to."""
        if self.is_too_old:
            return False
        if not isinstance(target.arch, int) or target.arch < _FIRST_CHECKED:
            return True
        known = known_cards(self)
        return not known or target.arch in known

    def command(self, source: Path, binary: Path, target: Target, include: Sequence[Path] = ()) -> list[str]:
        """Compiles `source` for `target` into `binary`, with headers of `include` (default: the package's). Errors and
        ptxas' report go to stdout and stderr."""
        return [*self.program, *self.flags(target), *self._files(source, binary, include or [paths.include_dir()])]

    def flags(self, target: Target) -> list[str]:
        """The flags that the entry records: all but the names of files and folders."""
        if self.name == "g++":
            # Contraction is what CUDA does too; the math flags drop errno and traps, not NaN and infinity.
            math = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
            assert isinstance(target.arch, str)
            features = [f"-m{feature}" for feature in CPU_LEVELS[target.arch] if feature != "neon"]  # needs no flag
            if features:  # undoes a -march of FLASHPAGE_CXX: the level's features, and no others
                features.insert(0, f"-march={'x86_64' if self._is_zig else 'x86-64'}")
            runtime = ["-static-libstdc++", "-static-libgcc"]  # a wheel's kernels run on any distribution
            return ["-std=c++20", "-O3", "-fPIC", "-shared", *math, *features, *runtime]
        virtual = target.name.replace("sm_", "compute_")
        if self.name == "nvrtc":
            return ["-std=c++20", "-default-device", f"--gpu-architecture={target.name}", "--ptxas-options=-v"]
        if target.arch == PTX:
            return ["-ptx", "-std=c++20", "-O3", f"-arch={PTX}"]
        return ["-cubin", "-std=c++20", "-O3", f"-gencode=arch={virtual},code={target.name}", "-Xptxas=-v"]

    @property
    def _is_zig(self) -> bool:
        """zig c++ has names of its own for processors."""
        return any(os.path.basename(word) in ("zig", "ziglang") for word in self.program[:3])  # python -m ziglang

    def _files(self, source: Path, binary: Path, include: Sequence[Path]) -> list[str]:
        folders = [f"-I{folder}" for folder in include]
        if self.name == "nvrtc":
            return [*folders, str(source), str(binary)]
        return [*folders, str(source), "-o", str(binary)]


@functools.cache
def _version(program: tuple[str, ...]) -> str:
    """What the compiler says of itself."""
    # The file is no pipe, which a process that the compiler leaves would keep open.
    with files.named(tempfile.gettempdir()), tempfile.TemporaryFile("w+") as file:
        subprocess.run([*program, "--version"], stdout=file, stderr=subprocess.DEVNULL, check=False)
        file.seek(0)
        text = file.read()
    release = re.search(r"release [\d.]+, V[\d.]+", text)  # nvcc
    return release[0] if release else text.partition("\n")[0]


def toolkit_version(compiler: str) -> int:
    """As the driver counts: 13000 is CUDA 13.0. 0 where the compiler's version does not say."""
    found = _RELEASE.search(compiler)
    return 1000 * int(found[1]) + 10 * int(found[2] or 0) if found else 0


def known_cards(compiler: Compiler) -> frozenset[int]:
    """The compute capabilities, times ten, for which it makes cubins; empty if it does not say."""
    try:
        return _listed_cards(compiler)
    except subprocess.CalledProcessError:  # asked again the next time
        return frozenset()
    except OSError as error:
        raise CompileError(f"{compiler.program[0]} does not start: {error}") from error


@functools.cache
def _listed_cards(compiler: Compiler) -> frozenset[int]:
    option = "--list-gpu-code" if compiler.name == "nvcc" else "--list"
    done = subprocess.run([*compiler.program, option], capture_output=True, text=True, check=True)
    return frozenset(int(sm) for sm in re.findall(r"\bsm_(\d+)", done.stdout))


def fixed_flags(target: Target) -> dict[str, list[str]]:
    """The flags of every compiler that may build for a target, found here or not: a part of a kernel's key."""
    names = ("g++",) if target.backend == "cpu" else ("nvcc", "nvrtc")
    return {name: Compiler(name, ()).flags(target) for name in names}


def own_options(target: Target) -> list[str]:
    """The options in FLASHPAGE_CXX, which may change what is compiled: a part of a kernel's key in the cache. The words
    before the first one name the compiler: any compiler's build of the same source serves."""
    try:
        words = env.words("FLASHPAGE_CXX") if target.backend == "cpu" else []
    except SettingError:  # a compile reports it
        return []
    return list(itertools.dropwhile(lambda word: not word.startswith("-"), words))


def find_compiler(target: Target) -> Compiler | None:
    """The first compiler that knows the target, None where this machine has none. FLASHPAGE_CXX and FLASHPAGE_NVCC
    choose."""
    if target.backend == "cpu":
        return find_cxx()
    return next((found for find in (find_nvcc, find_nvrtc) if (found := find()) and found.knows(target)), None)


def may_compile(target: Target) -> bool:
    """Whether a kernel that is not built is compiled here. A variable that names no compiler counts as one: the compile
    reports it."""
    if env.is_off("FLASHPAGE_JIT"):
        return False
    try:
        return find_compiler(target) is not None
    except CompileError:
        return True


def looked_for(target: Target) -> str:
    """The places where find_compiler looked, for a message."""
    if target.backend == "cpu":
        return f"{env.get('FLASHPAGE_CXX') or 'g++'} on PATH (FLASHPAGE_CXX names another C++20 compiler)"
    nvcc = (
        "nvcc (switched off by FLASHPAGE_NVCC)"
        if env.nvcc() is None
        else "nvcc, on PATH or in /usr/local/cuda, with g++"
    )
    found = [f"{compiler.name} is {compiler.remark}" for find in (find_nvcc, find_nvrtc) if (compiler := find())]
    too_old = f"; neither knows {target.name}: {', '.join(found)}" if found else ""
    return f"{nvcc}, and NVRTC (libnvrtc.so of the package nvidia-cuda-nvrtc or of a CUDA toolkit){too_old}"


def find_cxx() -> Compiler | None:
    """The C++ compiler; CompileError where FLASHPAGE_CXX is not a command."""
    try:
        program = env.words("FLASHPAGE_CXX") or ["g++"]
    except SettingError as error:
        raise CompileError(str(error)) from error
    return Compiler("g++", tuple(program)) if shutil.which(program[0]) else None


def find_nvcc() -> Compiler | None:
    """nvcc, where there is the host compiler that it preprocesses with. CompileError if FLASHPAGE_NVCC names none."""
    wanted = env.nvcc()
    if wanted is None:
        return None
    nvcc, cxx = shutil.which(wanted), find_cxx()
    if nvcc is None and env.get("FLASHPAGE_NVCC"):
        raise CompileError(f"FLASHPAGE_NVCC is {wanted!r}, which is no program: give the path of an nvcc, or 'off'")
    nvcc = nvcc or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None or cxx is None:
        return None
    host_compiler = ["-ccbin", cxx.program[0]] if env.get("FLASHPAGE_CXX") else []
    return Compiler("nvcc", (nvcc, *host_compiler))


def find_nvrtc() -> Compiler | None:
    library = nvrtc_library()
    return Compiler("nvrtc", (sys.executable, "-I", "-S", str(_NVRTC_SCRIPT), library)) if library else None


def nvrtc_library() -> str | None:
    """libnvrtc.so: of a package (torch's CUDA wheels bring it), else of a toolkit; the newest in a place."""
    packages = [os.path.join(folder, "nvidia", "*", "lib") for folder in sys.path if folder]
    toolkits = ["/usr/local/cuda/lib64", "/usr/local/cuda-*/lib64"]
    toolkits += ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"]
    for place in packages + toolkits:
        found = [p for p in glob.glob(os.path.join(place, "libnvrtc.so.*")) if ".alt." not in p]
        if found:
            return max(found, key=lambda p: [int(part) for part in re.findall(r"\d+", p.rpartition(".so.")[2])])
    return None
