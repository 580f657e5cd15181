"""Turns a batch's rows of the request table into CSR page tables, one for each part of the tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..base.errors import RunError
from .forward_batch import ForwardBatch
from .gather import gather_slots
from .kv_parts import KvPart, Span, span_of
from .token_pool import RequestTable
from .transfer import moved, on_host, room_on_host


class PageTable(NamedTuple):
    """A page table as a paged wrapper's plan takes it."""

    indptr: torch.Tensor  # [batch + 1] int32, host
    indices: torch.Tensor  # page numbers, on the device
    last_page_len: torch.Tensor  # [batch] int32, host


class IndicesUpdater:
    """Makes the page tables of a batch.

    Args:
        windows: window_left of each part; -1: none.
    """

    def __init__(self, table: RequestTable, page_size: int, windows: dict[KvPart, int]) -> None:
        self.table, self.page_size, self.windows = table, page_size, windows

    def update(
        self, batch: ForwardBatch, part: KvPart, *, out: torch.Tensor | None = None, prefix_only: bool = False
    ) -> PageTable:
        """The page table of one part of every request.

        Args:
            out: memory for the page numbers, which a captured step reads; None: allocated.
            prefix_only: leave out the new tokens.
        """
        span = span_of(part, batch, self.windows[part], self.page_size)
        if prefix_only:
            span = Span(span.starts, span.lens - batch.new_lens)
        lens = span.lens.numpy()  # numpy needs a tenth of torch's time for so few numbers
        ends = lens if span.starts is None else lens + span.starts.numpy()
        if ends.size and ends.max() > self.table.max_context:  # a card would read and write past its memory
            raise RunError(
                f"seq_lens reaches {ends.max()} tokens but a row of the request table holds {self.table.max_context}: "
                "pass shorter requests, or make the table with a larger max_context."
            )
        device = self.table.slots.device
        indptr = indptr_of(-(-lens // self.page_size), device)
        last_page_len = on_host(np.where(lens > 0, (lens - 1) % self.page_size + 1, 0), device)
        total = int(indptr[-1])
        numbers = moved([indptr] if span.starts is None else [indptr, span.starts], device)
        starts = None if span.starts is None else numbers[1]
        indices = torch.empty(total, dtype=torch.int32, device=device) if out is None else out[:total]
        gather_slots(self.table.slots, batch.rows, numbers[0], indices, starts, self.page_size)
        return PageTable(indptr, indices, last_page_len)


def indptr_of(lens: np.ndarray, device: torch.device) -> torch.Tensor:
    """[0, lens[0], lens[0] + lens[1], ...], int32, on the host, where a copy to `device` need not be waited for."""
    indptr = room_on_host(len(lens) + 1, device)
    numbers = indptr.numpy()
    numbers[0] = 0
    np.cumsum(lens, out=numbers[1:])
    return indptr
