"""Wrappers that plan one request at a time, on the CPU."""

from __future__ import annotations

from typing import Any

import torch

import flashpage

HEADS = (4, 4, 64, 16)
KV = torch.randn(4096, 2, 16, 4, 64)
Q = torch.randn(8, 4, 64)


def workspace(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def prefill(float_bytes: int = 1 << 24, **given: Any) -> flashpage.BatchPrefillWithPagedKVCacheWrapper:
    return flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace(float_bytes), **given)


def plan(wrapper: Any, tokens: int = 300, rows: int = 8, heads: tuple[int, ...] = HEADS, **options: Any) -> None:
    """Plans one request."""
    pages = -(-tokens // 16)
    lengths = (ints(0, rows), ints(0, pages), torch.arange(pages).int(), ints((tokens - 1) % 16 + 1))
    wrapper.plan(*lengths, *heads, q_data_type=torch.float32, **options)


def with_buffers(float_bytes: int = 1 << 24) -> flashpage.BatchPrefillWithPagedKVCacheWrapper:
    """A wrapper for graphs of one request, without capacities."""
    buffers = {"qo_indptr_buf": ints(0, 0), "paged_kv_indptr_buf": ints(0, 0), "paged_kv_last_page_len_buf": ints(0)}
    indices = torch.zeros(4096, dtype=torch.int32)
    return prefill(float_bytes, use_cuda_graph=True, **buffers, paged_kv_indices_buf=indices)


def plan_on_device(wrapper: Any, tokens: int = 300, rows: int = 8, heads: tuple[int, ...] = HEADS) -> None:
    """Plans one request, whose table has as many pages as it needs."""
    tables = torch.arange(-(-tokens // 16)).int().view(1, -1)
    wrapper.plan_on_device(ints(0, rows), ints(tokens), tables, *heads, max_rows=rows, q_data_type=torch.float32)


def planned_options(wrapper: Any) -> list[Any]:
    return [active.options for active in wrapper._planner.active]
