"""The host library (csrc/) through ctypes: its functions, and its structs, which the build writes to structs.py."""

from __future__ import annotations

import ctypes
import functools
import warnings
import weakref
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from torch.compiler import is_dynamo_compiling

from ..base import env, paths
from ..base.errors import DeviceError, FlashpageError, PlanError

_BUILD = "run `python setup.py build_host`"
try:
    from . import structs
    from .structs import *  # noqa: F403
except ImportError as error:
    raise FlashpageError(f"the host library is not built ({error}): {_BUILD}") from error


class _Ranged:
    """A field of 32 bits that refuses what it cannot hold, where ctypes would cut it off."""

    __slots__ = ("_field", "_high", "_low", "_name", "offset", "size")

    def __init__(self, struct: type, name: str, kind: type) -> None:
        self._field = getattr(struct, name)
        self._name, self.offset, self.size = f"{struct.__name__}.{name}", self._field.offset, self._field.size
        self._low, self._high = (-(2**31), 2**31) if kind is c_int32 else (0, 2**32)

    def __get__(self, struct: Any, owner: type) -> Any:
        return self if struct is None else self._field.__get__(struct, owner)

    def __set__(self, struct: Any, value: Any) -> None:
        if not self._low <= value < self._high:
            raise AssertionError(f"{self._name}={value} does not fit in 32 bits")
        self._field.__set__(struct, value)


class _Int32(c_int32):
    """An argument of 32 bits, checked in the same way."""

    @classmethod
    def from_param(cls, value: Any) -> c_int32:
        if not -(2**31) <= value < 2**31:
            raise AssertionError(f"{value} does not fit in 32 bits")
        return c_int32(value)


for _struct in (getattr(structs, _name) for _name in structs.__all__):
    for _field, _kind in _struct._fields_:
        if _kind in (c_int32, c_uint32):
            setattr(_struct, _field, _Ranged(_struct, _field, _kind))

# fp_status
OK, BAD_LENGTHS, WORKSPACE_TOO_SMALL, CUDA_ERROR, NO_CUDA, INTERNAL = range(6)
OTHER_TENSORS, OTHER_PAGES, OTHER_BATCH, OVER_LIMIT = range(6, 10)


