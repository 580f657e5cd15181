"""The class of a batch by what its rows see, from the rows that the card's kernels list for options."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from .. import native
from . import ATTENTION
from .context_classes import CLASSES, ContextClass
from .devices import Device
from .options import Options


class ContextLengths:
    """How much rows see, on average, as a table whose first fitting row tells a batch's class. Made once for options;
    the planner looks a batch up (csrc/plan/plan_call.cpp)."""

    __slots__ = ("address", "may_differ", "table")

    def __init__(self, options: Options, card: Device) -> None:
        self.may_differ = not (options.uniform_q_len or options.is_batch_invariant)  # from batch to batch
        kernels = [kernel for kernel in ATTENTION if not kernel.archs or card.sm in kernel.archs]
        rows = [row for kernel in kernels for row in kernel.context_rows(options, card)] if self.may_differ else []
        self.table = native.ContextTable(count=len(rows), group=options.group_size)
        self.table.hidden = 0.5 if options.causal else 0.0  # of a request's rows: tokens that one does not see
        self.table.rows[: len(rows)] = rows
        self.address = ctypes.addressof(self.table)

    @property
    def classes(self) -> list[ContextClass]:
        """The classes that batches may have, besides the usual one."""
        return [CLASSES[number] for number in sorted({row.contexts for row in self.table.rows[: self.table.count]})]

    def of(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> ContextClass:
        """The class of requests with so many rows and tokens each."""
        lengths = ((ctypes.c_int32 * len(given))(*given) for given in (q_lens, kv_lens))
        return CLASSES[native.load().fp_contexts_of(self.address, len(q_lens), *lengths)]

    def of_batch(self, call: int) -> ContextClass:
        """The class of the batch that a native.PlanCall at this address has taken."""
        return CLASSES[native.load().fp_plan_contexts(call)]
