"""Answers to vLLM's questions about what can be served, from the kernels' own rules."""

from __future__ import annotations

from typing import Any

import torch

from ...plugin.refusal import latent_refusal as latent_refusal_of
from ...plugin.refusal import refusal as refusal_of
from .. import cache_layout
from .cache import element_type

CACHE_TYPES = ("auto", "float16", "bfloat16", *cache_layout.FP8)
_STRIDE_ORDERS = {  # of [blocks, heads, page, 2 * head_dim], and with layers before
    "NHD": ((0, 2, 1, 3), (1, 0, 3, 2, 4)),
    "HND": ((0, 1, 2, 3), (1, 2, 0, 3, 4)),
}


def stride_order(layout: str, has_layers: bool) -> tuple[int, ...]:
    """The order of a cache's dimensions in memory."""
    return _STRIDE_ORDERS[layout][has_layers]


def refusal(head_dim: int, dtype: torch.dtype, kv_cache_dtype: str, page_size: int, capability: Any) -> str | None:
    """The reason why no kernel of cards with this compute capability takes such layers; None: one does."""
    kv_dtype = element_type(kv_cache_dtype, dtype)
    if kv_dtype is None:
        return f"flashpage reads no KV cache of {kv_cache_dtype}"
    return refusal_of(head_dim, dtype, kv_dtype, page_size, _numbers(capability))


def latent_refusal(
    columns: int, dtype: torch.dtype, kv_cache_dtype: str, page_size: int, capability: Any
) -> str | None:
    """The reason why no kernel of such cards reads latent rows of so many columns; None: one does."""
    kv_dtype = element_type(kv_cache_dtype, dtype)
    if kv_dtype is None:
        return f"flashpage reads no KV cache of {kv_cache_dtype}"
    return latent_refusal_of(columns, dtype, kv_dtype, page_size, _numbers(capability))


def _numbers(capability: Any) -> tuple[int, int] | None:
    return None if capability is None else (capability.major, capability.minor)
