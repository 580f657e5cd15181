"""What the paged and the ragged prefill wrapper share."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import arguments
from .errors import PlanError
from .lengths import Lengths
from .multi_item import MultiItemMask
from .problem import Options, Values, check_options, check_soft_cap, check_window
from .wrapper import PlanRunWrapper


class PrefillWrapper(PlanRunWrapper):
    """What the paged and the ragged wrapper share."""

    def _masks(
        self, custom_mask: Any, packed_custom_mask: Any, prefix_len: Any, token_pos: Any, token_pos_len: int, batch: int
    ) -> Any:
        """The variant of multi-item scoring, None without; judges which masks may stand together."""
        has_items = prefix_len is not None or token_pos is not None
        given = [custom_mask is not None, packed_custom_mask is not None, has_items]
        if sum(given) > 1:
            raise PlanError(
                "custom_mask, packed_custom_mask and the multi-item arguments (prefix_len_ptr, "
                "token_pos_in_items_ptr) each "
                "say what a row sees: give one of them."
            )
        if given[2] is False:
            return None
        return self._multi_item.set(prefix_len, token_pos, token_pos_len, batch)

    @functools.cached_property
    def _multi_item(self) -> MultiItemMask:
        return MultiItemMask(self.device)

    def _plan_prefill(
        self,
        lengths: Lengths,
        kv_indices: Any,
        masks: tuple[Any, Any],
        non_blocking: bool,
        longest: tuple[int | None, int | None],
    ) -> None:
        planner = self._planner
        batch = lengths.q_indptr.shape[0] - 1  # type: ignore[union-attr]
        self._check_graph_batch(batch)
        planner.plan(batch, lengths, kv_indices, non_blocking)
        if masks != (None, None) or planner.mask.tensor is not None:
            self._set_mask(masks, non_blocking)
        if longest != (None, None):
            planner.check_longest(*longest)

    def _set_mask(self, masks: tuple[Any, Any], non_blocking: bool) -> None:
        planner = self._planner
        planner.is_planned = False
        custom_mask, packed = masks
        has_mask = custom_mask is not None or packed is not None
        if has_mask and planner.is_graph and planner.mask.buffer is None:
            raise PlanError("custom_mask with use_cuda_graph=True needs custom_mask_buf: pass it to the constructor.")
        bits = planner.bits() if has_mask else torch.zeros(0, dtype=torch.int64)
        planner.mask.set(packed if custom_mask is None else custom_mask, packed is not None, bits, non_blocking)
        planner.is_planned = True

    def end_forward(self) -> None:
        """Nothing: plans need no end."""


def only_items(items: Any, variant: Any) -> Any:
    """Multi-item scoring is a variant itself."""
    if variant is not None:
        raise PlanError(
            "variant and prefix_len_ptr are both given: multi-item scoring is a mask of its own; give one of them."
        )
    return items


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
    arguments.refuse_given(use_fp16_qk_reduction=use_fp16_qk_reduction)
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
