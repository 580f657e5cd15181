"""Memory in which a card notes which tiles of a mask hold anything, and in which order CTAs take the plan's units
(include/flashpage/tile/mask/mask_tiles.h).

The host sees none of it. Bits are part of the plan that they are given to, and looked at once for all its runs. What a
mask function reads may change between runs, and so may the bits of a wrapper for captured launches, which look at
whatever is there: for these every run looks again.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from .. import native
from ..variants.source import mask_looks_at_head

if TYPE_CHECKING:
    from .option_plan import Combination
    from .session import Planner


class MaskTiles:
    """Of one combination of options. Runs of a wrapper follow each other on one stream, so they share it."""

    __slots__ = ("_cells", "_found_for", "params")

    def __init__(self) -> None:
        self._cells: torch.Tensor | None = None
        self._found_for = 0  # the wrapper's plan
        self.params = native.MaskTilesParams()

    @property
    def address(self) -> int:
        """Of the struct."""
        return ctypes.addressof(self.params)

    @property
    def lane_bits(self) -> int:
        """Address of the bits of mixed tiles (include/flashpage/tile/mask/lane_bits.h)."""
        begin: int = self.params.cells + 8 * self.params.lanes_begin
        return begin

    def find(self, planner: Planner, combination: Combination, stream: int) -> None:
        """Looks at the bits of the newest plan, where all its runs see these."""
        prepared = combination.prepared
        if prepared.mask_tiles is None or planner.is_graph or prepared.choice.spec.mask_source != "packed_bits":
            return
        self.bind(planner, combination)
        native.check(native.load().fp_find_mask_tiles(prepared.mask_tiles.handle, self.address, stream))
        self._found_for = planner.generation

    def are_found(self, planner: Planner) -> bool:
        """Whether runs of the newest plan need not look."""
        return self._found_for == planner.generation

    def bind(self, planner: Planner, combination: Combination) -> None:
        """Points the struct at the newest plan, and at enough memory for it."""
        options, result, params = combination.options, combination.slot.result, self.params
        spec = combination.prepared.choice.spec
        looks_at_head = spec.mask_source == "function" and mask_looks_at_head(spec.variant)
        batch = native.MaskedBatch(
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
        cells = native.load().fp_mask_cells(
            ctypes.byref(batch), combination.prepared.schedule_address, ctypes.byref(params)
        )
        if self._cells is None or self._cells.numel() < cells:
            step = max(1, (1 << cells.bit_length()) // 16)  # that contexts which grow do not ask for memory every time
            self._cells = torch.zeros(-(-cells // step) * step, dtype=torch.int64, device=planner.device)
        params.plan, params.cells = combination.slot.memory.data_ptr(), self._cells.data_ptr()
        params.custom_mask = planner.mask.address if options.has_mask else None
        params.causal, params.window_left = options.causal, options.window_left
