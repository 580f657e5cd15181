"""torch's scaled_dot_product_attention as the engine's attention, as an engine without a paged kernel would use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from flashpage.integrations import AttentionBackend, AttentionLayer, ForwardBatch, RequestTable, TokenPool


class SdpaAttention(AttentionBackend):
    """Gathers K and V from the pool into dense tensors: one for all decodes, as long as the longest request, and one
    for each request of an extend step. The shapes follow the lengths, so it cannot be captured."""

    def __init__(
        self, table: RequestTable, pool: TokenPool, layers: Sequence[AttentionLayer], q_dtype: torch.dtype
    ) -> None:
        self.table, self.pool = table, pool

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """The slots of each request's tokens, [batch, longest], and a mask of those that are valid."""
        slots = self.table.slots[batch.rows, : int(batch.seq_lens.max())]
        self.pages, self.places = slots // self.pool.page_size, slots % self.pool.page_size
        lens = batch.seq_lens.to(slots.device, non_blocking=True)
        self.mask = (torch.arange(slots.shape[1], device=slots.device) < lens[:, None])[:, None, None]

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        assert k is not None and v is not None
        self.pool.write(layer.index, batch.out_slots, k, v)
        cache = self.pool.kv(layer.index)
        keys, values = (cache[self.pages, i, self.places].transpose(1, 2) for i in (0, 1))
        out = scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=self.mask, enable_gqa=True)
        return out[:, :, 0]

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        assert k is not None and v is not None
        self.pool.write(layer.index, batch.out_slots, k, v)
        cache, out, begin = self.pool.kv(layer.index), torch.empty_like(q), 0
        lens = zip(batch.new_lens.tolist(), batch.seq_lens.tolist(), strict=True)
        for r, (rows, tokens) in enumerate(lens):
            of_request = (self.pages[r, :tokens], self.places[r, :tokens])
            keys, values = (cache[of_request[0], i, of_request[1]].transpose(0, 1)[None] for i in (0, 1))
            mine = q[begin : begin + rows].transpose(0, 1)[None]
            mask = causal_lower_right(rows, tokens)
            found = scaled_dot_product_attention(mine, keys, values, attn_mask=mask, enable_gqa=True)
            out[begin : begin + rows] = found[0].transpose(0, 1)
            begin += rows
        return out
