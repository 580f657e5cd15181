"""Plans of captured steps: one set for each batch size, on slices of shared buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..wrappers.base import DECODE, PAGED
from .forward_batch import ForwardBatch, ForwardMode
from .kv_parts import KvPart

_INT_WORKSPACE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class GraphSizes:
    """The largest captured step, and the limits of its requests."""

    max_batch: int  # requests
    max_rows: int  # of q
    max_context: int  # tokens of a request
    page_size: int

    @property
    def pages(self) -> int:
        return self.max_batch * -(-self.max_context // self.page_size)

    @property
    def mask_bytes(self) -> int:
        return self.max_rows * (-(-self.max_context // 8) + 1)


class GraphPlans:
    """Captured runs read page numbers, masks and plans from the addresses that were captured.

    All sizes share one set of buffers: steps follow each other on one stream, and each replay is planned first.

    Args:
        parts: of the model's layers; each gets a plan.
        workspace: memory for partial results, shared by all plans.
        make: makes the attention objects, from the names of their lengths and their buffers.
    """

    def __init__(
        self, sizes: GraphSizes, parts: Iterable[KvPart], workspace: torch.Tensor, make: Callable[..., Any]
    ) -> None:
        self._sizes, self._parts, self._workspace, self._make = sizes, tuple(parts), workspace, make
        max_batch = sizes.max_batch

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=workspace.device)

        self.indices = {part: zeros(sizes.pages) for part in self._parts}  # page numbers that captured steps read
        self._indptr, self._q_indptr = (zeros(max_batch + 1) for _ in range(2))
        self._last_page_len = zeros(max_batch)
        self._mask: torch.Tensor | None = None  # allocated at the first VERIFY step
        self._int_workspaces = {part: zeros(_INT_WORKSPACE_BYTES, torch.uint8) for part in self._parts}
        self._planned: dict[tuple[ForwardMode, int], dict[KvPart, Any]] = {}

    def has_room_for(self, max_batch: int, max_rows: int) -> bool:
        """Whether batches of another runner fit these buffers."""
        return max_batch <= self._sizes.max_batch and max_rows <= self._sizes.max_rows

    def make(self, batch: ForwardBatch) -> None:
        """Makes plans for batches of this mode and size, unless they exist."""
        key = (batch.mode, batch.batch_size)
        if key not in self._planned:
            self._planned[key] = {part: self._make_one(part, batch) for part in self._parts}

    def planned(self, batch: ForwardBatch) -> dict[KvPart, Any]:
        """The plans that captured runs of this mode and size use."""
        return self._planned[batch.mode, batch.batch_size]

    def _make_one(self, part: KvPart, batch: ForwardBatch) -> Any:
        size, is_decode = batch.batch_size, batch.mode is ForwardMode.DECODE
        buffers: dict[str, torch.Tensor | None] = {
            "paged_kv_indptr_buf": self._indptr[: size + 1],
            "paged_kv_indices_buf": self.indices[part],
            "paged_kv_last_page_len_buf": self._last_page_len[:size],
        }
        if not is_decode:
            buffers["qo_indptr_buf"] = self._q_indptr[: size + 1]
        if batch.tree_mask is not None:
            buffers["custom_mask_buf"] = self._mask_buffer()
        attention = self._make(DECODE if is_decode else PAGED, buffers)
        attention.reset_workspace_buffer(self._workspace, self._int_workspaces[part])
        return attention

    def _mask_buffer(self) -> torch.Tensor:
        if self._mask is None:
            self._mask = torch.zeros(self._sizes.mask_bytes, dtype=torch.uint8, device=self._workspace.device)
        return self._mask
