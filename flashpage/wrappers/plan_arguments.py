"""Arguments of plan that are not lengths, of the decode and of the prefill wrappers, as options and values."""

from __future__ import annotations

import functools
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


def prefill_options(
    kv_source: str,
    num_qo_heads: Any,
    num_kv_heads: Any,
    head_dim_qk: Any,
    page_size: Any,
    head_dim_vo: Any,
    has_mask: bool,
    causal: bool,
    pos_encoding_mode: str,
    use_fp16_qk_reduction: bool,
    sm_scale: Any,
    window_left: Any,
    logits_soft_cap: Any,
    rope_scale: Any,
    rope_theta: Any,
    q_data_type: Any,
    kv_data_type: Any,
    o_data_type: Any,
    fixed_split_size: Any,
    disable_split_kv: bool,
    variant: Any,
) -> tuple[Options, Values]:
    """Of plan's arguments, in the order of its key."""
    checks.refuse_given(use_fp16_qk_reduction=use_fp16_qk_reduction)
    options = check_options(
        kv_source=kv_source,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        page_size=page_size,
        q_data_type=q_data_type,
        kv_data_type=kv_data_type,
        o_data_type=o_data_type,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        pos_encoding_mode=pos_encoding_mode,
        has_mask=has_mask,
        variant=variant,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
    )
    cap, window = check_soft_cap(logits_soft_cap), check_window(window_left)
    return options, Values(bool(causal), window, cap, sm_scale, rope_scale, rope_theta, pos_encoding_mode)


paged_options = functools.partial(prefill_options, "paged")
ragged_options = functools.partial(prefill_options, "ragged")


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
