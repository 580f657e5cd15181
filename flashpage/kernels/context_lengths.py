"""The class of a batch by what its rows see, from the rows that the card's kernels list for options."""

from __future__ import annotations

import ctypes

from .. import native
from . import ATTENTION
from .context_classes import CLASSES, ContextClass
from .devices import Device
from .options import Options


class ContextLengths:
    """How much rows of many tiles see, on average, as a table whose first fitting row tells a batch's class. Made once
    for options; the planner looks a batch up (csrc/plan/plan_call.cpp)."""

    __slots__ = ("address", "may_differ", "table")

    def __init__(self, options: Options, card: Device) -> None:
        self.may_differ = not (options.uniform_q_len or options.is_batch_invariant)  # from batch to batch
        kernels = [kernel for kernel in ATTENTION if not kernel.archs or card.sm in kernel.archs]
        rows = [row for kernel in kernels for row in kernel.context_rows(options, card)] if self.may_differ else []
        self.table = native.ContextTable(count=len(rows), page_size=max(1, options.page_span))
        self.table.hidden = 0.5 if options.causal else 0.0  # of a request's rows: tokens that one does not see
        self.table.rows[: len(rows)] = rows
        self.address = ctypes.addressof(self.table)

    @property
    def has_few(self) -> bool:
        """Whether some batches have tiles of which two CTAs fit an SM."""
        few = CLASSES.index(ContextClass.FEW)
        return any(row.contexts == few for row in self.table.rows[: self.table.count])

    def of(self, batch: int, total_rows: int, total_tokens: int, has_equal_rows: bool = False) -> ContextClass:
        found = native.load().fp_contexts_of(self.address, batch, total_rows, total_tokens, has_equal_rows)
        return CLASSES[found]