# Structs are passed as ctypes.byref(struct), or as an address that was taken once: an int takes 0.04 us less a call.
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "fp_last_error": (c_char_p, []),
    "fp_plan": (c_int32, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p]),
    "fp_plan_bounds": (
        c_int32,
        [c_int32, *[c_int64] * 3, c_int32, c_int32, c_void_p, c_void_p, POINTER(c_int64), POINTER(c_int64)],
    ),
    "fp_tables_bounds": (c_int32, [c_void_p, c_void_p, POINTER(c_int64), POINTER(c_int64)]),
    "fp_tables_plan": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int32]),
    "fp_mask_cells": (c_int64, [c_void_p, c_void_p, c_void_p]),
    "fp_parts_count": (None, [c_void_p, c_void_p]),
    "fp_fork_create": (c_void_p, [c_int32]),
    "fp_fork_destroy": (None, [c_void_p]),
    "fp_slots_create": (c_void_p, [c_int32, c_int64]),
    "fp_slots_destroy": (None, [c_void_p]),
    "fp_batch_sum_up": (None, [c_void_p]),
    "fp_contexts_of": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p]),
    "fp_plan_contexts": (c_int32, [c_void_p]),
    "fp_merge_rounds": (c_int32, [c_int32, c_int32]),
    "fp_plan_batch": (c_int32, [c_void_p, c_void_p, c_int32]),
    "fp_plan_publish": (c_int32, [c_void_p, c_void_p]),
    "fp_slots_copy": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "fp_slots_last": (c_void_p, [c_void_p]),
    "fp_kernel_from_function": (c_void_p, [c_void_p]),
    "fp_cpu_merge_kernel": (c_void_p, [c_int32]),
    "fp_cuda_device_count": (c_int32, []),
    "fp_cuda_device_info": (c_int32, [c_int32, POINTER(structs.DeviceInfo)]),
    "fp_cuda_kernel_load": (c_void_p, [c_int32, c_char_p, c_int64, c_char_p]),
    "fp_kernel_destroy": (None, [c_void_p]),
    "fp_kernel_describe": (c_int32, [c_void_p, POINTER(structs.KernelInfo)]),
    "fp_run": (c_int32, [c_void_p]),
    "fp_point": (None, [c_void_p] * 6),
    "fp_launch": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p, c_int32]),
    "fp_python_set": (c_int32, [c_void_p]),
    "fp_cpu_threads": (c_int32, []),
    "fp_cpu_set_threads": (c_int32, [c_int32]),
    "fp_cpu_features": (c_int32, [c_char_p, c_int32]),
    "fp_cpu_merge_states": (c_int32, [c_void_p, c_int32]),
    "fp_cpu_append": (c_int32, [c_void_p, c_int32]),
    "fp_cpu_gather_slots": (c_int32, [c_void_p]),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The host library, loaded once in a process, with as many threads as FLASHPAGE_THREADS says; checks that it and
    the structs come from the same headers."""
    threads = env.count("FLASHPAGE_THREADS")
    path = paths.library()
    if not path.is_file():
        raise FlashpageError(f"the host library {path} is missing: {_BUILD}")
    library = ctypes.CDLL(str(path))
    _check_fingerprint(library, path)
    if newer := _newer_source(path):
        warnings.warn(f"the host library is older than {newer}: {_BUILD}", RuntimeWarning, stacklevel=2)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = [_Int32 if kind is c_int32 else kind for kind in arguments]
    if threads is not None:
        library.fp_cpu_set_threads(threads)
    return library


def _newer_source(library: Path) -> str | None:
    """In a checkout, a file that has changed since the library was made from it. A wheel has no such list."""
    listed = library.with_suffix(".sources")  # written by setup.py, dated to the build's start
    try:
        built = listed.stat().st_mtime_ns
        for name in listed.read_text().splitlines():
            if (paths.PACKAGE.parent / name).stat().st_mtime_ns > built:
                return name
    except OSError:
        return None  # no list, or a file that is gone: the build would say so
    return None


def _check_fingerprint(library: ctypes.CDLL, path: Path) -> None:
    """If Python, the library and the kernels compiled here had different layouts, calls would corrupt memory."""
    function = getattr(library, "fp_abi_fingerprint", None)
    if function is not None:
        function.restype = c_char_p
    if function is None or function().decode() != structs.FINGERPRINT:
        raise FlashpageError(f"{path} and {structs.__file__} are of different builds: {_BUILD}.")
    root = paths.PACKAGE.parent
    is_checkout = paths.include_dir().parent == root
    if is_checkout and paths.hash_declarations(root, structs.SOURCES) != structs.FINGERPRINT:
        raise FlashpageError(f"the headers of {path} have changed since it was built: {_BUILD}.")


def last_error() -> str:
    """The message of this thread's last failed call."""
    return load().fp_last_error().decode(errors="replace")


def check(status: int) -> None:
    """Raises the error of a status: PlanError for lengths and workspaces, DeviceError for all others."""
    if status == OK:
        return
    raise (PlanError if status in (BAD_LENGTHS, WORKSPACE_TOO_SMALL) else DeviceError)(last_error())


def check_handle(handle: int | None) -> int:
    """The handle; raises DeviceError if the function that made it returned null."""
    if not handle:
        raise DeviceError(last_error())
    return handle


def destroy_with(owner: object, destroy: Callable[[int], None], handle: int) -> None:
    """Destroys the handle once its owner is gone, but not at the process' end, which frees it; by then the device may
    be gone."""
    if is_dynamo_compiling():  # the code that torch traces from here on would be for this number of finalizers alone
        raise FlashpageError("torch.compile cannot trace plans, and runs them as they are without fullgraph=True.")
    weakref.finalize(owner, destroy, handle).atexit = False


def make_fast_div(divisor: int) -> structs.FastDiv:
    """The struct that divides by `divisor` (include/flashpage/common/math.h, make_fast_div)."""
    assert 1 <= divisor < 2**31, divisor
    log = (divisor - 1).bit_length()
    if 1 << log == divisor:
        return structs.FastDiv(divisor, 0, log)
    shift = log - 1
    return structs.FastDiv(divisor, -(-(1 << (32 + shift)) // divisor), shift)
