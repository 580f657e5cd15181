"""Memory in which a card notes which tiles of a mask have visible tokens, and in which order CTAs take the plan's units
(include/flashpage/tile/mask/mask_tiles.h).

The host reads none of it. Packed bits belong to a plan, so their tiles are found once for all runs of the plan. A mask
function's tensors may change between runs, and so may the bits of a wrapper for captured launches; for these, every run
finds the tiles again.
"""

from __future__ import annotations

import ctypes

import torch

from .. import native
from ..base.memory import GrowingMemory
from ..variants.source import mask_looks_at_head
from .batch import Batch
from .buffers import PlanBuffer
from .launches import LaunchList
from .prepared_kernels import PreparedKernels


class MaskTiles:
    """The mask tiles of one set of options. Runs of a wrapper follow each other on one stream, so they share them.

    The memory is made with the plan, because any run of it may be captured.
    """

    __slots__ = ("_found_for", "cells", "params")

    def __init__(self, device: torch.device) -> None:
        self.cells = GrowingMemory(torch.int64, device, "this mask")
        self._found_for = 0  # number of the plan
        self.params = native.MaskTilesParams()

    @property
    def address(self) -> int:
        """The struct's values."""
        return ctypes.addressof(self.params)

    @property
    def lane_bits(self) -> int:
        """Address of the bits of mixed tiles (include/flashpage/tile/mask/lane_bits.h)."""
        begin: int = self.params.cells + 8 * self.params.lanes_begin
        return begin

    def find(self, batch: Batch, prepared: PreparedKernels) -> None:
        """Takes the plan's bits, and finds their tiles if they hold for all its runs."""
        if prepared.mask_tiles is None:
            return
        self.params.custom_mask = batch.mask.address
        if batch.is_graph or prepared.choice.spec.mask_source != "packed_bits":
            return
        launches = LaunchList()
        launches.add_ahead(prepared.mask_tiles, self.address)
        launches.run(batch.stream)
        self._found_for = batch.generation

    def are_found(self, generation: int) -> bool:
        """Whether runs of this plan need not find tiles."""
        return self._found_for == generation

    def bind(self, batch: Batch, prepared: PreparedKernels, slot: PlanBuffer) -> None:
        """Points the struct at the plan in the slot, and at enough memory for its tiles."""
        options, result, params = prepared.options, slot.result, self.params
        spec = prepared.choice.spec
        looks_at_head = spec.mask_source == "function" and mask_looks_at_head(spec.variant)
        masked = native.MaskedBatch(
            mask_bytes=result.mask_bytes,
            tile_cells=result.tile_cells,
            rows=result.total_q,
            requests=batch.requests,
            num_q_heads=options.num_q_heads,
            num_kv_heads=options.num_kv_heads,
            has_custom_mask=options.has_mask,
            tile_heads=options.num_kv_heads if looks_at_head else 1,
        )
        if batch.is_graph:  # a captured launch serves every later plan: only for bits, whose buffer limits their number
            assert batch.mask.buffer is not None
            masked.rows = max(batch.most_rows, result.total_q)
            masked.mask_bytes = batch.mask.buffer.numel()
            if (capacity := batch.capacity) is not None:
                masked.requests, masked.rows = capacity.batch, capacity.rows_of(options)
        cells = native.load().fp_mask_cells(ctypes.byref(masked), prepared.schedule_address, ctypes.byref(params))
        params.plan, params.cells = slot.memory.data_ptr(), self.cells.at_least(cells).data_ptr()
        params.custom_mask = batch.mask.address if options.has_mask else None
        params.causal, params.window_left = options.causal, options.window_left
