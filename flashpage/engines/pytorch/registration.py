"""flashpage as an implementation of PyTorch's flash attention: importing this module registers it, and
`torch.nn.attention.activate_flash_attention_impl("flashpage")` puts it under torch's operators for CUDA tensors.

The kernel that was there before runs the rest: gradients, dropout, some shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ...base.errors import CapabilityError, PlanError, RunError
from . import forward
from .forward import Options, Varlen

try:
    from torch.nn.attention import register_flash_attention_impl
except ImportError:
    raise CapabilityError(
        f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl: "
        "install torch 2.11 or newer."
    ) from None

NAME = "flashpage"
# `is_within_own`: this thread is inside of a kernel of torch's, which calls the next operator with views that do not
# show that they need a gradient.
_local = threading.local()


class Registration:
    """The operators' kernels, until `remove`."""

    def __init__(self, dispatch_key: str) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL", dispatch_key)
        known = {name: kernel for name, kernel in _IMPLEMENTATIONS.items() if _has(name)}
        for operator, implementation in known.items():  # older releases lack some
            kernel = _with_own(implementation, _kernel_before(operator, dispatch_key))
            self._library.impl(operator, kernel, dispatch_key, with_keyset=True)

    def remove(self) -> None:
        """Gives the operators their own kernels back; torch calls it at restore_flash_attention_impl."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def register(dispatch_key: str = "CUDA") -> Registration:
    """Puts flashpage under torch's operators; torch calls it at activate_flash_attention_impl."""
    return Registration(dispatch_key)


def _has(operator: str) -> bool:
    name, _, overload = operator.partition(".")
    return hasattr(getattr(torch.ops.aten, name, None), overload or "default")


def _kernel_before(operator: str, dispatch_key: str) -> Any:
    """The operator's present kernel; None if it has none, as in torch's builds without CUDA."""
    try:
        return torch.library.get_kernel(f"aten::{operator}", dispatch_key)
    except RuntimeError:
        return None


def _with_own(implementation: Callable[..., Any], own: Any) -> Callable[..., Any]:
    """The implementation, or torch's own kernel for what it lacks or refuses, such as rows of no request."""

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        is_within_own = getattr(_local, "is_within_own", False)
        try:
            if own is None or not is_within_own:
                return implementation(*args, **kwargs)
        except (CapabilityError, PlanError, RunError):
            if own is None:
                raise
        _local.is_within_own = True
        try:
            return own.call_boxed(keys, *args, **kwargs)
        finally:
            _local.is_within_own = is_within_own

    return kernel


def _scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, of [batch, heads, rows, dim]."""
    _refuse(return_debug_mask, None, query, key, value)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    options = Options(scale, is_causal)
    forward.check(q, k, v, options, dropout_p)
    out = _like(query, value)
    lse = forward.dense(q, k, v, options, out.transpose(1, 2))
    return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def _scaled_dot_product_quantized(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention.quantized, of e4m3 queries, keys and values; outputs are bf16."""
    _refuse(return_debug_mask, None)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    options = Options(scale, is_causal, descales=(q_descale, k_descale, v_descale))
    forward.check(q, k, v, options, dropout_p)
    out = _like(query, value, torch.bfloat16)
    lse = forward.dense(q, k, v, options, out.transpose(1, 2))
    return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Any, ...]:
    """aten::_flash_attention_forward, of [batch, rows, heads, dim] or [total, heads, dim]."""
    out = _like(query, value)
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    lse = _forward_to(out, query, key, value, *lengths, dropout_p, is_causal, return_debug_mask, **options)
    return out, lse, *_unused(query)


def _forward_quantized(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    **options: Any,
) -> tuple[Any, ...]:
    """aten::_flash_attention_forward.quantized, of e4m3 [batch, rows, heads, dim] or [total, heads, dim]."""
    out = _like(query, value, torch.bfloat16)
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    descales = (q_descale, k_descale, v_descale)
    last = (dropout_p, is_causal, return_debug_mask)
    lse = _forward_to(out, query, key, value, *lengths, *last, descales=descales, **options)
    return out, lse, *_unused(query)


def _forward_to(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    descales: tuple[torch.Tensor | None, ...] | None = None,
) -> torch.Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace."""
    _refuse(return_debug_mask, alibi_slopes, *((query, key, value) if descales is None else ()))
    options = Options(scale, is_causal, window_size_left, window_size_right, num_splits, descales)
    forward.check(query, key, value, options, dropout_p, cum_seq_q)
    if cum_seq_q is not None:
        lengths = Varlen(cum_seq_q, cum_seq_k, seqused_k, block_table)
        return forward.varlen(query, key, value, lengths, options, out)
    if seqused_k is not None or block_table is not None:
        raise CapabilityError("flashpage needs cum_seq_q with seqused_k: torch's own kernel runs.")
    return forward.dense(query, key, value, options, out)


def _like(query: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An output in the query's layout, as torch's shape functions expect it."""
    if query.shape[-1] != value.shape[-1]:
        raise CapabilityError("flashpage's outputs here have the query's head dimension: torch's own kernel runs.")
    return torch.empty_like(query, dtype=dtype)


def _unused(query: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """State of the generator of dropout, which nothing reads without dropout, and no debug mask."""
    seed = torch.empty((2,), dtype=torch.uint64, device=query.device)
    return seed, torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _refuse(return_debug_mask: bool, alibi_slopes: torch.Tensor | None, *given: torch.Tensor) -> None:
    """Judges the given tensors themselves: their views need no gradient here, where autograd is done."""
    if any(tensor.requires_grad for tensor in given):
        raise CapabilityError("flashpage does not have a gradient: torch's own kernel runs.")
    if return_debug_mask or alibi_slopes is not None:
        raise CapabilityError("flashpage has no debug mask and no ALiBi slopes here: torch's own kernel runs.")


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _scaled_dot_product,
    "_scaled_dot_product_flash_attention.quantized": _scaled_dot_product_quantized,
    "_flash_attention_forward": _forward,
    "_flash_attention_forward.quantized": _forward_quantized,
    "_flash_attention_forward_no_dropout_inplace": _forward_to,
}

register_flash_attention_impl(NAME, register_fn=register)
