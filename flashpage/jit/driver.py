"""Kernels that the CUDA driver refuses though they were compiled here: most often it is older than the toolkit.

The refusal is remembered with the entry, so that later processes say it at once and do not compile the kernel again.
Another driver, or another compiler, gets its own try.
"""

from __future__ import annotations

from .cache import Entry, Store
from .compilers import find_compiler, toolkit_version
from .targets import device_info

_REFUSED = "refused_by_driver"  # meta: the driver's version


def note_refusal(store: Store, entry: Entry, device_index: int) -> None:
    store.note(entry, **{_REFUSED: device_info(device_index).driver_version})


def was_refused(entry: Entry, device_index: int | None) -> bool:
    """Whether this driver has refused what the compiler that is here makes."""
    if device_index is None or entry.meta.get(_REFUSED) != device_info(device_index).driver_version:
        return False
    compiler = find_compiler(entry.target)
    return compiler is None or f"{compiler.name} ({compiler.version})" == entry.meta["compiler"]


def explain(entry: Entry, device_index: int | None, error: Exception | None) -> str:
    """The driver's own words, and what to do."""
    name, compiler = entry.meta["name"], entry.meta["compiler"]
    driver = device_info(device_index or 0).driver_version
    toolkit = toolkit_version(compiler)
    if toolkit <= driver:
        return f"the driver refuses {name}, which {compiler} has compiled: {error}"
    own = _text(driver)
    return (
        f"the driver is older than the toolkit and refuses {name}: "
        f"it is for CUDA {own}, and {compiler} is of CUDA {_text(toolkit)} ({error}). "
        f"Update the driver, or let a compiler of CUDA {own} or older build the kernels: "
        "FLASHPAGE_NVCC names an nvcc, and the package nvidia-cuda-nvrtc brings NVRTC of each version."
    )


def _text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
