"""Wrappers of captured steps: one set for each size of batch, on slices of shared buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .forward_batch import ForwardBatch, ForwardMode
from .kv_parts import KvPart

if TYPE_CHECKING:
    from .paged_attention import DecodeMetadata, PagedAttention, PrefillMetadata

_INT_WORKSPACE_BYTES = 8 << 20


class GraphWrappers:
    """Captured runs read page numbers, masks and plans where they were when they were captured.

    All sizes share these: steps follow each other on one stream, and every replay is planned anew before it.
    """

    def __init__(self, backend: PagedAttention, max_batch: int, max_rows: int) -> None:
        self._backend, self._max_batch, self._max_rows = backend, max_batch, max_rows
        table, device = backend.table, backend.device
        pages = max_batch * -(-table.max_context // backend.pool.page_size)

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self._indices = {part: zeros(pages) for part in backend.parts}
        self._indptr, self._q_indptr, self._mask_indptr = (zeros(max_batch + 1) for _ in range(3))
        self._last_page_len = zeros(max_batch)
        self._mask_bytes = max_rows * (-(-table.max_context // 8) + 1)
        self._mask: torch.Tensor | None = None  # only verifying needs it
        self._int_workspaces = {part: zeros(_INT_WORKSPACE_BYTES, torch.uint8) for part in backend.parts}
        self._wrappers: dict[tuple[ForwardMode, int], dict[KvPart, Any]] = {}

    def has_room_for(self, max_batch: int, max_rows: int) -> bool:
        """Whether batches of another runner fit too."""
        return max_batch <= self._max_batch and max_rows <= self._max_rows

    def make(self, batch: ForwardBatch) -> None:
        """Wrappers for batches of this mode and size, where there are none yet."""
        key = (batch.mode, batch.batch_size)
        if key not in self._wrappers:
            self._wrappers[key] = {part: self._wrapper(part, batch) for part in self._backend.parts}

    def plan(self, batch: ForwardBatch) -> DecodeMetadata | PrefillMetadata:
        """Plans the batch into what its captured runs read."""
        wrappers = self._wrappers[batch.mode, batch.batch_size]
        if batch.mode is ForwardMode.DECODE:
            return self._backend.plan_decode(batch, wrappers, self._indices)
        return self._backend.plan_extend(batch, wrappers, self._indices)

    def _wrapper(self, part: KvPart, batch: ForwardBatch) -> Any:
        backend, size = self._backend, batch.batch_size
        buffers = [self._indptr[: size + 1], self._indices[part], self._last_page_len[:size]]
        names = ["paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"]
        if batch.mode is ForwardMode.DECODE:
            given = dict(zip((name + "fer" for name in names), buffers, strict=True))
            wrapper = backend.wrapper("BatchDecodeWithPagedKVCacheWrapper", use_cuda_graph=True, **given)
        else:
            given = dict(zip(names, buffers, strict=True)) | {"qo_indptr_buf": self._q_indptr[: size + 1]}
            if batch.tree_mask is not None:
                given |= {"custom_mask_buf": self._mask_buffer(), "mask_indptr_buf": self._mask_indptr[: size + 1]}
            wrapper = backend.wrapper("BatchPrefillWithPagedKVCacheWrapper", use_cuda_graph=True, **given)
        wrapper.reset_workspace_buffer(backend.workspace, self._int_workspaces[part])
        return wrapper

    def _mask_buffer(self) -> torch.Tensor:
        if self._mask is None:
            self._mask = torch.zeros(self._mask_bytes, dtype=torch.uint8, device=self._backend.device)
        return self._mask
