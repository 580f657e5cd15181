"""Visible tokens of each level: a sliding window and chunks hide tokens of the upper levels row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...base.errors import CapabilityError
from ...kernels.options import Options
from ...plan.row_runs import RowRuns
from ...variants.row_mask import ROW, RowMask
from ...variants.variant import Variant
from .fold import PagedLevel

_FROM = f"kv_idx >= first_token({ROW})"


class Level(NamedTuple):
    """Lengths of one level, int64 on the host."""

    q_indptr: torch.Tensor  # [requests + 1]
    kv_lens: torch.Tensor  # [requests] tokens

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Repeats a request's value for each of its rows."""
        return torch.repeat_interleave(values, self.q_indptr.diff())


class Shown(NamedTuple):
    """Which tokens the rows of each level see."""

    options: Options  # of the last level; other levels are not causal and have no window
    row_runs: list[torch.Tensor | None]  # Pages.row_runs of levels
    variants: list[Variant | None]  # masks of levels; None: the runs say all
    is_hidden: list[bool]  # whether a whole level is hidden


class LevelWindows:
    """The masks of all levels of a wrapper."""

    def __init__(self, num_levels: int, device: torch.device, is_graph: bool) -> None:
        self._is_graph = is_graph
        self._masks = [RowMask(_FROM, device) for _ in range(num_levels)]

    def plan(self, planned: Sequence[PagedLevel], options: Options) -> Shown:
        """The last level counts a window like a single batch. Chunks begin anywhere in a level, and rows of one request
        may be in several: the planner gets runs of rows that see the same chunk, so that nothing else is read. In the
        other levels, a mask hides the tokens that a window hides from some rows of a run and not from others."""
        count = len(planned)
        found = Shown(options, [None] * count, [None] * count, [False] * count)
        if (options.window_left < 0 and options.chunk == 0) or count == 1:
            return found
        levels = [_level(level, options.page_size) for level in planned]
        if any(bool((level.q_indptr.diff() < 0).any()) for level in levels):
            return found  # the planner reports the error
        found = found._replace(options=dataclasses.replace(options, chunk=0))
        for i, begin in enumerate(_begins(levels, options)):
            runs = _runs(levels[i], begin, options)
            if not _are_whole(runs, levels[i]):
                found.row_runs[i] = runs.table()
            found.is_hidden[i] = i + 1 < count and bool((runs.end <= runs.begin).all())
            if begin.window is not None:
                # Also from the run's first token on: kernels look up tiles in which no row is masked (mask_tiles.h).
                first_token = torch.maximum(begin.window, runs.by_row(runs.begin))
                # A captured level has a mask in every batch or in none.
                if self._is_graph or not torch.equal(first_token, runs.by_row(runs.begin)):
                    found.variants[i] = self._masks[planned[i].number].set(runs.first_row(), first_token=first_token)
                    found.row_runs[i] = runs.table()  # the mask counts runs
        return found

    def copy(self) -> None:
        """Gives the masks of the last `plan` to runs, after all levels are planned."""
        for mask in self._masks:
            mask.copy()


def _level(planned: PagedLevel, page_size: int) -> Level:
    lens = planned.kv_indptr.long().diff() * page_size
    if planned.last_page_len is not None:
        lens = torch.where(lens > 0, lens + planned.last_page_len - page_size, 0)
    return Level(planned.q_indptr.long(), lens)


class _Begins(NamedTuple):
    """The first token of a level that each row sees, [rows]; 0 or less: the level's first."""

    chunk: torch.Tensor | None  # None: no chunks
    window: torch.Tensor | None  # None: not counted here
    after: torch.Tensor | None  # the last level: one more than the row's own token


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
            place + 1 if i + 1 == len(levels) else None,
        )
        for i in range(count)
    ]


def _runs(level: Level, first: _Begins, options: Options) -> RowRuns:
    """Consecutive rows of a request that see the same tokens of their chunks, and the tokens of the level that any of
    them sees. Rows of a request may be in one chunk and see other parts of it, where their prefixes differ."""
    request = level.by_row(torch.arange(len(level.kv_lens), device="cpu"))
    begin, end = torch.zeros_like(request), level.kv_lens[request]
    if first.chunk is not None:
        end = torch.minimum(end, first.chunk + options.chunk).clamp(min=0)
        begin = torch.minimum(first.chunk.clamp(min=0), end)
    starts = torch.ones(len(request), dtype=torch.bool, device="cpu")
    starts[1:] = (request.diff() != 0) | (begin.diff() != 0) | (end.diff() != 0)
    row = starts.nonzero().squeeze(1)
    rows = torch.diff(row, append=row.new_tensor([len(request)]))
    begin, end = begin[row], end[row]
    if first.after is not None:
        end = _aligned(begin, end, first.after[row + rows - 1], options)
    if first.window is not None and len(row):
        begin = torch.maximum(begin, torch.segment_reduce(first.window.double(), "min", lengths=rows).long())
    return RowRuns(rows, torch.minimum(begin, end), end)


def _aligned(begin: torch.Tensor, end: torch.Tensor, after: torch.Tensor, options: Options) -> torch.Tensor:
    """Ends of runs of the last level, whose last row must be the last token, as kernels place rows by it. A run ends
    `after` its last row, unless rows of one request have other prefixes, and later tokens are of the row's chunk."""
    if options.causal:
        return torch.minimum(end, after).clamp(min=0)
    if options.window_left >= 0 and bool(((begin < end) & (end != after)).any()):
        raise CapabilityError(
            f"chunk={options.chunk} with window_left={options.window_left} is not supported where rows of one request "
            "of the last level have other tokens in the levels above: plan with causal=True, or give these rows "
            "requests of their own."
        )
    return end


def _are_whole(runs: RowRuns, level: Level) -> bool:
    """Whether all rows of each request may see all of its tokens."""
    tokens = level.kv_lens[level.q_indptr.diff() > 0]
    return torch.equal(runs.end, tokens) and not bool(runs.begin.any())
