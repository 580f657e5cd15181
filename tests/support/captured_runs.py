"""Records the launches of a call with copies of their arguments, as a CUDA graph does, to launch them again later and
to check that the memory they point to still exists."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from flashpage import native
from flashpage.wrappers.base import Attention

_OUTPUTS = ("AttentionParams.out", "AttentionParams.lse", "MergeParams.out", "MergeParams.lse")
Address = tuple[str, int]


class _Keep(TorchDispatchMode):
    """Keeps the operators' results, as a graph's memory pool does."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tensors.append(function(*args, **(kwargs or {})))
        return self.tensors[-1]


class CapturedRuns:
    """The runs of a call.

    Attributes:
        out: the call's result.
        addresses: of all memory in the launches' arguments, except outputs.
    """

    def __init__(self, call: Callable[[], Any], *, keeps_tensors: bool) -> None:
        self._launches: list[tuple[Any, tuple[Any, ...]]] = []
        self._copies: list[Any] = []  # of structs
        self.addresses: list[Address] = []
        self._keep = _Keep()
        with self._recording(), self._keep if keeps_tensors else contextlib.nullcontext():
            self.out = call()
        self._memory = _storages_of(self.addresses)

    def replay(self) -> None:
        """Launches the recorded kernels again, on the CPU."""
        for function, arguments in self._launches:
            native.check(function(*arguments))

    def check_memory(self) -> None:
        """Checks that all of the memory still exists."""
        gone = [name for name, storage in self._memory if storage.expired()]
        assert not gone, f"freed: {gone}"

    # ---------------------------------------------------------------- recording

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        library, run = native.load(), Attention.run

        def recorded_run(attention: Attention, *arguments: Any, **options: Any) -> Any:
            attention._local.bound = None  # otherwise a run with equal tensors goes to C without this function
            attention._run_kernels = lambda _: self._run(attention)
            try:
                return run(attention, *arguments, **options)
            finally:
                attention._run_kernels = library.fp_run

        def recorded_merge(address: int, element_type: int) -> int:
            params = self._copy(native.MergeStatesParams.from_address(address))
            self._launches.append((merge, (params, element_type)))
            return int(merge(params, element_type))

        merge = library.fp_cpu_merge_states
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Attention, "run", recorded_run)
            patch.setattr(library, "fp_cpu_merge_states", recorded_merge)
            yield

    def _run(self, attention: Attention) -> int:
        bound = attention._local.bound
        structs = [bound.gather, bound.variant, bound.option_plan.mask_tiles.params]
        structs += [struct for part in bound.parts for struct in (part.params, part.merge)]
        known = {ctypes.addressof(struct): struct for struct in structs}
        args = native.RunArgs.from_buffer_copy(bound.args)
        for launch in args.launches[: args.count]:
            for name in ("params", "variant", "mask_tiles"):
                if address := getattr(launch, name):
                    self.addresses += addresses_in(known[address])
                    setattr(launch, name, self._copy(known[address]))
        self._copies.append(args)
        run = native.load().fp_run
        self._launches.append((run, (ctypes.addressof(args),)))
        return int(run(ctypes.addressof(bound.args)))

    def _copy(self, struct: Any) -> int:
        copy = type(struct).from_buffer_copy(struct)
        self._copies.append(copy)
        return ctypes.addressof(copy)


def addresses_in(struct: Any, name: str = "") -> Iterator[Address]:
    """Pointers of a struct and of the structs in it, except outputs."""
    name = name or type(struct).__name__
    for field, kind in struct._fields_:
        value = getattr(struct, field)
        if kind is ctypes.c_void_p:
            if value and f"{name}.{field}" not in _OUTPUTS:
                yield f"{name}.{field}", value
        elif issubclass(kind, ctypes.Structure):
            yield from addresses_in(value, f"{name}.{field}")
        elif issubclass(kind, ctypes.Array) and issubclass(kind._type_, ctypes.Structure):
            for i, element in enumerate(value):
                yield from addresses_in(element, f"{name}.{field}[{i}]")


def _is_in_a_graphs_pool(address: int) -> bool:
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_initialized() else []
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in segments
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


_frozen: list[tuple[int, int, StorageWeakRef]] = []  # first byte, bytes, and storage of tensors that few_objects froze


@contextlib.contextmanager
def few_objects() -> Iterator[None]:
    """Searches for garbage and for tensors, of which a test makes twenty, pass over the objects of all tests before."""
    gc.collect()
    _frozen[:] = _storages()
    gc.freeze()
    yield
    gc.unfreeze()
    _frozen.clear()


def _storages() -> list[tuple[int, int, StorageWeakRef]]:
    """Storages of all tensors that are not frozen; fake tensors of other tests have none."""
    storages = []
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.layout is torch.strided and not found.is_meta:
            with contextlib.suppress(NotImplementedError, RuntimeError):
                storage = found.untyped_storage()
                storages.append((storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)))
    return storages


def _storages_of(addresses: list[Address]) -> list[tuple[str, StorageWeakRef]]:
    """The memory that each address lies in; an address outside of all tensors' memory is an error."""
    storages = _storages() + [frozen for frozen in _frozen if not frozen[2].expired()]
    memory = []
    for name, address in addresses:
        if _is_in_a_graphs_pool(address):  # made inside of the capture: it lives as long as the graph
            continue
        holder = next((s for begin, size, s in storages if begin <= address < begin + size), None)
        assert holder is not None, f"{name} is in no tensor's memory"
        memory.append((name, holder))
    return memory


def churn(device: str) -> None:
    """Collects garbage, and overwrites freed memory by allocating it again."""
    gc.collect()
    for exponent in range(4, 24):
        for _ in range(3):
            torch.full((1 << exponent,), 0xFF, dtype=torch.uint8, device=device)
