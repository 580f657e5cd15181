"""What rows see of each level of tokens: a sliding window hides the upper levels row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.options import Options
from ...variants.row_mask import ROW, RowMask
from ...variants.variant import Variant
from .fold import PagedLevel

_MASK = f"kv_idx >= first_token({ROW})"


class Level(NamedTuple):
    """Lengths of one level, int64 on the host."""

    q_indptr: torch.Tensor  # [requests + 1]
    kv_lens: torch.Tensor  # [requests] tokens

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """A request's value for each of its rows."""
        return torch.repeat_interleave(values, self.q_indptr.diff())


class Shown(NamedTuple):
    """Levels as they are planned."""

    options: Options  # of the last level; the others are not causal and have no window
    levels: Sequence[PagedLevel]
    variants: list[Variant | None]  # masks of levels; None: nothing is hidden
    is_hidden: list[bool]  # whether all of a level is


class LevelWindows:
    """The masks of all levels of a wrapper."""

    def __init__(self, num_levels: int, device: torch.device, is_graph: bool) -> None:
        self._is_graph = is_graph
        self._masks = [RowMask(_MASK, device) for _ in range(num_levels - 1)]

    def plan(self, planned: Sequence[PagedLevel], options: Options) -> Shown:
        """The last level has no mask: a window counts there as in a batch of its own."""
        variants: list[Variant | None] = [None] * len(planned)
        is_hidden = [False] * len(planned)
        found = Shown(options, planned, variants, is_hidden)
        if options.window_left < 0 or len(planned) == 1:
            return found
        levels = [_level(level, options.page_size) for level in planned]
        if any(bool((level.q_indptr.diff() < 0).any()) for level in levels):
            return found  # the planner tells
        for i, first_token in enumerate(_first_visible(levels, options.window_left)):
            is_hidden[i] = bool((first_token >= levels[i].by_row(levels[i].kv_lens)).all())
            # What is captured has a mask in every batch or in none.
            if self._is_graph or (not is_hidden[i] and bool((first_token > 0).any())):
                first_row = levels[i].q_indptr[1:] - levels[i].kv_lens  # q_idx is right-aligned within the level
                variants[i] = self._masks[planned[i].number].set(first_row, first_token=first_token)
        return found


def _level(planned: PagedLevel, page_size: int) -> Level:
    lens = planned.kv_indptr.long().diff() * page_size
    if planned.last_page_len is not None:
        lens = torch.where(lens > 0, lens + planned.last_page_len - page_size, 0)
    return Level(planned.q_indptr.long(), lens)


def _first_visible(levels: Sequence[Level], window_left: int) -> list[torch.Tensor]:
    """For every level but the last: the first of its tokens that each row sees, [rows]; 0 or less: it sees all."""
    tokens = [level.by_row(level.kv_lens) for level in levels]
    last = levels[-1]
    rows = torch.arange(int(last.q_indptr[-1]))
    # A row's place among its request's tokens of the last level: right-aligned, as causal has it.
    place = rows - last.by_row(last.q_indptr[1:] - last.kv_lens)
    found = []
    for level in range(len(levels) - 1):
        behind = torch.stack(tokens[level:-1]).sum(0)  # tokens from this level's first to the last level's first
        found.append(place + behind - window_left)
    return found
