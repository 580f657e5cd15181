"""get_kernel: from a spec and a device to a kernel that can be launched; found, compiled or loaded once in a
process."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .. import native
from ..base import env
from ..base.errors import DeviceError
from ..kernels.spec import KernelSpec
from . import driver, files, manifest
from .build import build_kernels, obtain
from .cache import Entry, Store, aot_store, jit_store
from .compilers import may_compile
from .job import missing_error
from .targets import FIRST_OF_ITS_OWN, Target, cuda_target, runnable

if TYPE_CHECKING:
    import torch

    Device = torch.device | str | None


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedKernel:
    """A kernel on one device. It is never unloaded, because plans and captured graphs hold its handle."""

    spec: KernelSpec
    target: Target
    handle: int  # fp_kernel*
    info: native.KernelInfo
    library: ctypes.CDLL | None = dataclasses.field(default=None, repr=False)  # CPU: keeps the code mapped


_kernels: dict[tuple[KernelSpec, Device], LoadedKernel] = {}
_locks: defaultdict[tuple[KernelSpec, int | None], threading.Lock] = defaultdict(threading.Lock)
_locks_lock = threading.Lock()


def _forget_locks() -> None:
    """In a forked child: threads that held locks are not there to let them go."""
    global _locks_lock
    _locks_lock = threading.Lock()
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


def get_kernel(spec: KernelSpec, device: Device = None) -> LoadedKernel:
    """The kernel of `spec` for `device` (None: the CPU): from memory, else AOT folder, else cache, else compiled now.

    Raises KernelMissingError where it is not built and may not or cannot be compiled here, CompileError where it does
    not compile, DeviceError where the driver refuses it.
    """
    found = _kernels.get((spec, device))
    return found if found is not None else _resolve(spec, device)


def prebuild(specs: Iterable[KernelSpec], device: Device = None) -> list[LoadedKernel]:
    """As get_kernel for several specs; those that must be compiled are compiled at the same time. Where none can be
    compiled, one KernelMissingError has all of them."""
    specs = list(specs)
    index = device_index(device)
    missing = [s for s in specs if (s, _canonical(index)) not in _kernels and next(_built(s, index), None) is None]
    if len(missing) > 1:
        target = _best_target(index)
        if not may_compile(target):
            raise missing_error(missing, target)
        for result in build_kernels([(spec, target) for spec in missing]):
            if result.error:
                raise result.error
            assert result.entry is not None
            if result.is_new:  # get_kernel loads what another process has built, or compiles it again
                kernel = _load_built(jit_store(), result.entry, index)
                _kernels.setdefault((result.spec, _canonical(index)), kernel)
    return [get_kernel(spec, device) for spec in specs]


def device_index(device: Device) -> int | None:
    """The CUDA device's index, or None for the CPU; "cuda" is the current device."""
    if device is None or str(device) == "cpu":
        return None
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        raise DeviceError(f"device is {device}: kernels run on cpu or cuda")
    return torch.cuda.current_device() if device.index is None else device.index


def _resolve(spec: KernelSpec, device: Device) -> LoadedKernel:
    index = device_index(device)
    if (spec.backend == "cpu") != (index is None):
        raise DeviceError(f"kernel {spec.name} runs on {spec.backend}, and device is {device}")
    canonical = _canonical(index)
    with _locks_lock:
        lock = _locks[spec, index]
    with lock:
        found = _kernels.get((spec, canonical)) or _find(spec, index)
        _kernels[spec, canonical] = found
    if index is None or str(device) == canonical:  # not "cuda": the current device changes
        _kernels[spec, device] = found
    return found


def _canonical(index: int | None) -> str | None:
    return None if index is None else f"cuda:{index}"


def _find(spec: KernelSpec, index: int | None) -> LoadedKernel:
    """Loads the first build that loads; compiles the kernel if none does."""
    target = _best_target(index)
    unusable = failure = None
    for entry in _built(spec, index):
        try:
            return _load(entry, index)
        except DeviceError as error:  # built for another driver or libc: treated as missing
            if unusable is None or entry.target == target:
                unusable, failure = entry, error
    if unusable and index is not None and not may_compile(target):
        raise DeviceError(driver.explain(unusable, index, failure)) from failure
    if env.is_off("FLASHPAGE_JIT"):
        raise missing_error([spec], target) from failure
    store = jit_store()
    if unusable and driver.was_refused(unusable, index):  # the same compiler would make the same for the same driver
        raise DeviceError(driver.explain(unusable, index, failure)) from failure
    entry, is_new = obtain(spec, target, store, unusable=unusable)
    return _load_built(store, entry, index) if is_new else _load(entry, index)


def _load_built(store: Store, entry: Entry, index: int | None) -> LoadedKernel:
    """Loads what was compiled now. If the driver refuses it, that is remembered and explained."""
    try:
        return _load(entry, index)
    except DeviceError as error:
        if index is None:
            raise
        driver.note_refusal(store, entry, index)
        raise DeviceError(driver.explain(entry, index, error)) from error


def _built(spec: KernelSpec, index: int | None) -> Iterator[Entry]:
    """Builds that this device can run, in the order in which they are tried: first those that are found without
    rendering, and of these the best target first."""
    package, own = aot_store(), jit_store()
    targets, cached = searched(index)
    places = [(store, target) for target in targets for store in (package, own) if store is package or target in cached]
    yielded = set()
    for look_up in (Store.recall, Store.find):
        for store, target in places:
            entry = look_up(store, spec, target)
            if entry and entry.folder not in yielded:
                yielded.add(entry.folder)
                yield entry


def _best_target(index: int | None) -> Target:
    """The target for which missing kernels are compiled."""
    return runnable(None)[0] if index is None else cuda_target(index)


def searched(index: int | None) -> tuple[Sequence[Target], Sequence[Target]]:
    """Targets whose kernels are looked for in the package, and in the cache. The cache has some for lesser targets than
    the best one that can be compiled, if another machine filled it: those do not replace a compile. Nor do kernels of
    the package for a lesser target if it lacks instructions of the card (fp8 conversions)."""
    targets, best = runnable(index), _best_target(index)
    if not may_compile(best):
        return targets, targets
    wanted = targets[: targets.index(best) + 1]
    is_better = index is not None and isinstance(best.arch, int) and best.arch >= FIRST_OF_ITS_OWN
    return wanted if is_better else targets, wanted


def _load(entry: Entry, index: int | None) -> LoadedKernel:
    """Maps the binary and resolves its entry; raises DeviceError if it does not load."""
    try:
        spec, target = entry.spec, entry.target
        library = None
        if index is None:
            library, handle = _load_function(entry, spec)
        else:
            image = entry.image + b"\0"  # PTX must end in 0; after a cubin the byte is ignored
            load = native.load().fp_cuda_kernel_load
            handle = native.check_handle(load(index, image, len(entry.image), spec.entry.encode()))
        info = native.KernelInfo()
        native.check(native.load().fp_kernel_describe(handle, ctypes.byref(info)))
    finally:
        if not entry.is_kept:
            files.remove(entry.folder)
    manifest.note_use(spec, target)
    return LoadedKernel(spec, target, handle, info, library)


def _load_function(entry: Entry, spec: KernelSpec) -> tuple[ctypes.CDLL, int]:
    try:
        library = ctypes.CDLL(str(entry.path))
        function = ctypes.cast(getattr(library, spec.entry), ctypes.c_void_p)
    except (OSError, AttributeError) as error:
        raise DeviceError(f"{entry.path} does not load: {error}") from error
    return library, native.check_handle(native.load().fp_kernel_from_function(function))
