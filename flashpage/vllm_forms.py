"""What the kernels over vLLM's blocks take for granted of tensors, and the block-sparse pattern as they read it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import host
from .errors import RunError
from .vllm_attention import Sequences


class Partials(NamedTuple):
    """What paged_attention_v2 leaves of each partition."""

    exp_sums: torch.Tensor  # [num_seqs, num_heads, partitions] fp32
    max_logits: torch.Tensor  # the same
    tmp_out: torch.Tensor  # [num_seqs, num_heads, partitions, head_size]


def partition_room(partials: Partials, out: torch.Tensor) -> int:
    """That there is room for; judges what the kernels take for granted."""
    count = partials.tmp_out.shape[2]
    for name, tensor, dtype in zip(Partials._fields, partials, (torch.float32, torch.float32, out.dtype), strict=True):
        if not tensor.is_contiguous() or tensor.shape[2] != count or tensor.dtype != dtype:
            raise RunError(
                f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()} and dtype {tensor.dtype}: on a "
                f"card all three are contiguous with as many partitions, and {name} is {dtype}."
            )
    return count


def block_pattern(given: Sequences, num_heads: int) -> host.BlockPattern:
    """As the kernels read it; all zero without one."""
    sparse = given.sparse
    if not sparse.is_sparse:
        return host.BlockPattern()
    step = sparse.head_sliding_step
    heads = num_heads if step >= 0 else given.num_kv_heads
    return host.BlockPattern(
        block_size=host.make_fast_div(sparse.block_size),
        stride=host.make_fast_div(sparse.vert_stride),
        local_blocks=sparse.local_blocks,
        first=sparse.tp_rank * heads * abs(step) + 1,
        head_step=max(step, 0),
        kv_head_step=max(-step, 0),
    )


def check_places(query: torch.Tensor, out: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Rows and blocks begin on 16 bytes, and a head's block is in one piece."""
    block_size, x = key_cache.shape[3:]
    for name, tensor, inner in (
        ("query", query, (1,)),
        ("out", out, (1,)),
        ("key_cache", key_cache, (block_size * x, x, 1)),
        ("value_cache", value_cache, (block_size, 1)),
    ):
        strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        outer, found = strides[: -len(inner)], strides[-len(inner) :]
        if any(here not in (0, wanted) for here, wanted in zip(found, inner, strict=True)):
            raise RunError(
                f"{name} has strides {tensor.stride()}: on a card the last ones must be {inner}, a head's part of a "
                "block in one piece."
            )
        if any(stride * tensor.element_size() % 16 for stride in outer) or tensor.data_ptr() % 16:
            raise RunError(
                f"{name} has strides {tensor.stride()} and address {tensor.data_ptr():#x}: on a card rows and blocks "
                "must begin on multiples of 16 bytes."
            )
