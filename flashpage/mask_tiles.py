"""Memory in which a card notes, before each run, which tiles of a custom mask hold anything, and in which order CTAs
take the plan's units (include/flashpage/tile/mask_tiles.h).

The host sees none of it: engines may change mask bits between runs, and captured launches look at whatever is there.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from . import host

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
        cells = host.load().fp_mask_cells(
            *(mask_bytes, rows, batch, options.num_q_heads, options.num_kv_heads),
            *(combination.prepared.schedule_address, ctypes.byref(params)),
        )
        if self._cells is None or self._cells.numel() < cells:
            self._cells = torch.zeros(1 << (cells - 1).bit_length(), dtype=torch.int64, device=planner.device)
        params.plan, params.custom_mask = slot.memory.data_ptr(), planner.mask.address
        params.cells, params.group = self._cells.data_ptr(), host.make_fast_div(options.group_size)
        params.tile_q, params.tile_kv = tile.tile_q, tile.tile_kv
