"""Requests with tokens in a pool already, and their tokens in dense tensors for the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from reference import Options, attention

from flashpage.integrations import AttentionLayer, ForwardBatch, ForwardMode, PagedAttention, RequestTable, TokenPool

Q_HEADS, KV_HEADS, DIM, CONTEXT = 4, 2, 64, 160
PLAIN = AttentionLayer(0, Q_HEADS, KV_HEADS, DIM)


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.float16


@dataclasses.dataclass
class Past:
    """Requests with tokens in the pool already; K and V are also dense, for the reference."""

    table: RequestTable
    pool: TokenPool
    rows: list[int]
    k: list[list[torch.Tensor]]  # [layer][request], [tokens, KV_HEADS, DIM], new ones included
    v: list[list[torch.Tensor]]
    slots: list[torch.Tensor]

    @staticmethod
    def make(
        lens: Sequence[int], device: str, page_size: int, num_layers: int, dtype: torch.dtype | None = None
    ) -> Past:
        """`lens`: tokens in each request's row, with those that a test adds."""
        generator = torch.Generator().manual_seed(sum(lens) + page_size)
        dtype = dtype or dtype_of(device)
        table = RequestTable(len(lens) + 2, CONTEXT, device)
        pages = [-(-n // page_size) for n in lens]
        pool = TokenPool(sum(pages) + 3, page_size, num_layers, KV_HEADS, DIM, dtype, device, fill=float("nan"))
        free = (1 + torch.randperm(sum(pages) + 2, generator=generator)).split([*pages, 2])
        slots = [
            (p[:, None] * page_size + torch.arange(page_size)).flatten()[:n] for p, n in zip(free, lens, strict=False)
        ]
        rows = [table.acquire() for _ in lens]
        for row, of_request in zip(rows, slots, strict=True):
            if n := len(of_request):
                table.write(torch.full((n,), row).to(device), torch.arange(n).to(device), of_request.int().to(device))

        def dense() -> list[list[torch.Tensor]]:
            values = [[torch.randn(n, KV_HEADS, DIM, generator=generator) for n in lens] for _ in range(num_layers)]
            return [[x.to(dtype_of(device)) for x in layer] for layer in values]

        return Past(table, pool, rows, dense(), dense(), slots)

    def fill(self, layer: AttentionLayer, counts: Sequence[int]) -> None:
        """Writes the first counts[r] tokens of each request to the pool."""
        for r, count in enumerate(counts):
            if count:
                values = [x[layer.index][r][:count].to(self.pool.kv(0).device) for x in (self.k, self.v)]
                slots = self.slots[r][:count].int().to(self.pool.kv(0).device)
                self.pool.write(layer.index, slots, *values, layer.k_scale, layer.v_scale)

    def batch(
        self, mode: ForwardMode, new: Sequence[int], lens: Sequence[int], skip: Sequence[int] | None = None, **more: Any
    ) -> ForwardBatch:
        """The last `new` tokens of the first `lens` after `skip`, for each request."""
        skip = skip or [0] * len(lens)
        places = [torch.arange(s + n - m, s + n) for s, n, m in zip(skip, lens, new, strict=True)]
        slots = torch.cat([of[p] for of, p in zip(self.slots, places, strict=True)]).int()
        numbers = [torch.tensor(x, dtype=torch.int32) for x in (self.rows, lens, new)]
        host = ForwardBatch(mode, torch.zeros_like(slots), torch.cat(places).int(), slots, *numbers, **more)
        return host.to(self.pool.kv(0).device)


def run_layer(
    backend: PagedAttention, past: Past, layer: AttentionLayer, batch: ForwardBatch, skip: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one layer of a step whose new K and V are the past's own; q and the output are on the host."""
    rows = int(batch.new_lens.sum())
    generator = torch.Generator().manual_seed(layer.index + rows)
    q = torch.randn(rows, Q_HEADS, DIM, generator=generator).to(dtype_of(str(backend.device)))
    k = v = None
    if not layer.is_cross:
        spans = list(zip(skip, batch.seq_lens.tolist(), batch.new_lens.tolist(), strict=True))
        k, v = (
            torch.cat([x[layer.index][r][s + n - m : s + n] for r, (s, n, m) in enumerate(spans)])
            for x in (past.k, past.v)
        )
        k, v = k.to(backend.device), v.to(backend.device)
    return q, backend.forward(q.to(backend.device), k, v, layer, batch).cpu()


def check(
    found: torch.Tensor,
    q: torch.Tensor,
    past: Past,
    layer: AttentionLayer,
    batch: ForwardBatch,
    first: Sequence[int],
    lens: Sequence[int],
    *,
    masks: Sequence[torch.Tensor] | None = None,
    causal: bool = True,
    atol: float | None = None,
) -> None:
    """Compares with the reference over tokens [first, first + lens) of each request."""
    begin = 0
    for r, count in enumerate(batch.new_lens.tolist()):
        k, v = (x[layer.index][r][first[r] : first[r] + lens[r]] for x in (past.k, past.v))
        options = Options(
            sm_scale=layer.sm_scale or DIM**-0.5,
            causal=causal and masks is None,
            window_left=layer.window_left,
            soft_cap=layer.logits_soft_cap,
        )
        mask = None if masks is None else masks[r]
        expected = attention(q[begin : begin + count], k, v, options, custom_mask=mask).out
        tolerance = atol or (2e-5 if found.dtype is torch.float32 else 4e-3)
        torch.testing.assert_close(found[begin : begin + count].double(), expected, rtol=tolerance, atol=tolerance)
        begin += count
