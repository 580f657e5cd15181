"""Answers to vLLM's questions about what can be served, from the kernels' own rules."""

from __future__ import annotations

from typing import Any

import torch

from ....base.errors import FlashpageError
from ....kernels import choose, devices
from ....kernels.work import Problem
from ....wrappers.plan_arguments import DecodeArguments, PrefillArguments
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
    card = card_of(capability)
    if card is None:
        return None  # a card that no row names; the kernels are compiled for it, and its driver's numbers decide
    types: dict[str, Any] = {"q_data_type": dtype, "kv_data_type": kv_dtype}
    decode = DecodeArguments(1, 1, head_dim, page_size, **types)
    prefill = PrefillArguments("paged", 1, 1, head_dim, page_size, causal=True, **types)
    try:
        for arguments, rows in ((decode, 1), (prefill, choose.MANY_ROWS)):
            options, _ = arguments.checked()
            choose.choose_for_card(Problem(options, rows), card)
    except FlashpageError as error:
        return f"flashpage: {error}"
    return None


def card_of(capability: Any) -> devices.Device | None:
    """A row of the table of cards with this compute capability, which vLLM gives without touching the card."""
    if capability is None:
        return devices.CPU
    sm = capability.major * 10 + capability.minor
    return next((card for card in devices.CARDS if card.sm == sm), None)
