"""The batch of a session's newest plan: lengths, page numbers and mask bits, with memory and stream. It is passed down,
so that plans need not read the session."""

from __future__ import annotations

import ctypes
from typing import TypeAlias

import torch

from .. import native
from ..base import checks
from ..base.errors import PlanError
from ..base.memory import empty
from ..kernels import devices
from ..kernels.options import Options
from .capacity import Capacity
from .device_lengths import TableLengths
from .lengths import Given, Lengths, Names, batch_of, check_numbers, lengths_are_missing, to_host, wrong_shape
from .mixed_batch import Fork
from .page_indices import KvIndices, MaskBits
from .workspaces import Workspaces

NO_LIMIT = 2**63 - 1
_ANY_COUNT = (0, 2**31 - 1)


# Bounds for the rows and for the tokens of every request, which the caller passed with the lengths; None: no bound.
Longest: TypeAlias = tuple[int | None, int | None]
NO_BOUNDS: Longest = None, None
BOUND_NAMES = ("max_token_per_sequence", "max_sequence_kv")


class Batch:
    """One object for each session, filled again at every plan: a new one would cost each plan a microsecond."""

    __slots__ = (
        "_arrays",
        "_bytes",
        "_copies",
        "_most",
        "address",
        "capacity",
        "card",
        "device",
        "device_index",
        "fixed_requests",
        "fork",
        "generation",
        "is_graph",
        "longest",
        "mask",
        "most_rows",
        "names",
        "pages",
        "row_runs",
        "stream",
        "struct",
        "tables",
        "workspaces",
    )

    def __init__(self, device: torch.device, is_graph: bool, names: Names, workspaces: Workspaces) -> None:
        self.device, self.is_graph, self.workspaces = device, is_graph, workspaces
        self.device_index = -1 if device.type == "cpu" else device.index
        self.card = devices.of(device)
        self.names = names  # the caller's names for the arrays of lengths
        self.capacity: Capacity | None = None  # graph mode: limits of all batches; None: buffers fix the batch
        self.fixed_requests: int | None = None  # graph mode without capacities: requests of every batch
        self.fork = Fork(self.device_index)
        self.mask = MaskBits(device)
        self.struct = struct = native.BatchStruct(most_total_rows=NO_LIMIT, most_entries=NO_LIMIT)
        struct.longest_q = struct.longest_kv = NO_LIMIT
        struct.has_full_pages = not names.last_page_len
        struct.least_requests, struct.most_requests = _ANY_COUNT
        self.longest = NO_BOUNDS
        self.address = ctypes.addressof(struct)
        self.pages = KvIndices(device, struct)
        self._arrays = (struct.q_indptr, struct.kv_indptr, struct.last_page_len, struct.kv_lens)
        self._make_room(1023)
        self.row_runs: torch.Tensor | None = None  # what rows may see (Pages.row_runs); None: all tokens
        self.tables: TableLengths | None = None  # if the device plans
        self.generation = 0  # number of the session's plan for this batch
        self.most_rows = 0  # rows of q in all plans of a graph
        self.stream = 0

    @property
    def requests(self) -> int:
        """Number of requests; if only the device knows it, the largest number."""
        return self.struct.requests if self.tables is None else self.tables.batch

    @property
    def entries(self) -> int:
        """Number of page numbers in use; ragged: of tokens."""
        return self.struct.kv_end - self.struct.kv_begin

    def use_options(self, options: Options) -> None:
        """Sets what later batches have in common."""
        struct = self.struct
        struct.q_len_per_request = options.uniform_q_len
        if self.capacity is not None:
            struct.most_total_rows, struct.most_entries = self.capacity.rows_of(options), self.capacity.entries

    def use_capacity(self, capacity: Capacity) -> None:
        """Graph mode: the largest batch."""
        self.capacity, self.struct.most_requests = capacity, min(capacity.batch, _ANY_COUNT[1])

    def fix_requests(self, count: int) -> None:
        """Graph mode: the number of requests in every batch."""
        self.fixed_requests = self.struct.least_requests = self.struct.most_requests = count

    def check_requests(self, count: int) -> None:
        """Graph mode: the number of requests that captured launches serve."""
        if self.capacity is not None:
            self.capacity.check_batch(count)
        if self.fixed_requests not in (None, count):
            raise PlanError(
                f"the batch has {count} requests but the wrapper's graph buffers fix it at {self.fixed_requests}. "
                "Pad the batch with empty requests, or make a wrapper for this size."
            )

    def check_rows(self, group_size: int) -> None:
        """Packed rows, query heads of a KV head included, have numbers of 31 bits."""
        if self.struct.rows * group_size >= 2**31:
            raise PlanError(
                f"{self.names[0]} gives {self.struct.rows} rows of {group_size} query heads a KV head: "
                "split the batch, as plans number them with 31 bits."
            )

    def use_bounds(self, longest: Longest) -> None:
        """Sets the bounds, beyond which a request is refused."""
        limits = [
            NO_LIMIT if bound is None else checks.whole(name, bound, 0, NO_LIMIT)
            for name, bound in zip(BOUND_NAMES, longest, strict=True)
        ]
        self.longest = longest
        self.struct.longest_q, self.struct.longest_kv = limits

    def use_row_runs(self, row_runs: torch.Tensor | None) -> None:
        """Sets what the rows of the next plan may see."""
        self.row_runs = row_runs
        self.struct.row_runs = None if row_runs is None else row_runs.data_ptr()
        self.struct.num_row_runs = 0 if row_runs is None else len(row_runs)

    def copied_to_host(self, given: Given, page_size: int) -> Lengths | None:
        """The lengths on the host, by one copy that waits for the device; None if all of them are there."""
        lengths = Lengths(*given)
        if all(not isinstance(tensor, torch.Tensor) or tensor.is_cpu for tensor in lengths):
            return None
        for tensor, name in zip(lengths, self.names, strict=False):
            if tensor is not None:
                checks.tensor(tensor, name, PlanError)
        if page_size == 1 and lengths.last_page_len is not None and not lengths.last_page_len.is_cpu:
            lengths = lengths._replace(last_page_len=None)  # pages of one token: last_page_len says nothing
        return to_host(lengths)

    def take_judged(self, given: Lengths, page_size: int) -> None:
        """Takes lengths on the host that the library could not read in place, one by one."""
        if page_size > 1 and given.last_page_len is given.kv_lens is None and not self.struct.has_full_pages:
            raise lengths_are_missing(self.names)
        first = 1 if given.q_indptr is None and self.struct.q_len_per_request else 0
        requests = batch_of(given[first], self.names[first])
        checks.tensor(given.kv_indptr, self.names[1], PlanError)
        for tensor, name in zip(given, self.names, strict=False):
            if tensor is not None:
                checks.tensor(tensor, name, PlanError)
        if requests > self._most:
            self._make_room(requests)
        self.struct.requests = requests
        for i, tensor in enumerate(given):
            self._arrays[i].data = None
            if tensor is not None:
                self._hold(i, tensor, requests + (i < 2), self.names[first])
        native.load().fp_batch_sum_up(self.address)

    def numbers(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_indptr, kv_indptr and tokens of each request, int64 on the host."""
        if self.tables is not None:
            return self.tables.numbers()
        found = [None if array.data is None else self._numbers(i).long() for i, array in enumerate(self._arrays)]
        q_indptr, kv_indptr, last_page_len, kv_lens = found
        assert kv_indptr is not None
        if q_indptr is None:
            q_indptr = torch.arange(self.struct.requests + 1, device="cpu") * self.struct.q_len_per_request
        if kv_lens is None:
            kv_lens = kv_indptr.diff() * max(1, page_size)
            if page_size and last_page_len is not None:
                kv_lens = (kv_lens + last_page_len - page_size).clamp(min=0)
        return q_indptr, kv_indptr, kv_lens

    def _make_room(self, requests: int) -> None:
        self._most = requests
        self._bytes = 8 * (requests + 1)
        self._copies = empty((4, self._bytes), torch.uint8, "cpu")
        self.struct.copies, self.struct.bytes_of_a_copy = self._copies.data_ptr(), self._bytes

    def _hold(self, i: int, tensor: torch.Tensor, length: int, first: str) -> None:
        name, array = self.names[i], self._arrays[i]
        check_numbers(tensor, name)
        if tensor.dim() != 1 or tensor.shape[0] != length:
            raise wrong_shape(tensor, length, name, first)
        array.is_int64, array.stride, array.length = int(tensor.dtype is torch.int64), 1, length
        array.data = self._copies.data_ptr() + i * self._bytes
        self._numbers(i).copy_(tensor)

    def _numbers(self, i: int) -> torch.Tensor:
        """The part of the copy that holds the numbers of array i, by their type."""
        array = self._arrays[i]
        dtype = torch.int64 if array.is_int64 else torch.int32
        return self._copies[i].view(dtype)[: array.length]
