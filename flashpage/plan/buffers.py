"""Memory of plans: device memory that kernels read, and a ring of staging slots on the host that is copied there."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from .. import native
from ..base.memory import empty
from ..native import records
from .device_lengths import TableLengths
from .prepared_kernels import PreparedKernels

_STAGING_BYTES = 256 << 10  # a plan of some thousand requests; larger plans get a larger ring


class CopyRing:
    """Copies host memory to a device in stream order, through pinned slots: the source is free at once, nothing
    waits."""

    def __init__(self, device_index: int, slot_bytes: int) -> None:
        library = native.load()
        self._copy = library.fp_slots_copy
        self.handle = native.check_handle(library.fp_slots_create(device_index, slot_bytes))
        native.destroy_with(self, library.fp_slots_destroy, self.handle)

    def copy(self, source: torch.Tensor, destination: torch.Tensor, stream: int) -> None:
        """Copies contiguous tensors of one type; `source` may be the shorter one."""
        size = source.numel() * source.element_size()
        native.check(self._copy(self.handle, source.data_ptr(), size, destination.data_ptr(), stream))


class PlanBuffer:
    """Holds one plan at a time. The address of `memory` stays the same, so a captured graph reads the newest plan."""

    __slots__ = (
        "__weakref__",
        "_call",
        "_capacity",
        "_handle",
        "_is_read_back",
        "_outgrown",
        "is_used",
        "memory",
        "result",
    )

    def __init__(self, device_index: int, memory: torch.Tensor, call: native.PlanCall) -> None:
        library = native.load()
        self._handle = native.check_handle(library.fp_slots_create(device_index, _STAGING_BYTES))
        self._outgrown: list[torch.Tensor] = []  # graphs may read them (base/memory.py)
        self.is_used = False  # since it got its memory
        native.destroy_with(self, library.fp_slots_destroy, self._handle)
        self.attach(call, memory)

    def attach(self, call: native.PlanCall, memory: torch.Tensor | None = None) -> None:
        """Assigns the memory for plans of other options."""
        self._call, self.result = call, call.result
        self._is_read_back = False  # the plan was made where `memory` is
        if memory is not None:
            self.memory, self._capacity, self.is_used = memory, memory.numel() * memory.element_size(), False
        call.slots, call.destination, call.capacity = self._handle, self.memory.data_ptr(), self._capacity

    def grow(self, size: int) -> None:
        """Allocates memory for plans of `size` bytes."""
        self._outgrown.append(self.memory)
        memory = empty(1 << (size - 1).bit_length(), torch.uint8, self.memory.device)
        self.attach(self._call, memory)

    def plan(self, call_address: int, stream: int, is_chosen: bool) -> int:
        """Plans the batch of the call; returns a status."""
        self._is_read_back = False
        status: int = native.load().fp_plan_batch(call_address, stream, is_chosen)
        self.is_used |= status == native.OK
        return status

    def plan_tables(
        self, prepared: PreparedKernels, tables: TableLengths, kernel: int | None, stream: int, pdl: bool
    ) -> None:
        """Plans on the device, in stream order. `result` has what the host knows: sizes, but no numbers."""
        native.check(
            native.load().fp_tables_plan(
                *(kernel, tables.address, prepared.schedule_address, self._call.destination, self._capacity, stream),
                pdl,
            )
        )
        self._is_read_back = self.is_used = True
        ctypes.memset(ctypes.addressof(self.result), 0, ctypes.sizeof(self.result))
        self.result.total_q = tables.max_rows

    def last_bytes(self) -> bytes:
        """A copy of the newest plan; waits if a device made it, and gives `result` its numbers."""
        if self._is_read_back:
            memory, size = self.memory.view(torch.uint8), records.PLAN_HEADER.itemsize
            header = np.frombuffer(memory[:size].cpu().numpy().tobytes(), records.PLAN_HEADER)[0]
            for name in ("num_ctas", "num_items", "num_merges", "num_partial_rows", "used_bytes"):
                setattr(self.result, name, int(header[name]))
            return memory[: self.result.used_bytes].cpu().numpy().tobytes()
        return ctypes.string_at(native.load().fp_slots_last(self._handle), self.result.used_bytes)
