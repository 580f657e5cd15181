"""Graph mode by capacity: the largest batch that a captured graph may replay."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import checks
from ..base.errors import PlanError
from ..kernels.options import Options


class Capacity(NamedTuple):
    """Limits of all batches. Kernel, grid, launches and memory of a graph depend only on them and the options."""

    batch: int  # requests
    entries: int  # page numbers of all requests, shared ones counted for each request; ragged: tokens
    rows: int  # rows of q; 0: those of `batch` requests that all have the same number
    longest: int = 0  # tokens of one request; 0: those of all entries

    @staticmethod
    def of(use_cuda_graph: bool, **given: Any) -> Capacity | None:
        """From the constructor's max_batch, max_pages (ragged: max_kv_rows) and max_rows, in this order; 0 marks those
        that may be left out. None if none is given."""
        numbers = {name: checks.whole(name, value, 0) for name, value in given.items() if value is not None}
        if not any(numbers.values()):
            return None
        if not use_cuda_graph:
            name = next(name for name, value in numbers.items() if value)
            raise PlanError(f"{name} with use_cuda_graph=False: pass True, as capacities are for graphs.")
        for name in given:
            if name not in numbers:
                raise PlanError(f"{name}=None but other capacities are given: pass {', '.join(given)}.")
        return Capacity(*numbers.values())

    def rows_of(self, options: Options) -> int:
        """Rows of the largest batch."""
        return self.rows or self.batch * options.uniform_q_len

    def tokens_of(self, options: Options) -> int:
        """KV tokens of the largest batch."""
        return min(self.entries * max(1, options.page_size), 2**31 - 1)

    def check_batch(self, batch: int) -> None:
        if batch > self.batch:
            raise PlanError(
                f"the batch has {batch} requests but the wrapper has max_batch={self.batch}: make it larger."
            )

    def complaint(self, is_rows: bool, rows: int, entries: int, options: Options) -> PlanError:
        """The error for a batch that has too many rows, or else too many entries."""
        if is_rows:
            most = self.rows_of(options)
            return PlanError(f"the batch has {rows} rows but the wrapper has max_rows={most}: make it larger.")
        what, name = ("pages", "max_pages") if options.page_size else ("rows of K and V", "max_kv_rows")
        return PlanError(f"the batch has {entries} {what} but the wrapper has {name}={self.entries}: make it larger.")
