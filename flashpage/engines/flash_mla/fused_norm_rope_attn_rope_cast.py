"""FlashMLA's fused_norm_rope_attn_rope_cast: the names exist, and a call says what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from ...base.errors import CapabilityError

_KERNELS = "it belongs to kernels of sm_100 cards: normalise and rotate q, call {}, then rotate and convert its output"
_WEIGHTS = "it arranges weights for the fused kernels of sm_100 cards: keep them as they are"

_REASONS = {
    "prefill": _KERNELS.format("flash_mla_sparse_fwd"),
    "decode": _KERNELS.format("flash_mla_with_kvcache with indices"),
    "permute_q_b_proj": _WEIGHTS,
    "permute_wv_proj": _WEIGHTS,
}


def _refuse(name: str) -> NoReturn:
    raise CapabilityError(f"fused_norm_rope_attn_rope_cast.{name} is not supported: {_REASONS[name]}.")


def prefill(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: use flash_mla_sparse_fwd."""
    _refuse("prefill")


def decode(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: use flash_mla_with_kvcache."""
    _refuse("decode")


def permute_q_b_proj(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: no kernel here reads permuted weights."""
    _refuse("permute_q_b_proj")


def permute_wv_proj(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: no kernel here reads permuted weights."""
    _refuse("permute_wv_proj")
