"""Where plans lie: device memory that kernels read, and a ring of staging slots on the host that is copied there."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import numpy as np
import torch

from .. import native
from ..base.errors import DeviceError, PlanError
from ..native import fastcall, records
from . import lengths
from .device_lengths import TableLengths
from .prepared_kernels import Prepared

_STAGING_BYTES = 256 << 10  # a plan of some thousand requests; larger ones get a larger ring


class CopyRing:
    """Host memory to a device in a stream's order, through pinned slots: the source is free at once, nothing waits."""

    def __init__(self, device_index: int, slot_bytes: int) -> None:
        library = native.load()
        self._copy = library.fp_slots_copy
        self._handle = native.check_handle(library.fp_slots_create(device_index, slot_bytes))
        weakref.finalize(self, library.fp_slots_destroy, self._handle).atexit = False

    def copy(self, source: torch.Tensor, destination: torch.Tensor, stream: int) -> None:
        """Contiguous tensors of one type; `source` may be the shorter one."""
        size = source.numel() * source.element_size()
        native.check(self._copy(self._handle, source.data_ptr(), size, destination.data_ptr(), stream))


class PlanSlot:
    """Holds one plan at a time. The address of `memory` stays the same, so a captured graph reads whatever plan is
    newest."""

    __slots__ = (
        *("__weakref__", "_call", "_call_address", "_capacity", "_destroy", "_device_index", "_handle", "_plan"),
        "_plan_parts",
        *("_is_read_back", "_staging_bytes", "memory", "result"),
    )

    def __init__(self, device_index: int, memory: torch.Tensor, problem_address: int) -> None:
        self._device_index = device_index
        self.result = native.PlanResult()
        self._call = native.SlotsCall(problem=problem_address, result=ctypes.addressof(self.result))
        self._call_address = ctypes.addressof(self._call)
        self._plan, self._plan_parts = fastcall.builtins().slots_plan, fastcall.builtins().slots_plan_parts
        self._is_read_back = False  # the plan was made where `memory` is
        self.use_memory(memory)
        self._make_ring(_STAGING_BYTES)

    def use_memory(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._capacity = memory.numel() * memory.element_size()
        self._call.destination, self._call.capacity = memory.data_ptr(), self._capacity

    def plan(self, prepared: Prepared, stream: int, names: tuple[str, str, str, str]) -> None:
        """Plans and starts the copy, in the stream's order; `result` has the numbers."""
        status = self._made_by(self._plan, prepared.schedule_address, stream)
        if status:
            raise self._error(status, prepared, names)

    def plan_parts(self, parts_address: int, stream: int) -> bool:
        """The same of a host.Parts; False where the lengths or the memory do not allow it."""
        return self._made_by(self._plan_parts, parts_address, stream) == native.OK

    def _made_by(self, plan: Callable[..., int], how_address: int, stream: int) -> int:
        """The status of a plan into staging slots that are large enough."""
        self._is_read_back = False
        status = plan(self._call_address, how_address, stream)
        if status == native.WORKSPACE_TOO_SMALL and self._staging_bytes < self.result.used_bytes <= self._capacity:
            self._destroy()
            self._make_ring(1 << (self.result.used_bytes - 1).bit_length())
            status = plan(self._call_address, how_address, stream)
        return status

    def plan_tables(self, prepared: Prepared, tables: TableLengths, kernel: int | None, stream: int, pdl: bool) -> None:
        """Plans where the lengths are, in the stream's order. `result` has what the host knows: sizes, no numbers."""
        native.check(
            native.load().fp_tables_plan(
                *(kernel, tables.address, prepared.schedule_address, self._call.destination, self._capacity, stream),
                pdl,
            )
        )
        self._is_read_back = True
        ctypes.memset(ctypes.addressof(self.result), 0, ctypes.sizeof(self.result))
        self.result.total_q = tables.max_rows

    def last_bytes(self) -> bytes:
        """The newest plan, copied; one that a device made is waited for, and gives `result` its numbers."""
        if self._is_read_back:
            memory, size = self.memory.view(torch.uint8), records.PLAN_HEADER.itemsize
            header = np.frombuffer(memory[:size].cpu().numpy().tobytes(), records.PLAN_HEADER)[0]
            for name in ("num_ctas", "num_items", "num_merges", "num_partial_rows", "used_bytes"):
                setattr(self.result, name, int(header[name]))
            return memory[: self.result.used_bytes].cpu().numpy().tobytes()
        return ctypes.string_at(native.load().fp_slots_last(self._handle), self.result.used_bytes)

    def _make_ring(self, staging_bytes: int) -> None:
        library = native.load()
        self._staging_bytes = staging_bytes
        self._handle = native.check_handle(library.fp_slots_create(self._device_index, staging_bytes))
        self._call.slots = self._handle
        self._destroy = weakref.finalize(self, library.fp_slots_destroy, self._handle)
        self._destroy.atexit = False  # the process' end frees it; by then the device may be gone

    def _error(self, status: int, prepared: Prepared, names: tuple[str, str, str, str]) -> Exception:
        if status == native.BAD_LENGTHS:
            return lengths.complaint(self.result, names, prepared.options.page_size)
        if status == native.WORKSPACE_TOO_SMALL:
            return PlanError(
                f"int_workspace_buffer has {self._capacity} bytes but this plan needs {self.result.used_bytes}: pass a "
                "larger one to reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)."
            )
        return DeviceError(native.last_error())
