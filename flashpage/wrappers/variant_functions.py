"""FlashInfer's functions that take a compiled variant; here they take a flashpage.Variant instead."""

from __future__ import annotations

from typing import Any

import torch

from ..base import checks
from ..base.errors import CapabilityError, RunError
from ..variants.variant import Variant
from .single import single_decode_with_kv_cache, single_prefill_with_kv_cache

_NON_CAUSAL, _CAUSAL = 0, 1  # utils.MaskMode


def single_decode_with_kv_cache_with_jit_module(
    jit_module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    window_left: int = -1,
    return_lse: bool = False,
    lse_mode: str = "base2",
) -> Any:
    """`single_decode_with_kv_cache` with a variant.

    Args:
        jit_module: a flashpage.Variant, which captures its own tensors and numbers.
        q, k, v, kv_layout, window_left, return_lse, lse_mode: as `single_decode_with_kv_cache` takes them.
    """
    variant = _variant(jit_module, args)
    options: dict[str, Any] = {"window_left": window_left, "return_lse": return_lse, "lse_mode": lse_mode}
    return single_decode_with_kv_cache(q, k, v, kv_layout, variant=variant, **options)


def single_prefill_with_kv_cache_with_jit_module(
    jit_module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    mask_mode: int = _NON_CAUSAL,
    window_left: int = -1,
    return_lse: bool = False,
    lse_mode: str = "base2",
) -> Any:
    """`single_prefill_with_kv_cache` with a variant.

    Args:
        jit_module: a flashpage.Variant, which captures its own tensors and numbers.
        q, k, v, kv_layout, window_left, return_lse, lse_mode: as `single_prefill_with_kv_cache` takes them.
        mask_mode: MaskMode.NON_CAUSAL.value or MaskMode.CAUSAL.value.
    """
    variant = _variant(jit_module, args)
    if mask_mode not in (_NON_CAUSAL, _CAUSAL):
        raise CapabilityError(
            f"mask_mode={mask_mode} is not supported: pass 0 (all tokens) or 1 (causal). "
            "For other masks, use flashpage.Variant(mask_mod=...), or custom_mask of single_prefill_with_kv_cache."
        )
    options: dict[str, Any] = {"window_left": window_left, "return_lse": return_lse, "lse_mode": lse_mode}
    return single_prefill_with_kv_cache(
        q, k, v, causal=mask_mode == _CAUSAL, kv_layout=kv_layout, variant=variant, **options
    )


def _variant(jit_module: Any, args: tuple[Any, ...]) -> Variant:
    if not isinstance(jit_module, Variant):
        checks.refuse("jit_module", jit_module)
    if args:
        raise RunError(
            f"{len(args)} values after v: pass them to the flashpage.Variant, which captures tensors and numbers."
        )
    return jit_module
