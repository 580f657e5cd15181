"""Batches of requests over latent rows in pages, with their exact results."""

from __future__ import annotations

import math
from typing import Any

import torch

import flashpage
from flashpage import MLAPlanMetadata

CKV, KPE, HEADS, PAGE = 512, 64, 16, 16
ROWS, TOKENS = (1, 3, 1), (40, 33, 5)
SIZES: dict[str, Any] = {"num_heads": HEADS, "head_dim_ckv": CKV, "head_dim_kpe": KPE, "page_size": PAGE}
OPTIONS: dict[str, Any] = {"causal": True, "sm_scale": 192**-0.5, "q_data_type": torch.float32}


def indptr(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


class Batch:
    """A batch in pages, and its exact result."""

    def __init__(self, rows: tuple[int, ...] = ROWS, tokens: tuple[int, ...] = TOKENS) -> None:
        torch.manual_seed(1)
        pages = tuple(-(-n // PAGE) for n in tokens)
        self.q_indptr, self.kv_indptr, self.lens = indptr(rows), indptr(pages), torch.tensor(tokens).int()
        self.indices = torch.randperm(sum(pages)).int()
        self.q = torch.randn(sum(rows), HEADS, CKV + KPE)
        self.cache = torch.randn(sum(pages), PAGE, CKV + KPE)
        self.tables = torch.zeros(len(rows), max(pages), dtype=torch.int32)
        for i, count in enumerate(pages):
            self.tables[i, :count] = self.indices[self.kv_indptr[i] : self.kv_indptr[i] + count]
        self.out, self.lse = torch.empty(len(self.q), HEADS, CKV), torch.empty(len(self.q), HEADS)
        for i, (count, n) in enumerate(zip(rows, tokens, strict=True)):
            mine = slice(int(self.q_indptr[i]), int(self.q_indptr[i]) + count)
            row = self.cache[self.tables[i, : pages[i]].long()].flatten(0, 1)[:n].double()
            scores = torch.einsum("rhd,td->rht", self.q[mine].double(), row) * OPTIONS["sm_scale"]
            hidden = torch.arange(n) > torch.arange(count)[:, None] + n - count
            scores.masked_fill_(hidden[:, None], -math.inf)
            self.lse[mine] = scores.logsumexp(-1) / math.log(2)
            self.out[mine] = torch.einsum("rht,td->rhd", scores.softmax(-1), row[:, :CKV]).float()

    def csr_arrays(self) -> dict[str, torch.Tensor]:
        arrays = (self.q_indptr, self.kv_indptr, self.indices, self.lens)
        return dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), arrays, strict=True))

    def dense_arrays(self) -> dict[str, torch.Tensor]:
        return {"cum_seq_lens_q": self.q_indptr, "block_tables": self.tables, "seq_lens": self.lens}

    def csr(self) -> MLAPlanMetadata:
        return MLAPlanMetadata.csr(**self.csr_arrays())

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.q[..., :CKV], self.q[..., CKV:], self.cache[..., :CKV], self.cache[..., CKV:]


def wrapper_of(**options: Any) -> flashpage.BatchMLAPagedAttentionWrapper:
    return flashpage.BatchMLAPagedAttentionWrapper(torch.empty(4 << 20, dtype=torch.uint8), **options)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
