"""Levels that nobody shares: where a level has the same rows as the one below it, both are one list of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class PagedLevel(NamedTuple):
    """A level as it is planned; lengths on the host."""

    number: int  # among the wrapper's levels
    q_indptr: torch.Tensor  # [requests + 1] rows
    kv_indptr: torch.Tensor  # [requests + 1] pages
    indices: torch.Tensor  # page numbers, on the host or on the device
    last_page_len: torch.Tensor | None  # [requests]; None: pages of one token


def folded(levels: Sequence[PagedLevel], page_size: int, is_causal: bool) -> list[PagedLevel]:
    """The levels, those joined that can be; one fewer is one launch and one state to merge fewer in every layer."""
    found = [levels[-1]]
    for level in reversed(levels[:-1]):
        if _can_join(level, found[0], page_size, is_causal and found[0].number == levels[-1].number):
            found[0] = _joined(level, found[0])
        else:
            found.insert(0, level)
    return found


def _can_join(upper: PagedLevel, lower: PagedLevel, page_size: int, is_causal: bool) -> bool:
    """Whether the lower level's tokens stand right behind the upper one's, and rows see the same of them."""
    if upper.q_indptr.shape != lower.q_indptr.shape or not torch.equal(upper.q_indptr, lower.q_indptr):
        return False
    pages, more = upper.kv_indptr.diff(), lower.kv_indptr.diff()
    if not all(is_whole(level, page_size) for level in (upper, lower)):
        return False
    if page_size > 1:
        assert upper.last_page_len is not None
        if not bool(((pages == 0) | (more == 0) | (upper.last_page_len == page_size)).all()):
            return False
    if is_causal:  # rows that have no token of their own would hide the upper level's last ones
        rows, tokens = lower.q_indptr.diff(), more * page_size
        if lower.last_page_len is not None:
            tokens = tokens + lower.last_page_len - page_size
        return bool(((rows <= 1) | (rows <= tokens)).all())
    return True


def is_whole(level: PagedLevel, page_size: int) -> bool:
    """Whether every page of the level is named, and the last ones have as many tokens as pages can; else the planner
    tells."""
    pages, last = level.kv_indptr.diff(), level.last_page_len
    is_increasing = int(level.kv_indptr[0]) >= 0 and bool((pages >= 0).all())
    is_filled = last is None or bool(((last >= (pages > 0).int()) & (last <= page_size)).all())
    return is_increasing and is_filled and level.indices.dim() == 1 and len(level.indices) >= int(level.kv_indptr[-1])


def _joined(upper: PagedLevel, lower: PagedLevel) -> PagedLevel:
    counts, more = upper.kv_indptr.long().diff(), lower.kv_indptr.long().diff()
    indptr = torch.cat([counts.new_zeros(1), (counts + more).cumsum(0)])
    # Each request's pages of the upper level, then its own: places in both lists, one behind the other.
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
