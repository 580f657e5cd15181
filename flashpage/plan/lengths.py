"""The lengths of a batch: index tensors of the caller, read in place by the planner, and its complaints as
sentences."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import native
from ..base import checks
from ..base.errors import PlanError
from ..native import fastcall

_NOT_ZERO_FIRST, _DECREASES, _OUTSIDE, _TOO_MANY = 1, 2, 3, 4  # csrc/flashpage.h, fp_length_error
_KV_LENS = 4  # fp_plan_result::error_array


class Lengths(NamedTuple):
    """Index tensors of one batch, on the host or on the device; None: not given."""

    q_indptr: torch.Tensor | None = None  # rows, [batch + 1]
    kv_indptr: torch.Tensor | None = None  # pages (ragged: tokens), [batch + 1]
    last_page_len: torch.Tensor | None = None  # [batch]
    kv_lens: torch.Tensor | None = None  # tokens, [batch]


# Lengths, or their entries alone, which take 0.3 us less to put together.
Given = tuple[torch.Tensor | None, ...]


def to_host(lengths: Lengths) -> Lengths:
    """The same lengths on the host. All that lie on a device come back in one copy, which waits for the device."""
    return Lengths(*all_to_host(lengths))


def all_to_host(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The same tensors on the host, in one copy."""
    there = [t for t in tensors if t is not None and not t.is_cpu]
    if not there:
        return list(tensors)
    joined = there[0] if len(there) == 1 else torch.cat([t.reshape(-1).long() for t in there])
    parts = iter(joined.cpu().split([t.numel() for t in there]))
    return [t if t is None or t.is_cpu else next(parts) for t in tensors]


class HeldLengths:
    """Copies of the batch's lengths, which the planner reads: callers may reuse their tensors at once."""

    def __init__(self, problem: native.ProblemStruct, names: tuple[str, str, str, str]) -> None:
        self._names = names
        self._arrays = (problem.q_indptr, problem.kv_indptr, problem.last_page_len, problem.kv_lens)
        self._problem = problem
        self.struct = native.LengthsStruct(problem=ctypes.addressof(problem))
        self._address = ctypes.addressof(self.struct)
        self._take = fastcall.builtins().lengths
        self._most = 0  # requests that there is room for
        self._make_room(1023)

    def take(self, given: Given) -> int | None:
        """The rows of the batch; None where a tensor lies on a device."""
        rows = self._take(self._address, *given)
        return rows if rows >= 0 else self._take_judged(Lengths(*given))

    def by_request(self) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """q_indptr, kv_indptr, last_page_len and kv_lens, int64; None: not given."""
        found = [None if array.data is None else self._numbers(i).long() for i, array in enumerate(self._arrays)]
        assert found[1] is not None
        return found[0], found[1], found[2], found[3]

    def _make_room(self, batch: int) -> None:
        self._most = batch
        self._bytes = 8 * (batch + 1)
        self._copies = torch.empty((4, self._bytes), dtype=torch.uint8)
        self.struct.copies, self.struct.bytes_of_a_copy = self._copies.data_ptr(), self._bytes

    def _take_judged(self, given: Lengths) -> int | None:
        """Tensors that C could not read or had no room for, judged one by one."""
        first = 1 if given.q_indptr is None and self._problem.q_len_per_request else 0
        batch = batch_of(given[first], self._names[first])
        checks.tensor(given.kv_indptr, self._names[1], PlanError)
        if batch > self._most:
            self._make_room(batch)
        self._problem.batch = batch
        for i, tensor in enumerate(given):
            self._arrays[i].data = None
            if tensor is None:
                continue
            if not checks.tensor(tensor, self._names[i], PlanError).is_cpu:
                return None
            self._hold(i, tensor, batch + (i < 2))
        self.struct.kv_begin, self.struct.kv_end = int(self._numbers(1)[0]), int(self._numbers(1)[-1])
        self.struct.least_rows = self.struct.most_rows = 0
        if given.q_indptr is None:
            return 0
        rows = self._numbers(0)
        counts = rows.diff()
        if len(counts := counts[counts > 0]):
            self.struct.least_rows, self.struct.most_rows = int(counts.min()), int(counts.max())
        return max(0, int(rows[-1]) - int(rows[0]))

    def _hold(self, i: int, tensor: torch.Tensor, length: int) -> None:
        name, array = self._names[i], self._arrays[i]
        if tensor.dtype not in (torch.int32, torch.int64):
            raise PlanError(f"{name} has dtype {tensor.dtype}: pass int32 or int64.")
        if tensor.dim() != 1 or tensor.shape[0] != length:
            raise _wrong_shape(tensor, length, name)
        array.is_int64, array.stride, array.length = int(tensor.dtype is torch.int64), 1, length
        array.data = self._copies.data_ptr() + i * self._bytes
        self._numbers(i).copy_(tensor)

    def _numbers(self, i: int) -> torch.Tensor:
        """Of an array, in place."""
        array = self._arrays[i]
        dtype = torch.int64 if array.is_int64 else torch.int32
        return self._copies[i].view(dtype)[: array.length]


def batch_of(indptr: torch.Tensor | None, name: str) -> int:
    """Requests of an indptr."""
    indptr = checks.tensor(indptr, name, PlanError)
    if indptr.dim() != 1 or indptr.numel() < 1:  # 0.15 us less than asking for the shape
        raise PlanError(f"{name} has shape {tuple(indptr.shape)}: pass one entry a request and the total, [batch + 1].")
    return indptr.numel() - 1


def _wrong_shape(tensor: torch.Tensor, length: int, name: str) -> PlanError:
    if tensor.dim() != 1:
        return PlanError(f"{name} has shape {tuple(tensor.shape)}: pass one dimension of {length} entries.")
    if "indptr" in name:
        fix = f"the batch has {length - 1} requests (expected {length}): pass one entry a request and the total."
    else:
        fix = f"the batch has {length} requests (expected {length}): pass one entry a request."
    return PlanError(f"{name} has {tensor.shape[0]} entries but {fix}")


def complaint(result: native.PlanResult, names: tuple[str, str, str, str], page_size: int) -> PlanError:
    """What the planner found wrong with the lengths; `names` are the caller's words for the four arrays."""
    name = names[result.error_array - 1] if 1 <= result.error_array <= 4 else "lengths"
    index, value, limit, reason = result.error_index, result.error_value, result.error_limit, result.error_reason
    found = f"{name}[{index}]={value}"
    if reason == _NOT_ZERO_FIRST:
        return PlanError(f"{found} is negative: start at 0 (or at the request's offset).")
    if reason == _DECREASES:
        return PlanError(f"{found} is smaller than the entry before it, {limit}: an indptr never decreases.")
    if reason == _OUTSIDE and result.error_array == _KV_LENS:
        return PlanError(f"{found} is negative: pass the tokens of each request.")
    if reason == _OUTSIDE:
        return PlanError(
            f"{found} is outside 1..{page_size}, the page size: pass the tokens in the request's last page (0 is right "
            "for a request without pages alone)."
        )
    if reason == _TOO_MANY:
        return PlanError(
            f"{found} exceeds the {limit} tokens of the request's pages: give it more pages or a smaller length."
        )
    return PlanError(f"{found} makes a total that does not fit in 31 bits (at most {limit}): split the batch.")
