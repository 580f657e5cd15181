"""The lengths of a batch: index tensors of the caller, read in place by the planner, and its complaints as sentences."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from . import arguments, host
from .errors import PlanError

_NOT_ZERO_FIRST, _DECREASES, _OUTSIDE, _TOO_MANY, _OVERFLOW = 1, 2, 3, 4, 5  # csrc/flashpage.h, fp_length_error


class Lengths(NamedTuple):
    """Index tensors of one batch, on the host or on the device; None: not given."""

    q_indptr: torch.Tensor | None = None  # rows, [batch + 1]
    kv_indptr: torch.Tensor | None = None  # pages (ragged: tokens), [batch + 1]
    last_page_len: torch.Tensor | None = None  # [batch]
    kv_lens: torch.Tensor | None = None  # tokens, [batch]


def to_host(lengths: Lengths) -> Lengths:
    """The same lengths on the host. All that lie on a device come back in one copy, which waits for the device."""
    there = [t for t in lengths if t is not None and not t.is_cpu]
    if not there:
        return lengths
    joined = there[0] if len(there) == 1 else torch.cat([t.reshape(-1).long() for t in there])
    parts = iter(joined.cpu().split([t.numel() for t in there]))
    return Lengths(*(t if t is None or t.is_cpu else next(parts) for t in lengths))


def fill(array: host.IndexArray, tensor: torch.Tensor | None, length: int, name: str) -> None:
    """Points the planner at a host tensor of `length` entries, or at nothing."""
    if tensor is None:
        array.data = None
        return
    dtype = tensor.dtype
    if dtype is torch.int32:
        array.is_int64 = 0
    elif dtype is torch.int64:
        array.is_int64 = 1
    else:
        raise PlanError(f"{name} has dtype {dtype}: pass int32 or int64.")
    if tensor.dim() != 1 or tensor.shape[0] != length:
        raise _wrong_shape(tensor, length, name)
    array.data = tensor.data_ptr()
    array.stride = tensor.stride(0)
    array.length = length


def batch_of(indptr: torch.Tensor, name: str) -> int:
    """Requests of an indptr."""
    arguments.tensor(indptr, name, PlanError)
    if indptr.dim() != 1 or indptr.shape[0] < 1:
        raise PlanError(f"{name} has shape {tuple(indptr.shape)}: pass one entry a request and the total, [batch + 1].")
    return indptr.shape[0] - 1


def _wrong_shape(tensor: torch.Tensor, length: int, name: str) -> PlanError:
    if tensor.dim() != 1:
        return PlanError(f"{name} has shape {tuple(tensor.shape)}: pass one dimension of {length} entries.")
    if "indptr" in name:
        fix = f"the batch has {length - 1} requests (expected {length}): pass one entry a request and the total."
    else:
        fix = f"the batch has {length} requests (expected {length}): pass one entry a request."
    return PlanError(f"{name} has {tensor.shape[0]} entries but {fix}")


def entry(array: host.IndexArray, index: int) -> int:
    """One number of a filled array, without torch."""
    if array.is_int64:
        return ctypes.c_int64.from_address(array.data + 8 * array.stride * index).value
    return ctypes.c_int32.from_address(array.data + 4 * array.stride * index).value


def snapshot(array: host.IndexArray) -> bytes | None:
    """A copy of the numbers, for plans derived after the caller may have reused its tensors; None: not given."""
    if array.data is None or array.length == 0:
        return None
    return ctypes.string_at(array.data, ((array.length - 1) * array.stride + 1) * (8 if array.is_int64 else 4))


def restore(array: host.IndexArray, copy: bytes | None) -> object:
    """Points the planner at a snapshot; the caller holds what is returned while the planner reads it."""
    buffer = None if copy is None else ctypes.create_string_buffer(copy, len(copy))
    array.data = None if buffer is None else ctypes.addressof(buffer)
    return buffer


def numbers(array: host.IndexArray) -> torch.Tensor | None:
    """The numbers of a filled array, copied to int64."""
    copy = snapshot(array)
    if copy is None:
        return None if array.data is None else torch.zeros(0, dtype=torch.int64)
    dtype = torch.int64 if array.is_int64 else torch.int32
    return torch.frombuffer(bytearray(copy), dtype=dtype)[:: max(1, array.stride)].long()


def complaint(result: host.PlanResult, names: tuple[str, str, str, str], page_size: int) -> PlanError:
    """What the planner found wrong with the lengths; `names` are the caller's words for the four arrays."""
    name = names[result.error_array - 1] if 1 <= result.error_array <= 4 else "lengths"
    index, value, limit = result.error_index, result.error_value, result.error_limit
    entry_text = f"{name}[{index}]={value}"
    sentences = {
        _NOT_ZERO_FIRST: f"{entry_text} is negative: start at 0 (or at the request's offset).",
        _DECREASES: f"{entry_text} is smaller than the entry before it: an indptr never decreases.",
        _OUTSIDE: f"{entry_text} is negative: pass tokens."
        if name == names[3]
        else f"{entry_text} is outside 1..{page_size}, the page size: pass the tokens in the request's last page "
        "(0 for a request without pages).",
        _TOO_MANY: f"{entry_text} exceeds the {limit} tokens of the request's pages: give it more pages or a smaller length.",
        _OVERFLOW: f"{name}: a total of {value} does not fit in 31 bits (at entry {index}): split the batch.",
    }
    return PlanError(sentences.get(result.error_reason, f"{entry_text} is wrong."))
