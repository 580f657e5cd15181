"""Lengths on the device: the arguments of `plan_on_device`, checked, and the planner's struct of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from .. import native
from ..base import checks, env, tensor_memory
from ..base.errors import CapabilityError, PlanError
from ..kernels.options import Options
from .lengths import batch_of

_INTEGERS = (torch.int32, torch.int64)


class TableLengths:
    """Sequence lengths and block tables of one batch, kept alive for the graphs that read them at every replay.

    On the CPU backend the numbers are checked as in `plan`. On a card the host does not read them; numbers out of range
    count as the nearest one in range.

    takes_fewer_rows: runs may have fewer rows than `max_rows`, but all of those of `q_indptr`.
    typical_requests: how many requests have nearly all rows, by which the kernel is chosen; None: all requests.
    list_entries: of a row's lists in all, if it has two, of which the tables are the first; 0: a row of the tables.
    """

    def __init__(
        self,
        device: torch.device,
        seq_lens: Any,
        block_tables: Any,
        *,
        q_indptr: Any,
        table_rows: Any,
        num_requests: Any,
        max_rows: int,
        options: Options,
        takes_fewer_rows: bool = False,
        typical_requests: int | None = None,
        list_entries: int = 0,
    ) -> None:
        if options.has_parts:
            raise CapabilityError(
                "plan_on_device cannot cut the rows of a request. "
                "Pass one row for each request (decode wrapper), or call plan, which can cut them."
            )
        self.batch = _entries(seq_lens, "seq_lens", device, _INTEGERS)
        if table_rows is not None and _entries(table_rows, "table_rows", device, _INTEGERS) != self.batch:
            raise PlanError(
                f"table_rows has {len(table_rows)} entries but seq_lens {self.batch}: pass one for each request."
            )
        self.tables = _check_tables(block_tables, self.batch if table_rows is None else 1, device)
        self._columns = list_entries or self.tables.shape[1]
        self.typical_requests = self.batch if typical_requests is None else typical_requests
        self.page_size, self.rows_a_request = options.page_span, options.uniform_q_len
        if q_indptr is not None:
            _entries(q_indptr, "qo_indptr", device, (torch.int32,))
            if batch_of(q_indptr, "qo_indptr") != self.batch:
                raise PlanError(f"qo_indptr has {len(q_indptr)} entries but seq_lens {self.batch}: pass [batch + 1].")
        if num_requests is not None and _entries(num_requests, "num_requests", device, (torch.int32,)) != 1:
            raise PlanError(f"num_requests has shape {tuple(num_requests.shape)}: pass one number, [1].")
        # A card reads all of them in place at every replay; on the CPU copies protect kernels from later changes.
        self._given = (self.tables, seq_lens, q_indptr, table_rows, num_requests)
        self._places, self._options = _places_of(self._given), options
        self._is_cpu, self._is_checked = device.type == "cpu", env.is_on("FLASHPAGE_CHECK_INDICES")
        with torch.inference_mode(False):  # copies made in inference mode could not be written outside of it
            read = [tensor.clone() if self._is_cpu and tensor is not None else tensor for tensor in self._given]
        self.read, self.seq_lens, self.q_indptr, self.table_rows, self.num_requests = read
        self._max_rows, self._takes_fewer_rows = max_rows, takes_fewer_rows
        self.max_rows = max_rows if q_indptr is not None else self.batch * options.uniform_q_len
        self._judge()
        self._is_new = True
        self.struct = native.Tables(
            q_indptr=_address(self.q_indptr, "qo_indptr"),
            seq_lens=_address(self.seq_lens, "seq_lens"),
            table_rows=_address(self.table_rows, "table_rows"),
            num_requests=_address(self.num_requests, "num_requests"),
            table_stride=self.read.stride(0),
            num_table_rows=self.read.shape[0],
            table_columns=self._columns,
            lens_are_int64=seq_lens.dtype is torch.int64,
            rows_are_int64=table_rows is not None and table_rows.dtype is torch.int64,
            batch=self.batch,
            q_len_per_request=options.uniform_q_len,
            max_rows=self.max_rows,
            page_size=options.page_span,
        )
        self.address = ctypes.addressof(self.struct)

    def takes(self, rows: int) -> bool:
        """Whether a run may have so many rows, fewer than `max_rows`. Those of q_indptr are known on the CPU alone."""
        least = int(self.q_indptr[-1]) if self._is_cpu and self.q_indptr is not None else 0
        return self._takes_fewer_rows and rows >= least

    def are_of(self, given: Sequence[torch.Tensor | None], max_rows: int, options: Options) -> bool:
        """Whether block tables, seq_lens, q_indptr, table_rows and num_requests lie where those of this object do, so
        that it may be planned again."""
        return options is self._options and max_rows == self._max_rows and _places_of(given) == self._places

    def read_again(self) -> None:
        """Takes the numbers that are there now. Before the first plan they are those of the construction."""
        if self._is_new:
            self._is_new = False
            return
        if self._is_cpu:
            mine = (self.read, self.seq_lens, self.q_indptr, self.table_rows, self.num_requests)
            for copy, tensor in zip(mine, self._given, strict=True):
                if copy is not None and tensor is not None:
                    copy.copy_(tensor)
        self._judge()

    def _judge(self) -> None:
        """A card's numbers are copied to the host and checked if the user says so, but not inside of a capture."""
        self.max_page = -1
        if self._is_cpu or (self._is_checked and not torch.cuda.is_current_stream_capturing()):
            self._check_numbers(has_pages=not self._options.is_selected)

    def take(self, options: Options) -> None:
        """The struct for the options that are planned next."""
        struct = self.struct
        struct.num_q_heads, struct.num_kv_heads = options.num_q_heads, options.num_kv_heads
        struct.visibility = options.visibility

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_indptr, page numbers of all requests in a row, and tokens; on the host."""
        count = self.batch if self.num_requests is None else max(0, min(self.batch, int(self.num_requests)))
        if self.q_indptr is None:
            q_indptr = torch.arange(count + 1, device="cpu") * self.rows_a_request
        else:
            q_indptr = self.q_indptr[: count + 1].cpu().long()
        lens = self.seq_lens[:count].cpu().long()
        pages = -(-lens // self.page_size)
        return q_indptr, torch.cat([pages.new_zeros(1), pages.cumsum(0)]), lens

    def _check_numbers(self, *, has_pages: bool) -> None:
        q_indptr, _, lens = self.numbers()
        most = self._columns * self.page_size
        for name, numbers, wrong, says in (
            ("seq_lens", lens, (lens < 0) | (lens > most), f"is outside 0..{most}, what a row of block_tables holds"),
            ("qo_indptr", q_indptr[1:], q_indptr.diff() < 0, "is smaller than the entry before it"),
            (
                "qo_indptr",
                q_indptr,
                (q_indptr < 0) | (q_indptr > self.max_rows),
                f"is negative or beyond max_rows={self.max_rows}",
            ),
        ):
            if bool(wrong.any()):
                i = int(wrong.nonzero()[0])
                raise PlanError(f"{name} has {int(numbers[i])} for request {i}, which {says}.")
        if not has_pages:
            return
        pages, tables = -(-lens // self.page_size), self.read
        if self.table_rows is not None:
            rows = self.table_rows[: len(lens)].long()
            if bool(((rows < 0) | (rows >= len(tables))).any()):
                raise PlanError(
                    f"table_rows reaches {int(rows.max())} (least {int(rows.min())}) but block_tables has "
                    f"{len(tables)} rows. "
                    "Pass row numbers of block_tables."
                )
            tables = tables[rows]
        used = tables[: len(lens)].cpu()[torch.arange(tables.shape[1], device="cpu") < pages[:, None]]
        if used.numel():
            least, self.max_page = int(used.min()), int(used.max())
            if least < 0:
                raise PlanError(f"block_tables has page {least} in use: every page in use is 0 or more.")


def _places_of(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """The memory that tensors describe."""
    return [t if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]


def _address(tensor: torch.Tensor | None, name: str) -> int | None:
    return None if tensor is None else tensor_memory.address(tensor, name, PlanError)


def _entries(tensor: Any, name: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> int:
    """Checks for a contiguous tensor of one dimension on the device."""
    checks.same_device(checks.tensor(tensor, name, PlanError), device, name, PlanError)
    if tensor.dim() != 1 or tensor.dtype not in dtypes or not tensor.is_contiguous():
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise PlanError(
            f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()} and "
            f"dtype {tensor.dtype}: pass a contiguous tensor of one dimension, {kinds}."
        )
    return int(tensor.numel())


def _check_tables(tables: Any, batch: int, device: torch.device) -> torch.Tensor:
    checks.same_device(checks.tensor(tables, "block_tables", PlanError), device, "block_tables", PlanError)
    if tables.dim() != 2 or tables.shape[0] < batch:
        raise PlanError(
            f"block_tables has shape {tuple(tables.shape)} but seq_lens has {batch} requests: "
            f"pass one row for each, [{batch}, pages]."
        )
    if tables.dtype != torch.int32 or (tables.shape[1] > 1 and tables.stride(1) != 1):
        raise PlanError(
            f"block_tables has dtype {tables.dtype} and strides {tables.stride()}: "
            "pass int32 with contiguous rows, which kernels read in place."
        )
    return tables
