"""The lengths of a batch: index tensors of the caller, which the planner reads in place, and its errors as
sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .. import native
from ..base import checks
from ..base.errors import PlanError

# include/flashpage/plan/read_lengths.h, LengthError
_NOT_ZERO_FIRST, _DECREASES, _OUTSIDE, _TOO_MANY, _TOO_MANY_PARTS = 1, 2, 3, 4, 6
_INDEX_DTYPES = (torch.int32, torch.int64)
_KV_LENS = 4  # fp_plan_result::error_array


class Lengths(NamedTuple):
    """Index tensors of one batch, on the host or on the device; None: not given."""

    q_indptr: torch.Tensor | None = None  # rows, [batch + 1]
    kv_indptr: torch.Tensor | None = None  # pages (ragged: tokens), [batch + 1]
    last_page_len: torch.Tensor | None = None  # [batch]
    kv_lens: torch.Tensor | None = None  # tokens, [batch]


# Lengths, or only their entries, which take 0.3 us less to construct.
Given: TypeAlias = tuple[torch.Tensor | None, ...]


class Names(NamedTuple):
    """The caller's names for lengths and page numbers. `indices` "": K and V are ragged. `last_page_len` "": all pages
    are full. `last_page_len` equal to `kv_lens`: the caller has no argument for last pages."""

    q_indptr: str
    kv_indptr: str
    last_page_len: str
    kv_lens: str
    indices: str = ""


def starts_of(counts: torch.Tensor) -> torch.Tensor:
    """Where each of some parts in a row begins, and where the last one ends."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def to_host(lengths: Lengths) -> Lengths:
    """These lengths on the host. Those on a device come back in one copy, which waits for the device."""
    return Lengths(*all_to_host(lengths))


def all_to_host(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The tensors on the host, by one copy; int32 may become int64, other types stay for the error that names them."""
    there = [t for t in tensors if t is not None and not t.is_cpu]
    if not there:
        return list(tensors)
    joined = there[0].reshape(-1) if len(there) == 1 else torch.cat([t.reshape(-1).long() for t in there])
    parts = iter(joined.cpu().split([t.numel() for t in there]))
    return [t if t is None or t.is_cpu else _as_given(next(parts), t) for t in tensors]


def _as_given(numbers: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Numbers that came back in one dimension, in the shape of the given tensor and, unless an integer, its type."""
    if given.dim() != 1:
        numbers = numbers.reshape(given.shape)
    return numbers if given.dtype in _INDEX_DTYPES else numbers.to(given.dtype)


def batch_of(indptr: torch.Tensor | None, name: str) -> int:
    """Number of requests in an indptr."""
    indptr = checks.tensor(indptr, name, PlanError)
    if indptr.dim() != 1 or indptr.numel() < 1:  # 0.15 us less than comparing the shape
        raise PlanError(
            f"{name} has shape {tuple(indptr.shape)}: pass one entry for each request and the total, [batch + 1]."
        )
    return indptr.numel() - 1


def check_numbers(tensor: Any, name: str) -> None:
    """Checks for a tensor of integers."""
    if checks.tensor(tensor, name, PlanError).dtype not in _INDEX_DTYPES:
        raise PlanError(f"{name} has dtype {tensor.dtype}: pass int32 or int64.")


def wrong_shape(tensor: torch.Tensor, length: int, name: str, first: str) -> PlanError:
    """The error for an array of lengths that does not fit the batch, whose requests `first` counts."""
    if tensor.dim() != 1:
        return PlanError(f"{name} has shape {tuple(tensor.shape)}: pass one dimension of {length} entries.")
    is_indptr = "indptr" in name
    fix = "one entry a request and the total" if is_indptr else "one entry a request"
    requests = f"{length - is_indptr} requests by {first} (expected {length})"
    return PlanError(f"{name} has {tensor.shape[0]} entries but the batch has {requests}: pass {fix}.")


def lengths_are_missing(names: Names) -> PlanError:
    """The error for pages whose tokens nothing gives."""
    if names.last_page_len == names.kv_lens:
        return PlanError(f"{names.kv_lens}=None: pass the tokens of each request, [batch].")
    return PlanError(
        f"{names.last_page_len}=None and {names.kv_lens}=None: pass the tokens in each request's last page, "
        "or the tokens of each request, [batch]."
    )


def complaint(result: native.PlanResult, names: Names, page_size: int) -> PlanError:
    """The error for the planner's finding; `names` are the caller's names for the four arrays."""
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
            f"{found} is outside 1..{page_size}, the page size: pass the tokens in the request's last page. "
            "0 is right only for a request without pages."
        )
    if reason == _TOO_MANY:
        return PlanError(
            f"{found} exceeds the {limit} tokens of the request's pages: give it more pages or a smaller length."
        )
    if reason == _TOO_MANY_PARTS:
        return PlanError(f"{found} ends rows in more than {limit} chunks: plan fewer rows, or larger chunks.")
    return PlanError(f"{found} makes a total that does not fit in 31 bits (at most {limit}): split the batch.")
