"""From a KernelSpec to a kernel that runs on a device: found in the AOT folder or the cache, or compiled.

* targets    CPU levels and GPU architectures
* render     spec -> source
* compilers  g++, nvcc, NVRTC and their flags (nvrtc.py: NVRTC as a command line)
* source     spec, target -> source and key
* cache      entries: folders of compiled kernels (files: files that no other user could have written)
* job        one compile (process: child processes; supervise: they end with this one; progress: lines and bars;
             diagnostics: errors, registers)
* build      specs -> entries, one or many at a time
* own_targets  whether a card's own target can be had, or PTX serves it
* loader     spec, device -> LoadedKernel (driver: kernels that the CUDA driver refuses)
* manifest   which kernels a process has used
"""

from . import own_targets  # noqa: F401  devices.of asks it
from .build import BuildResult, build_kernels, build_specs
from .loader import LoadedKernel, get_kernel, prebuild
from .manifest import read_manifest, used_specs, write_manifest
from .targets import Target, cuda_target, host_target

__all__ = [
    "BuildResult",
    "LoadedKernel",
    "Target",
    "build_kernels",
    "build_specs",
    "cuda_target",
    "get_kernel",
    "host_target",
    "prebuild",
    "read_manifest",
    "used_specs",
    "write_manifest",
]
