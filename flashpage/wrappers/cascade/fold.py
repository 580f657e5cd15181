"""Joins levels: if a level has the same rows as the level below it, the two become one list of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class PagedLevel(NamedTuple):
    """A level as it is planned, with lengths on the host."""

    number: int  # among the wrapper's levels
    q_indptr: torch.Tensor  # [requests + 1] rows
    kv_indptr: torch.Tensor  # [requests + 1] pages
    indices: torch.Tensor  # page numbers, on the host or on the device
    last_page_len: torch.Tensor | None  # [requests]; None: pages of one token


def folded(levels: Sequence[PagedLevel], page_size: int, is_causal: bool) -> list[PagedLevel]:
    """The levels with all possible joins; each join saves a launch, and a state to merge, in every layer."""
    found = [levels[-1]]
    for level in reversed(levels[:-1]):
        if _can_join(level, found[0], page_size, is_causal and found[0].number == levels[-1].number):
            found[0] = _joined(level, found[0])
        else:
            found.insert(0, level)
    return found


def _can_join(upper: PagedLevel, lower: PagedLevel, page_size: int, is_causal: bool) -> bool:
    """Whether the lower level's tokens directly follow the upper one's, and rows see the same of them."""
    if upper.q_indptr.shape != lower.q_indptr.shape or not torch.equal(upper.q_indptr, lower.q_indptr):
        return False
    pages, more = upper.kv_indptr.diff(), lower.kv_indptr.diff()
    if not all(_is_whole(level, page_size) for level in (upper, lower)):
        return False
    if page_size > 1:
        assert upper.last_page_len is not None
        if not bool(((pages == 0) | (more == 0) | (upper.last_page_len == page_size)).all()):
            return False
    if is_causal:  # rows without a token of their own would hide the upper level's last tokens
        rows, tokens = lower.q_indptr.diff(), more * page_size
        if lower.last_page_len is not None:
            tokens = tokens + lower.last_page_len - page_size
        return bool(((rows <= 1) | (rows <= tokens)).all())
    return True


def _is_whole(level: PagedLevel, page_size: int) -> bool:
    """Whether the level names every page and its last pages are full; otherwise the planner reports the error."""
    pages, last = level.kv_indptr.diff(), level.last_page_len
    is_increasing = int(level.kv_indptr[0]) >= 0 and bool((pages >= 0).all())
    is_filled = last is None or bool(((last >= (pages > 0).int()) & (last <= page_size)).all())
    return is_increasing and is_filled and level.indices.dim() == 1 and len(level.indices) >= int(level.kv_indptr[-1])


def _joined(upper: PagedLevel, lower: PagedLevel) -> PagedLevel:
    counts, more = upper.kv_indptr.long().diff(), lower.kv_indptr.long().diff()
    indptr = torch.cat([counts.new_zeros(1), (counts + more).cumsum(0)])
    # Each request's pages of the upper level, then its own: the places of the two lists, joined.
    begins = torch.stack([upper.kv_indptr.long()[:-1], lower.kv_indptr.long()[:-1] + len(upper.indices)], 1).flatten()
    lengths = torch.stack([counts, more], 1).flatten()
    places = torch.repeat_interleave(begins - (lengths.cumsum(0) - lengths), lengths) + torch.arange(
        int(indptr[-1]), device="cpu"
    )
    indices = torch.cat([upper.indices, lower.indices.to(upper.indices.device)])
    last = lower.last_page_len
    if last is not None and upper.last_page_len is not None:
        last = torch.where(more > 0, last, upper.last_page_len.to(last.dtype))
    return PagedLevel(lower.number, lower.q_indptr, indptr, indices[places.to(indices.device)], last)
