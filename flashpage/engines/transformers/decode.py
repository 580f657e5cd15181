"""Continuous batching's decode steps: one token a request, written to transformers' pages and read from them by tables.

The lengths stay on the device: a step copies nothing to the host, and may be captured in a CUDA graph, which plans at
every replay.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...base.memory import is_capturing
from ...wrappers import operators
from ...wrappers.function_plans import Tables, plan_of
from ...wrappers.plan_arguments import DecodeArguments, PrefillArguments
from .call import Layer

_local = threading.local()  # this thread's newest step


class Step:
    """Lengths and places of one forward, shared by its layers."""

    def __init__(self, ends: torch.Tensor, tables: torch.Tensor) -> None:
        """ends: [requests + 1] int32, where each request's tokens end, with the new one; tables: [requests, pages]."""
        batch, columns = tables.shape
        numbers = torch.arange(batch + 1, dtype=torch.int32, device=tables.device)
        self.seq_lens = ends.diff().int()
        self.tables = tables if columns <= 1 or tables.stride(1) == 1 else tables.contiguous()
        self.requests = torch.where(self.seq_lens > 0, numbers[:-1], -1)  # -1: padding, which is not written
        self.positions = self.seq_lens - 1
        self.indices, self.indptr = tables.flatten(), numbers * columns
        self.rows = numbers

    @staticmethod
    def of(ends: torch.Tensor, tables: torch.Tensor) -> Step:
        """The step of these tensors: each forward passes the same lengths to its layers, and views of the same tables.
        A forward that is captured has its own, even if the one before had the same tensors."""
        key = (tables.data_ptr(), tables.shape, is_capturing(tables.device))
        held: tuple[Any, ...] = getattr(_local, "step", (None,) * 3)
        if held[0] == key and held[1] is ends:
            step: Step = held[2]
        else:
            step = Step(ends, tables)
            _local.step = (key, ends, step)
        return step


def attend(
    layer: Layer, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Writes each request's new token, and attends to all of its tokens.

    Args:
        index: layer number.
        query, key, value: [1, heads, requests, dim]; requests past the last one are padding and have no tokens.
        kwargs: cache; cu_seq_lens_k by layer type; block_table [groups, requests, pages]. From transformers 5.24 on
            there are the layer's own: k_cache and v_cache, its type's cu_seq_lens_k, its group's block_table.

    Returns:
        [1, requests, num_q_heads, head_dim], zeros for padding.
    """
    ends, tables = kwargs["cu_seq_lens_k"], kwargs["block_table"]
    if (cache := kwargs.get("cache")) is None:
        pages = kwargs["k_cache"], kwargs["v_cache"]
    else:
        allocator = cache.layer_to_allocator[index]
        pages = allocator.get_cache_for_block_table(index)
        ends, tables = ends[allocator.layer_type], tables[allocator.index]
    step = Step.of(ends, tables)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    operators.call(
        "append_paged_kv_cache",
        *(k, v, step.requests, step.positions, step.indices, step.indptr, list(pages), "NHD"),
    )
    call, page_size = layer.call, pages[0].shape[1]
    tables = Tables(step.seq_lens, step.tables)
    arguments: DecodeArguments | PrefillArguments
    if call.head_dim_qk == call.head_dim_vo:
        arguments = DecodeArguments(
            *(call.num_q_heads, call.num_kv_heads, call.head_dim_qk, page_size),
            window_left=layer.window_left,
            logits_soft_cap=call.soft_cap,
            q_data_type=call.dtype,
            sm_scale=call.sm_scale,
        )
    else:
        arguments = call.arguments(page_size, layer.window_left, has_mask=False)
        tables = tables._replace(q_indptr=step.rows, max_rows=len(q))
    attention = plan_of(q.device, "NHD", arguments).on_device(tables, step, ends)
    out: torch.Tensor = attention.run(q, pages, sinks=layer.sinks)
    return out.unsqueeze(0)
