"""The arguments of one layer's attention call, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...base.errors import RunError
from ...base.memory import is_capturing
from ...wrappers.plan_arguments import PrefillArguments


class Call(NamedTuple):
    """The options of a layer that its plan depends on; layers with equal options share a plan."""

    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype: torch.dtype
    sm_scale: float | None
    soft_cap: float | None
    is_causal: bool
    has_mask: bool  # a 4-D mask, which says all that is visible

    def arguments(self, page_size: int, window_left: int, has_mask: bool) -> PrefillArguments:
        """The options of the plan; `page_size` 0 means ragged."""
        return PrefillArguments(
            "paged" if page_size else "ragged",
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            page_size,
            self.head_dim_vo,
            has_mask,
            causal=self.is_causal and not self.has_mask,
            sm_scale=self.sm_scale,
            window_left=window_left,
            logits_soft_cap=self.soft_cap,
            q_data_type=self.dtype,
        )


class Layer(NamedTuple):
    """A layer's call: its plan's options, those that may differ under one plan, and the mask."""

    call: Call
    window_left: int
    sinks: torch.Tensor | None  # [num_q_heads] fp32
    mask: torch.Tensor | None  # [batch, kv_len] bool, True at tokens; or [batch or 1, 1, q_len, kv_len]
    number: int = -1  # the layer's number in its model; -1: unknown


def judge(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> Layer:
    """Reads the arguments that transformers passes to an attention function; refuses unsupported ones by name."""
    _refuse(options, query)
    if isinstance(mask, torch.Tensor) and mask.dim() not in (2, 4):
        raise RunError(
            f"attention_mask has shape {tuple(mask.shape)}: pass [batch, tokens] or [batch, 1, rows, tokens]."
        )
    is_causal, window = options["is_causal"], options["sliding_window"]
    has_mask = mask is not None and mask.dim() == 4
    call = Call(
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim_qk=query.shape[3],
        head_dim_vo=value.shape[3],
        dtype=query.dtype,
        sm_scale=options["scaling"],
        soft_cap=options["softcap"],
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        has_mask=has_mask,
    )
    # transformers' window includes the row's own token and ours does not; a 4-D mask has the window in it.
    window_left = -1 if window is None or has_mask or not call.is_causal else window - 1
    sinks = options["s_aux"]
    number = getattr(module, "layer_idx", None)
    sinks = None if sinks is None else sinks.detach().float()
    return Layer(call, window_left, sinks, mask, -1 if number is None else number)


def _refuse(options: dict[str, Any], query: torch.Tensor) -> None:
    if options["dropout"]:
        raise RunError(f"dropout={options['dropout']}: dropout is not supported; call model.eval().")
    if options["position_bias"] is not None:
        raise RunError("position_bias is given: it is not supported; use attn_implementation='sdpa'.")
    if options.get("output_attentions"):
        raise RunError("output_attentions=True: the weights are never stored; use attn_implementation='eager'.")
    if query.requires_grad and torch.is_grad_enabled():
        raise RunError("gradients are on: there is no backward pass; run the model under torch.no_grad().")
    if is_capturing(query.device) and options.get("write_index") is None:
        raise RunError("the stream is being captured: the host makes the plans; call the model without a graph.")
