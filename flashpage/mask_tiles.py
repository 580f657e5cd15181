"""Memory in which a card notes, before each run, which tiles of a custom mask hold anything, and in which order CTAs
take the plan's units (include/flashpage/tile/mask_tiles.h).

The host sees none of it: engines may change mask bits between runs, and captured launches look at whatever is there.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from . import host
from .problem import SPLIT_BALANCED, SPLIT_NEVER, Options

if TYPE_CHECKING:
    from .combination import Combination
    from .planner import Planner


class MaskTiles:
    """Of one combination of options. Runs of a wrapper follow each other on one stream, so they share it."""

    __slots__ = ("_cells",)

    def __init__(self) -> None:
        self._cells: torch.Tensor | None = None

    def bind(self, params: host.MaskTilesParams, planner: Planner, combination: Combination) -> None:
        """Points the struct at the newest plan, and at enough memory for it."""
        options, tile, slot = combination.options, combination.prepared.choice.spec.tile, combination.slot
        assert tile is not None
        batch, rows, mask_bytes = planner.batch, planner.total_q, slot.result.mask_bytes
        if planner.is_graph:  # a captured launch serves every later plan
            assert planner.mask.buffer is not None
            rows, mask_bytes = planner.most_rows, planner.mask.buffer.numel()
            if (capacity := planner.capacity) is not None:
                batch, rows = capacity.batch, capacity.rows_of(options)
        group = options.group_size
        units = most_units(options, tile.tile_q, combination.prepared.schedule.num_ctas, (batch, rows, mask_bytes))
        cells = host.load().fp_mask_cells(mask_bytes, rows, batch, group, units, ctypes.byref(params))
        if self._cells is None or self._cells.numel() < cells:
            self._cells = torch.zeros(1 << (cells - 1).bit_length(), dtype=torch.int64, device=planner.device)
        params.plan, params.custom_mask = slot.memory.data_ptr(), planner.mask.address
        params.cells, params.group = self._cells.data_ptr(), host.make_fast_div(group)
        params.tile_q, params.tile_kv = tile.tile_q, tile.tile_kv


def most_units(options: Options, tile_q: int, num_ctas: int, sizes: tuple[int, int, int]) -> int:
    """Of any plan within (requests, rows, bytes of masks), pieces of cut units included."""
    batch, rows, mask_bytes = sizes
    units = options.num_kv_heads * (rows * options.group_size // tile_q + batch)
    if options.fixed_piece_tokens == SPLIT_BALANCED:
        return units + 2 * num_ctas  # a CTA's share begins and ends inside a unit
    if options.fixed_piece_tokens == SPLIT_NEVER:
        return units
    # A unit of t tokens has at most t / piece more; a request of q rows and t tokens has q * t bits and some rows.
    tokens_of_units = 8 * mask_bytes * (options.group_size + tile_q) // tile_q
    return units + options.num_kv_heads * (tokens_of_units // options.fixed_piece_tokens + 1)
