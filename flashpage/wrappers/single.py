"""Attention of one request without a page table: a ragged batch of one, planned and run at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..base import checks, kv_view
from ..base.errors import FlashpageError, RunError
from ..base.memory import is_capturing
from ..kernels import kv_formats
from ..plan.lengths import Lengths
from ..plan.page_indices import NO_PAGES, Mask
from ..plan.session import current_stream
from ..run.checks import Scales
from .base import RAGGED, Attention
from .plan_arguments import PrefillArguments

_WORKSPACE_BYTES = 32 << 20
# Arguments of the inner interface that are shapes of tensors here.
_INNER = {"head_dim_qk": "head_dim of q", "head_dim_vo": "head_dim of v"}
_INNER |= {"num_qo_heads": "num_heads of q", "num_kv_heads": "num_heads of k"}

_local = threading.local()  # this thread's objects, by device, stream and layout
_captured: set[Attention] = set()  # kept, as graphs outlive threads


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    lse_mode: str = "base2",
    kv_cache_sf: Any = None,
    **own: Any,
) -> Any:
    """Attention of one query row.

    Args:
        q: [num_qo_heads, head_dim].
        k, v: [kv_len, num_kv_heads, head_dim] (HND: [num_kv_heads, kv_len, head_dim]).
        use_tensor_cores: accepted; kernels are chosen from shapes.
        kv_cache_sf: (k_sf, v_sf), the scales of K and V in nvfp4 (uint8 or fp4) or in another kv_format.

    Returns:
        [num_qo_heads, head_dim], with `return_lse` also [num_qo_heads] fp32, base 2 (lse_mode="basee": natural).
    """
    checks.tensor(q, "q", RunError)
    checks.flag("use_tensor_cores", use_tensor_cores, RunError)
    if q.dim() != 2:
        raise RunError(f"q has shape {tuple(q.shape)}: pass one row, [num_qo_heads, head_dim].")
    options = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
    options |= {"sm_scale": sm_scale, "rope_scale": rope_scale, "rope_theta": rope_theta, "own": own}
    scales = (q_scale, k_scale, v_scale)
    try:
        result = _run(q.unsqueeze(0), k, v, kv_layout, options, scales, (return_lse, lse_mode), kv_cache_sf)
    except FlashpageError as error:
        error.use_names(_INNER)
        raise
    return tuple(r.squeeze(0) for r in result) if return_lse else result.squeeze(0)


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    lse_mode: str = "base2",
    o_scale: Any = None,
    **own: Any,
) -> Any:
    """Attention of the rows of one request.

    Args:
        q: [q_len, num_qo_heads, head_dim_qk].
        k, v: [kv_len, num_kv_heads, head_dim_qk or head_dim_vo] (HND: heads first).
        scale_q, scale_k, scale_v: numbers, or fp32 tensors of one entry or one for each head; k_scale and v_scale
            are other names for two of them.
        o_dtype: type of the output; None: q's, or bfloat16 if that is fp8.
        o_scale: divides outputs of float8_e4m3fn: a number, or an fp32 tensor of one entry.
        custom_mask: [q_len, kv_len] bool, True: visible; it replaces causal.
        packed_custom_mask: the mask as bits, `packbits(mask.flatten(), bitorder="little")`.
        kv_cache_sf: (k_sf, v_sf), the scales of K and V in nvfp4 (uint8 or fp4) or in another kv_format.

    Returns:
        [q_len, num_qo_heads, head_dim_vo], with `return_lse` also [q_len, num_qo_heads] fp32, base 2
        (lse_mode="basee": natural).
    """
    checks.refuse_given(use_fp16_qk_reduction=use_fp16_qk_reduction)
    checks.backend(backend)
    options = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
    options |= {"sm_scale": sm_scale, "rope_scale": rope_scale, "rope_theta": rope_theta, "own": own}
    options |= {"causal": causal, "o_data_type": o_dtype}
    scales = (
        scale_q,
        _one_of("scale_k", scale_k, "k_scale", k_scale),
        _one_of("scale_v", scale_v, "v_scale", v_scale),
        *(() if o_scale is None else (o_scale,)),
    )
    try:
        return _run(
            *(q, k, v, kv_layout, options, scales, (return_lse, lse_mode), kv_cache_sf),
            Mask.of(custom_mask, packed_custom_mask),
        )
    except FlashpageError as error:
        given = {"q_scale": scale_q, "k_scale": scale_k, "v_scale": scale_v}
        names = {name: f"scale_{name[0]}" for name, value in given.items() if value is not None}
        error.use_names(names | _INNER | {"o_data_type": "o_dtype"})
        raise


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    options: dict[str, Any],
    scales: Scales,
    lse: tuple[bool, str],
    kv_cache_sf: Any,
    mask: Mask | None = None,
) -> Any:
    plan = plan_of_one(q, k, v, (kv_layout, ""), mask, options)
    attention = _attention(q.device, kv_layout)
    plan(attention)
    if is_capturing(attention.device):
        _captured.add(attention)
    return attention.run_of(lse[1])(q, kv_view.with_scales((k, v), kv_cache_sf), return_lse=lse[0], scales=scales)


def plan_of_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: tuple[Any, str],
    mask: Mask | None,
    options: dict[str, Any],
) -> Callable[[Attention], None]:
    """A function that plans one request over ragged K and V. `layout`: "NHD" or "HND", and what ends the caller's names
    of kv_layout and custom_mask; `options`: of PrefillArguments."""
    kv_layout = checks.layout(layout[0], RunError, f"kv_layout{layout[1]}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if checks.tensor(tensor, name, RunError).dim() != 3:
            raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass three dimensions, [rows, heads, head_dim].")
    token, head = (0, 1) if kv_layout == "NHD" else (1, 0)
    lengths = q.shape[0], k.shape[token]
    of_one = None if mask is None else mask.of_one(f"custom_mask{layout[1]}", *lengths)

    def plan(attention: Attention) -> None:
        q_dtype, kv_format = checks.dtype_of(q, "q", RunError), options.get("own", {}).get("kv_format")
        is_given = kv_format is not None or kv_formats.is_fp4(k.dtype)
        kv_type: Any = k.dtype if kv_format is None else None
        if not is_given:
            name = kv_formats.stored_as(k.dtype)
            kv_type = checks.dtype_of(k, "k", RunError, f", or kv_format={name!r} with kv_cache_sf" if name else "")
        k_columns, v_columns = (kv_formats.columns_of(t, kv_format, kv_type, q_dtype, i) for i, t in enumerate((k, v)))
        if k_columns != q.shape[2]:
            raise RunError(f"q has {q.shape[2]} columns and k {k_columns}: pass equal numbers of columns.")
        arguments = PrefillArguments(
            "ragged",
            q.shape[1],
            k.shape[head],
            q.shape[2],
            head_dim_vo=v_columns,
            has_mask=of_one is not None,
            q_data_type=q_dtype,
            kv_data_type=kv_type,
            **options,
        )
        ends = (torch.tensor([0, length], dtype=torch.int32, device="cpu") for length in lengths)
        attention.plan(Lengths(*ends), NO_PAGES, *arguments.checked(), of_one)

    return plan


def _attention(device: torch.device, kv_layout: str) -> Attention:
    """This thread's object for a device, stream and layout, so that work on two streams shares no memory."""
    key = (device, current_stream(device.index) if device.type == "cuda" else 0, kv_layout)
    found = _local.__dict__.setdefault("attention", {})
    if key not in found:
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        found[key] = Attention(workspace, kv_layout, names=RAGGED)
    return found[key]


def _one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    if value is not None and other is not None:
        raise RunError(f"{name} and {other_name} are both given: pass one of them, as they are one argument.")
    return other if value is None else value
