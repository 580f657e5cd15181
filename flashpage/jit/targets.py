"""The target of a kernel: a level of CPU features, or an architecture of NVIDIA GPUs."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
import reprlib
from typing import TYPE_CHECKING

from .. import kernels, native
from ..base.errors import DeviceError
from ..kernels import devices
from ..kernels.devices import PTX_SM

if TYPE_CHECKING:
    from ..kernels.spec import KernelSpec

# Best first: the features a machine must have, which are the compiler's -m flags too (never -march=native: a cache is
# copied between machines). Each level of x86-64 includes the ones after it; all 64-bit Arm processors have NEON.
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
CPU_LEVELS: dict[str, tuple[str, ...]] = {
    "avx512bf16": (*_AVX2, *_AVX512, "avx512bf16"),
    "avx512": (*_AVX2, *_AVX512),
    "avx2": _AVX2,
    "neon": ("neon",),
}
_SM = re.compile(r"(?:sm_)?([1-9][0-9]{1,2})a?")
FIRST_OF_ITS_OWN = 89  # before it no kernel and no rule of a kernel differs from those of 8.0
PTX = f"compute_{PTX_SM}"  # of a general kernel: the driver compiles it for a card that has no cubin


@dataclasses.dataclass(frozen=True)
class Target:
    """`arch`: a key of CPU_LEVELS, or a compute capability times ten (90), or PTX."""

    backend: str  # cpu | cuda
    arch: str | int

    @property
    def name(self) -> str:
        """avx512, sm_80, sm_90a, compute_80: part of the cache key, shown to the user, and what compilers call it."""
        if isinstance(self.arch, str):
            return self.arch
        return f"sm_{self.arch}{'a' if self.is_accelerated else ''}"

    @property
    def is_accelerated(self) -> bool:
        """Whether no other card runs its kernels."""
        return isinstance(self.arch, int) and devices.capability_of(self.arch).is_accelerated

    @property
    def binary(self) -> str:
        """The file name of a compiled kernel."""
        if self.backend == "cpu":
            return "kernel.so"
        return "kernel.ptx" if self.arch == PTX else "kernel.cubin"

    def fits(self, spec: KernelSpec) -> bool:
        """Whether the kernel can be compiled for this."""
        kernel = kernels.find(spec.kernel)
        archs = kernel.archs if kernel else ()
        return spec.backend == self.backend and (not archs or self.arch in archs)

    @staticmethod
    def parse(name: str) -> Target:
        """From a name as above; 90, sm_90 and sm_90a are the same. ValueError for anything else."""
        if isinstance(name, str) and name in CPU_LEVELS:
            return Target("cpu", name)
        if name == PTX:
            return Target("cuda", PTX)
        digits = _SM.fullmatch(name) if isinstance(name, str) else None
        if digits is None:
            shown = reprlib.repr(name)
            raise ValueError(f"target {shown} is not known: use sm_80, sm_90a, {PTX} or one of {', '.join(CPU_LEVELS)}")
        return Target("cuda", int(digits[1]))


@functools.cache
def host_target() -> Target:
    """The best CPU level that this machine can run."""
    return runnable(None)[0]


@functools.cache
def cuda_target(device_index: int) -> Target:
    """The target for which kernels of a CUDA device are compiled: its own or, if its own kernels cannot be had, sm_80
    where that runs, else PTX. Makes no context."""
    sm = device_info(device_index).sm
    if devices.has_own_target(sm):
        return Target("cuda", sm)
    return Target("cuda", PTX_SM if sm // 10 == PTX_SM // 10 else PTX)


def device_info(device_index: int) -> native.DeviceInfo:
    """The driver's own numbers, and a device's."""
    info = native.DeviceInfo()
    native.check(native.load().fp_cuda_device_info(device_index, ctypes.byref(info)))
    return info


@functools.cache
def runnable(device_index: int | None) -> tuple[Target, ...]:
    """Targets whose kernels run here, best first, whether they can be compiled here or not. None: the CPU."""
    if device_index is not None:
        sm = device_info(device_index).sm
        # A cubin runs on later minor versions of its architecture, unless it is an accelerated one.
        older = [Target("cuda", known) for known in range(sm - 1, sm // 10 * 10 - 1, -1)]
        return (Target("cuda", sm), *(t for t in older if not t.is_accelerated), Target("cuda", PTX))
    found = cpu_features()
    levels = [level for level, needs in CPU_LEVELS.items() if found.issuperset(needs)]
    if not levels:
        missing = ", ".join(feature for feature in _AVX2 if feature not in found)
        raise DeviceError(f"this CPU cannot run flashpage's kernels: it lacks {missing} (x86-64 needs AVX2)")
    return tuple(Target("cpu", level) for level in levels)


def cpu_features() -> frozenset[str]:
    """The features this machine can run, by the names that -m flags use."""
    text = ctypes.create_string_buffer(1024)
    native.check(native.load().fp_cpu_features(text, len(text)))
    return frozenset(text.value.decode().replace("_", "").split(","))
