"""A small paged batch, and the expected attention over it."""

from __future__ import annotations

from typing import Any

import torch

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 64, 4, 40
KV_LENS = (9, 0, 33, 4)
ROWS = (3, 2, 5, 4)


def indptr_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Batch:
    """Pages in shuffled order, and their tokens in dense tensors."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        counts = tuple(-(-n // PAGE) for n in KV_LENS)
        self.indptr, self.qo_indptr = indptr_of(counts), indptr_of(ROWS)
        self.indices = torch.randperm(PAGES, generator=generator)[: sum(counts)].int()
        self.last_page_len = torch.tensor([(n - 1) % PAGE + 1 if n else 0 for n in KV_LENS]).int()
        self.cache = torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM, generator=generator)
        self.q = torch.randn(sum(ROWS), HEADS, DIM, generator=generator)
        self.q_decode = torch.randn(len(KV_LENS), HEADS, DIM, generator=generator)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last_page_len

    def expected(self, q: torch.Tensor, **options: Any) -> torch.Tensor:
        """Expected attention of the whole batch, request by request; q has prefill rows or decode rows."""
        rows = ROWS if q.shape[0] == sum(ROWS) else (1,) * len(KV_LENS)
        found, begin = [], 0
        for request, (q_len, kv_len) in enumerate(zip(rows, KV_LENS, strict=True)):
            pages = self.cache[self.indices[self.indptr[request] : self.indptr[request + 1]].long()]
            k, v = (pages[:, i].reshape(-1, KV_HEADS, DIM)[:kv_len] for i in range(2))
            found.append(attention(q[begin : begin + q_len], k, v, **options))
            begin += q_len
        return torch.cat(found)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window_left: int = -1,
    soft_cap: float = 0.0,
    sm_scale: float = DIM**-0.5,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * sm_scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(len(q)).unsqueeze(1) + len(k) - len(q)
    token = torch.arange(len(k)).unsqueeze(0)
    visible = torch.ones(len(q), len(k), dtype=torch.bool) if mask is None else mask
    if causal:
        visible = visible & (token <= position)
    if window_left >= 0:
        visible = visible & (token >= position - window_left)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)
