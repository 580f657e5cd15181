"""Memory in which a card notes, before each run, which tiles of a mask hold anything, and in which order CTAs take the
plan's units (include/flashpage/tile/mask_tiles.h).

The host sees none of it: engines may change mask bits, or what a mask function reads, between runs, and captured
launches look at whatever is there.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from . import host
from .variant_source import mask_looks_at_head

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
        options, prepared, result = combination.options, combination.prepared, combination.slot.result
        spec = prepared.choice.spec
        looks_at_head = spec.mask_source == "function" and mask_looks_at_head(spec.variant)
        batch = host.MaskedBatch(
            mask_bytes=result.mask_bytes,
            tile_cells=result.tile_cells,
            rows=planner.total_q,
            requests=planner.batch,
            num_q_heads=options.num_q_heads,
            num_kv_heads=options.num_kv_heads,
            has_custom_mask=options.has_mask,
            tile_heads=options.num_kv_heads if looks_at_head else 1,
        )
        if planner.is_graph:  # a captured launch serves every later plan: bits alone, whose buffer says how many
            assert planner.mask.buffer is not None
            batch.rows, batch.mask_bytes = planner.most_rows, planner.mask.buffer.numel()
            if (capacity := planner.capacity) is not None:
                batch.requests, batch.rows = capacity.batch, capacity.rows_of(options)
        cells = host.load().fp_mask_cells(
            ctypes.byref(batch), combination.prepared.schedule_address, ctypes.byref(params)
        )
        if self._cells is None or self._cells.numel() < cells:
            self._cells = torch.zeros(1 << (cells - 1).bit_length(), dtype=torch.int64, device=planner.device)
        params.plan, params.cells = combination.slot.memory.data_ptr(), self._cells.data_ptr()
        params.custom_mask = planner.mask.address if options.has_mask else None
        params.causal, params.window_left = options.causal, options.window_left
