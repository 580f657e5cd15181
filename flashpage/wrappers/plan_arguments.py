"""Arguments of the decode wrapper's plan that are not lengths."""

from __future__ import annotations

import warnings
from typing import Any

from ..base import checks
from ..base.errors import PlanError
from ..kernels.options import Options, Values, check_options, check_soft_cap, check_window

# What FlashInfer once took by position behind page_size, in this order.
_DEPRECATED_POSITIONS = (
    *("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type", "data_type"),
    *("sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens", "fixed_split_size"),
    *("disable_split_kv", "q_len_per_req"),
)


def decode_options(
    num_qo_heads: Any,
    num_kv_heads: Any,
    head_dim: Any,
    page_size: Any,
    pos_encoding_mode: str,
    window_left: Any,
    window_right: Any,
    logits_soft_cap: Any,
    q_data_type: Any,
    kv_data_type: Any,
    o_data_type: Any,
    data_type: Any,
    sm_scale: Any,
    rope_scale: Any,
    rope_theta: Any,
    fixed_split_size: Any,
    disable_split_kv: bool,
    q_len_per_req: Any,
    variant: Any,
) -> tuple[Options, Values]:
    """Of plan's arguments, in the order of its key."""
    checks.refuse_given(window_right=window_right)
    q_len_per_req = checks.whole("q_len_per_req", q_len_per_req, 1)
    if q_data_type is None:
        q_data_type = "float16" if data_type is None else data_type
    options = check_options(
        kv_source="paged",
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=checks.whole("head_dim", head_dim, 1),
        head_dim_vo=None,
        page_size=page_size,
        q_data_type=q_data_type,
        kv_data_type=data_type if kv_data_type is None else kv_data_type,
        o_data_type=o_data_type,
        causal=q_len_per_req > 1,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        pos_encoding_mode=pos_encoding_mode,
        has_mask=False,
        variant=variant,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        uniform_q_len=q_len_per_req,
    )
    cap, window = check_soft_cap(logits_soft_cap), check_window(window_left)
    return options, Values(options.causal, window, cap, sm_scale, rope_scale, rope_theta, pos_encoding_mode)


def named_options(positional: tuple[Any, ...]) -> dict[str, Any]:
    if len(positional) > len(_DEPRECATED_POSITIONS):
        raise PlanError(
            f"plan was given {7 + len(positional)} positional arguments, at most "
            f"{7 + len(_DEPRECATED_POSITIONS)}: pass "
            "options by keyword."
        )
    names = _DEPRECATED_POSITIONS[: len(positional)]
    warnings.warn(
        f"positional arguments of plan after page_size are deprecated: pass {', '.join(names)} by keyword",
        DeprecationWarning,
        stacklevel=3,
    )
    return dict(zip(names, positional, strict=True))
