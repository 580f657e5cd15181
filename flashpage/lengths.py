"""The lengths of a batch: index tensors of the caller, read in place by the planner, and its complaints as
sentences."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from . import arguments, host
from .errors import PlanError

_NOT_ZERO_FIRST, _DECREASES, _OUTSIDE, _TOO_MANY = 1, 2, 3, 4  # csrc/flashpage.h, fp_length_error
_KV_LENS = 4  # fp_plan_result::error_array


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


def fill(array: host.IndexArray, tensor: torch.Tensor, length: int, name: str) -> bytes:
    """Points the planner at a host tensor of `length` entries.

    Returns a copy of its numbers, for plans that are derived after the caller may have reused the tensor.
    """
    dtype = tensor.dtype
    if dtype is torch.int32:
        array.is_int64, size = 0, 4
    elif dtype is torch.int64:
        array.is_int64, size = 1, 8
    else:
        raise PlanError(f"{name} has dtype {dtype}: pass int32 or int64.")
    shape = tensor.shape
    if len(shape) != 1 or shape[0] != length:
        raise _wrong_shape(tensor, length, name)
    array.data = address = tensor.data_ptr()
    if tensor.is_contiguous():
        array.stride = 1
        return ctypes.string_at(address, length * size)
    array.stride = stride = tensor.stride(0)
    return ctypes.string_at(address, ((length - 1) * stride + 1) * size)


def batch_of(indptr: torch.Tensor, name: str) -> int:
    """Requests of an indptr."""
    arguments.tensor(indptr, name, PlanError)
    shape = indptr.shape
    if len(shape) != 1 or shape[0] < 1:
        raise PlanError(f"{name} has shape {tuple(indptr.shape)}: pass one entry a request and the total, [batch + 1].")
    return shape[0] - 1


def _wrong_shape(tensor: torch.Tensor, length: int, name: str) -> PlanError:
    if tensor.dim() != 1:
        return PlanError(f"{name} has shape {tuple(tensor.shape)}: pass one dimension of {length} entries.")
    if "indptr" in name:
        fix = f"the batch has {length - 1} requests (expected {length}): pass one entry a request and the total."
    else:
        fix = f"the batch has {length} requests (expected {length}): pass one entry a request."
    return PlanError(f"{name} has {tensor.shape[0]} entries but {fix}")


def first(copy: bytes, array: host.IndexArray) -> int:
    """The first number of a copied array, without torch."""
    return int.from_bytes(copy[:8] if array.is_int64 else copy[:4], "little", signed=True)


def last(copy: bytes, array: host.IndexArray) -> int:
    return int.from_bytes(copy[-8:] if array.is_int64 else copy[-4:], "little", signed=True)


def restore(array: host.IndexArray, copy: bytes | None) -> object:
    """Points the planner at a copy of an array; the caller holds what is returned while the planner reads it."""
    buffer = None if copy is None else ctypes.create_string_buffer(copy, len(copy))
    array.data = None if buffer is None else ctypes.addressof(buffer)
    return buffer


def numbers(array: host.IndexArray, copy: bytes | None) -> torch.Tensor | None:
    """The numbers of a copied array, int64."""
    if copy is None:
        return None
    if not copy:
        return torch.zeros(0, dtype=torch.int64)
    dtype = torch.int64 if array.is_int64 else torch.int32
    return torch.frombuffer(bytearray(copy), dtype=dtype)[:: max(1, array.stride)].long()


def complaint(result: host.PlanResult, names: tuple[str, str, str, str], page_size: int) -> PlanError:
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
    if reason == _OUTSIDE and limit == 0:
        return PlanError(f"{found} but the request has no pages: pass 0 for it.")
    if reason == _OUTSIDE:
        return PlanError(
            f"{found} is outside 1..{page_size}, the page size: pass the tokens in the request's last page (0 for a "
            "request without pages)."
        )
    if reason == _TOO_MANY:
        return PlanError(
            f"{found} exceeds the {limit} tokens of the request's pages: give it more pages or a smaller length."
        )
    return PlanError(f"{found} makes a total that does not fit in 31 bits (at most {limit}): split the batch.")
