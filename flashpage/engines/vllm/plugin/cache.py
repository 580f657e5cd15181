"""vLLM's KV cache, [blocks, num_kv_heads, page, 2 * head_dim] with any strides: K and V are halves of a row."""

from __future__ import annotations

import torch

from .. import cache_layout, operators, rotate


def halves(kv_cache: torch.Tensor, head_dim: int, kv_cache_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V, [blocks, page, num_kv_heads, head_dim] each, in their element type."""
    if kv_cache_dtype in cache_layout.FP8:
        kv_cache = kv_cache.view(cache_layout.FP8[kv_cache_dtype])
    rows = kv_cache.transpose(1, 2)
    return rows[..., :head_dim], rows[..., head_dim:]


def element_type(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype | None:
    """The element type of a cache; None: no kernel reads it."""
    if kv_cache_dtype in cache_layout.FP8:
        return cache_layout.FP8[kv_cache_dtype]
    if kv_cache_dtype == "auto":
        return model_dtype
    found = getattr(torch, kv_cache_dtype, None)
    return found if isinstance(found, torch.dtype) else None


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    kv_cache_dtype: str,
    scales: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Writes new tokens to their slots; key and value may be longer than `slots`."""
    name = kv_cache_dtype if kv_cache_dtype in cache_layout.FP8 else "auto"
    operators.reshape_and_cache_flash(key, value, *cache, slots, name, *scales)


def write_rotated(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rotation: rotate.Rotation,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    kv_cache_dtype: str,
    scales: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """`write` after the rotation of queries and keys in place; `rows`: queries, keys and values."""
    name = kv_cache_dtype if kv_cache_dtype in cache_layout.FP8 else "auto"
    rotate.rotate_and_write(*rows, rotation, rotate.Slots(cache, slots, name, scales))
