"""Visible tokens of each level: a sliding window and chunks hide tokens of the upper levels row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.options import Options
from ...variants.row_mask import ROW, WITHIN, RowMask
from ...variants.variant import Variant
from .fold import PagedLevel, is_whole

_FROM = f"kv_idx >= first_token({ROW})"


class Level(NamedTuple):
    """Lengths of one level, int64 on the host."""

    q_indptr: torch.Tensor  # [requests + 1]
    kv_lens: torch.Tensor  # [requests] tokens

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Repeats a request's value for each of its rows."""
        return torch.repeat_interleave(values, self.q_indptr.diff())


class Shown(NamedTuple):
    """Levels as they are planned."""

    options: Options  # of the last level; other levels are not causal and have no window
    levels: list[PagedLevel]
    variants: list[Variant | None]  # masks of levels; None: nothing is hidden
    is_hidden: list[bool]  # whether a whole level is hidden


class LevelWindows:
    """The masks of all levels of a wrapper."""

    def __init__(self, num_levels: int, device: torch.device, is_graph: bool) -> None:
        self._is_graph = is_graph
        self._masks = [RowMask(_FROM, device) for _ in range(num_levels)]
        self._chunks = [RowMask(WITHIN, device) for _ in range(num_levels)]  # for requests that are not cut

    def plan(self, planned: Sequence[PagedLevel], options: Options) -> Shown:
        """The last level counts a window like a single batch. Chunks begin anywhere in a level: its requests are cut
        where their rows see other tokens, and keep the pages that these rows see; a mask hides the rest of a page.
        Captured batches keep their requests, so a mask hides all tokens outside of a row's chunk."""
        variants: list[Variant | None] = [None] * len(planned)
        found = Shown(options, list(planned), variants, [False] * len(planned))
        if (options.window_left < 0 and options.chunk == 0) or len(planned) == 1:
            return found
        levels = [_level(level, options.page_size) for level in planned]
        if any(bool((level.q_indptr.diff() < 0).any()) for level in levels):
            return found  # the planner reports the error
        found = found._replace(options=dataclasses.replace(options, chunk=0))
        for i, begin in enumerate(_begins(levels, options)):
            level, lengths, first = planned[i], levels[i], begin.first_token()
            if begin.chunk is not None and self._is_graph:
                end = torch.minimum(begin.chunk + options.chunk, lengths.by_row(lengths.kv_lens))
                variants[i] = self._chunks[level.number].set(_first_row(lengths), first_token=first, end_token=end)
                continue
            if begin.chunk is not None and is_whole(level, options.page_size):
                level, lengths, skipped = _cut(level, lengths, begin.chunk, options)
                found.levels[i], first = level, first - skipped
            is_last = i + 1 == len(planned)
            found.is_hidden[i] = not is_last and bool((first >= lengths.by_row(lengths.kv_lens)).all())
            # A captured level has a mask in every batch or in none.
            if self._is_graph or (not found.is_hidden[i] and bool((first > 0).any())):
                variants[i] = self._masks[level.number].set(_first_row(lengths), first_token=first)
        return found

    def copy(self) -> None:
        """Gives the masks of the last `plan` to runs, after all levels are planned."""
        for mask in (*self._masks, *self._chunks):
            mask.copy()


def _first_row(level: Level) -> torch.Tensor:
    """A row's index in the batch minus its q_idx, which is right-aligned within the level; one value a request."""
    return level.q_indptr[1:] - level.kv_lens


def _level(planned: PagedLevel, page_size: int) -> Level:
    lens = planned.kv_indptr.long().diff() * page_size
    if planned.last_page_len is not None:
        lens = torch.where(lens > 0, lens + planned.last_page_len - page_size, 0)
    return Level(planned.q_indptr.long(), lens)


class _Begins(NamedTuple):
    """The first token of a level that each row sees, [rows]; 0 or less: the level's first."""

    chunk: torch.Tensor | None  # None: no chunks
    window: torch.Tensor | None  # None: not counted here

    def first_token(self) -> torch.Tensor:
        """The later of the two."""
        if self.chunk is None or self.window is None:
            found = self.window if self.chunk is None else self.chunk
            assert found is not None
            return found
        return torch.maximum(self.chunk, self.window)


def _begins(levels: Sequence[Level], options: Options) -> list[_Begins]:
    """The begins of every level; without chunks only of levels before the last, whose plan counts the window."""
    last = levels[-1]
    rows = torch.arange(int(last.q_indptr[-1]), device="cpu")
    # A row's place among its request's tokens of the last level: right-aligned, as for causal.
    place = rows - last.by_row(last.q_indptr[1:] - last.kv_lens)
    tokens = torch.stack([level.by_row(level.kv_lens) for level in levels[:-1]])
    begins = [*(tokens.cumsum(0) - tokens), tokens.sum(0)]  # of each level, among the request's tokens
    position = begins[-1] + place
    chunk = position.clamp(min=0) // options.chunk * options.chunk if options.chunk > 0 else None
    window = position - options.window_left if options.window_left >= 0 else None
    count = len(levels) if chunk is not None else len(levels) - 1
    return [
        _Begins(
            None if chunk is None else chunk - begins[i],
            None if window is None or i + 1 == len(levels) else window - begins[i],
        )
        for i in range(count)
    ]


def _cut(
    level: PagedLevel, lengths: Level, chunk_begin: torch.Tensor, options: Options
) -> tuple[PagedLevel, Level, torch.Tensor]:
    """The level with one request for each run of rows in one chunk, with the pages that they see; and the number of
    tokens before these pages, [rows]."""
    page_size, rows = options.page_size, len(chunk_begin)
    request = lengths.by_row(torch.arange(len(lengths.kv_lens), device="cpu"))
    starts = torch.ones(rows, dtype=torch.bool, device="cpu")
    starts[1:] = (request.diff() != 0) | (chunk_begin.diff() != 0)
    row = starts.nonzero().squeeze(1)
    request, tokens = request[row], lengths.kv_lens[request[row]]
    end = torch.minimum(tokens, (chunk_begin[row] + options.chunk).clamp(min=0))
    first_page = torch.minimum(chunk_begin[row].clamp(min=0), end) // page_size
    pages = -(-end // page_size) - first_page
    kv_indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0)])
    places = torch.arange(int(kv_indptr[-1]), device="cpu") + torch.repeat_interleave(
        level.kv_indptr.long()[request] + first_page - kv_indptr[:-1], pages
    )
    kv_lens = end - first_page * page_size
    last_page_len = None if level.last_page_len is None else torch.where(pages > 0, (kv_lens - 1) % page_size + 1, 0)
    cut = Level(torch.cat([row, row.new_tensor([rows])]), torch.where(pages > 0, kv_lens, 0))
    indices = level.indices[places.to(level.indices.device)]
    skipped = cut.by_row(first_page * page_size)
    return PagedLevel(level.number, cut.q_indptr, kv_indptr, indices, last_page_len), cut, skipped
