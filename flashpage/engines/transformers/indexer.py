"""Layers with an indexer (DSA), which scores all tokens and lists those that a row sees: DeepSeek V3.2 and GLM-5."""

from __future__ import annotations

from typing import Any

import torch

from .latents import LatentLayer

LAYER_TYPE = "indexed_attention"
# Models whose attention gets latent rows from the cache and hands its lists on.
MODELS = ("deepseek_v32", "glm_moe_dsa")


class IndexedLayer(LatentLayer):
    """One layer's pages of latent rows, and its indexer's keys.

    The keys are columns of the padded batch, [batch, columns, index_head_dim], as the indexer multiplies all of them.
    A layer that gets another layer's lists has none.
    """

    def __init__(self, cache: Any, topk: int) -> None:
        super().__init__(cache)
        self._topk = topk
        self._columns = 0
        self.indexer_keys: torch.Tensor | None = None  # with room for more columns

    def expands(self, count: int) -> bool:
        """Whether the new tokens are a prompt of which every row lists all tokens that it may see."""
        return count <= self._topk and super().expands(count)

    @torch.compiler.disable
    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        """Takes [batch, tokens, index_head_dim], and returns the keys of all columns."""
        batch, count, dim = keys.shape
        old, end = self.indexer_keys, self._columns + count
        if old is None or old.shape[0] != batch or old.shape[1] < end:
            self.indexer_keys = keys.new_empty(batch, end + end // 4 + 64, dim)
            if old is not None and self._columns:
                self.indexer_keys[:, : self._columns] = old[:, : self._columns]
        assert self.indexer_keys is not None
        self.indexer_keys[:, self._columns : end] = keys
        self._columns = end
        return self.indexer_keys[:, :end]

    def shorten(self, length: int) -> None:
        super().shorten(length)
        self._columns = min(self._columns, length)

    def select(self, requests: torch.Tensor) -> None:
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys.index_select(0, requests.to(self.indexer_keys.device))
