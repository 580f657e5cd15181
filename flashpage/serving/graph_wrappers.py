"""Wrappers of captured steps: one set for each size of batch, on slices of shared buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .forward_batch import ForwardBatch, ForwardMode
from .kv_parts import KvPart

_INT_WORKSPACE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class GraphSizes:
    """The largest captured step, and the pool that its requests are in."""

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


class GraphWrappers:
    """Captured runs read page numbers, masks and plans where they were when they were captured.

    All sizes share these: steps follow each other on one stream, and every replay is planned anew before it.

    Args:
        parts: of the model's layers, a wrapper each.
        workspace: for partial results, which all wrappers share.
        make: a wrapper of the library, by the name of its class and its graph arguments.
    """

    def __init__(
        self, sizes: GraphSizes, parts: Iterable[KvPart], workspace: torch.Tensor, make: Callable[..., Any]
    ) -> None:
        self._sizes, self._parts, self._workspace, self._make = sizes, tuple(parts), workspace, make
        max_batch = sizes.max_batch

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=workspace.device)

        self.indices = {part: zeros(sizes.pages) for part in self._parts}  # page numbers that captured steps read
        self._indptr, self._q_indptr, self._mask_indptr = (zeros(max_batch + 1) for _ in range(3))
        self._last_page_len = zeros(max_batch)
        self._mask: torch.Tensor | None = None  # only verifying needs it
        self._int_workspaces = {part: zeros(_INT_WORKSPACE_BYTES, torch.uint8) for part in self._parts}
        self._wrappers: dict[tuple[ForwardMode, int], dict[KvPart, Any]] = {}

    def has_room_for(self, max_batch: int, max_rows: int) -> bool:
        """Whether batches of another runner fit too."""
        return max_batch <= self._sizes.max_batch and max_rows <= self._sizes.max_rows

    def make(self, batch: ForwardBatch) -> None:
        """Wrappers for batches of this mode and size, where there are none yet."""
        key = (batch.mode, batch.batch_size)
        if key not in self._wrappers:
            self._wrappers[key] = {part: self._wrapper(part, batch) for part in self._parts}

    def wrappers(self, batch: ForwardBatch) -> dict[KvPart, Any]:
        """The wrappers that captured runs of this mode and size use."""
        return self._wrappers[batch.mode, batch.batch_size]

    def _wrapper(self, part: KvPart, batch: ForwardBatch) -> Any:
        size = batch.batch_size
        buffers = [self._indptr[: size + 1], self.indices[part], self._last_page_len[:size]]
        names = ["paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"]
        if batch.mode is ForwardMode.DECODE:
            given = dict(zip((name + "fer" for name in names), buffers, strict=True))
            wrapper = self._make("BatchDecodeWithPagedKVCacheWrapper", use_cuda_graph=True, **given)
        else:
            given = dict(zip(names, buffers, strict=True)) | {"qo_indptr_buf": self._q_indptr[: size + 1]}
            if batch.tree_mask is not None:
                given |= {"custom_mask_buf": self._mask_buffer(), "mask_indptr_buf": self._mask_indptr[: size + 1]}
            wrapper = self._make("BatchPrefillWithPagedKVCacheWrapper", use_cuda_graph=True, **given)
        wrapper.reset_workspace_buffer(self._workspace, self._int_workspaces[part])
        return wrapper

    def _mask_buffer(self) -> torch.Tensor:
        if self._mask is None:
            self._mask = torch.zeros(self._sizes.mask_bytes, dtype=torch.uint8, device=self._workspace.device)
        return self._mask
