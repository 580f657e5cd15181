"""Prefill over dense K and V, request after request."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..base import checks, kv_view
from ..base.errors import RunError
from ..plan.capacity import Capacity
from ..plan.page_indices import Mask
from ..run.checks import NO_SCALES, scales_of
from ..variants.multi_item import ItemArguments
from .base import RAGGED
from .engine_access.attributes import array_of_plan
from .lse_mode import BASE_2, mode_of
from .prefill_base import PrefillWrapper, only_items


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Attention of a batch of prefills over ragged K and V: `plan` once a step, `run` once a layer.

    A caller may change any argument of plan before the next run, except tensors that a card reads in place: packed
    masks and a variant's tensors. Those must stay as they are until the last run of the plan is done. (The CPU reads
    copies, except of a variant's tensors.) An output of run must not share memory with q, k, v or another output, so q
    itself is refused as `out`.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs (128 MiB is plenty);
            on the CPU: the CPU backend. On Hopper a run first copies rotated keys, or V under e4m3 queries, into the
            rest of it, if that is worth it and all of the batch's fit. Wrappers whose runs overlap, on two streams,
            need one each.
        kv_layout: of k and v: "NHD": [tokens, heads, dim]; "HND": [heads, tokens, dim].
        use_cuda_graph: runs may be captured, and replayed after later plans: of the same batch size and at most the
            first plan's rows with the two buffers, of any batch within the capacities without them.
        qo_indptr_buf, kv_indptr_buf: with `use_cuda_graph`; their lengths fix the batch.
        custom_mask_buf, mask_indptr_buf: with `use_cuda_graph` and masks; plan copies the packed bits to the first, and
            where each request's bytes begin to the second.
        backend: "auto" ("fa2", "fa3": the same).
        max_batch, max_kv_rows, max_rows: with `use_cuda_graph`, in place of the two buffers: the most requests of a
            plan, rows of K and V, and rows of q. The first plan checks that the workspaces suffice for any such batch.
    """

    _length_names = RAGGED
    _kv_indptr_buf = array_of_plan(1)

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        *,
        max_batch: int | None = None,
        max_kv_rows: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        checks.refuse_given(variant_owns_mask=variant_owns_mask)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        self._take_graph_buffers(
            Capacity.of(use_cuda_graph, max_batch=max_batch, max_kv_rows=max_kv_rows, max_rows=max_rows),
            qo_indptr_buf=qo_indptr_buf,
            kv_indptr_buf=kv_indptr_buf,
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        qo_indptr_cpu: torch.Tensor | None = None,
        kv_indptr_cpu: torch.Tensor | None = None,
        **own: Any,
    ) -> None:
        """Plans a batch. Index tensors: int32 or int64, on the host (nothing waits) or on the device (one copy back).

        Args:
            qo_indptr: [batch + 1], where each request's rows begin in q.
            kv_indptr: [batch + 1], where each request's tokens begin in k and v.
            num_qo_heads, num_kv_heads: query heads, a multiple of KV heads; the most of any layer: runs may have fewer.
            fixed_split_size: tokens.
            qo_indptr_cpu, kv_indptr_cpu: copies of the first two on the host, read in their place.
            seq_lens: [batch], tokens of each request if they are fewer than kv_indptr says.

        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan.
        """
        if not (seq_lens_q is v_indptr is o_indptr is None):
            checks.refuse_given(seq_lens_q=seq_lens_q, v_indptr=v_indptr, o_indptr=o_indptr)
        qo_indptr = qo_indptr if qo_indptr_cpu is None else qo_indptr_cpu
        kv_indptr = kv_indptr if kv_indptr_cpu is None else kv_indptr_cpu
        mask = None
        if not (
            custom_mask is None
            and packed_custom_mask is None
            and prefix_len_ptr is None
            and token_pos_in_items_ptr is None
            and max_item_len_ptr is None
            and token_pos_in_items_len.__class__ is int
            and token_pos_in_items_len == 0
        ):
            self._planner.invalidate()
            items = ItemArguments(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
            if (item_mask := self._masks(custom_mask, packed_custom_mask, items, qo_indptr)) is not None:
                own["variant"], causal = only_items(item_mask, own.get("variant")), True
            mask = Mask.of(custom_mask, packed_custom_mask)
        arguments = (
            "ragged",
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            0,
            head_dim_vo,
            mask is not None,
            causal,
            pos_encoding_mode,
            use_fp16_qk_reduction,
            sm_scale,
            window_left,
            logits_soft_cap,
            rope_scale,
            rope_theta,
            q_data_type,
            kv_data_type,
            o_data_type,
            fixed_split_size,
            disable_split_kv,
            own,
        )
        lengths = (qo_indptr, kv_indptr, None, seq_lens)
        pages = (None, None, non_blocking, None)
        self._plan(arguments, lengths, pages, mask, (max_token_per_sequence, max_sequence_kv))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: Any = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
        sinks: torch.Tensor | None = None,
        window_left: int | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        lse_mode: str = BASE_2,
    ) -> Any:
        """Attention of the planned batch.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk], any strides, last dimension contiguous.
            k, v: [tokens, num_kv_heads, head_dim_qk or head_dim_vo] (HND: heads first), any strides.
            q_scale, k_scale, v_scale: numbers, or fp32 tensors of one entry, one for each head, [batch, heads] or
                [batch, 1].
            o_scale: divides outputs of float8_e4m3fn: a number, or an fp32 tensor of one entry.
            kv_cache_sf: (k_sf, v_sf), as BatchPrefillWithPagedKVCacheWrapper.run takes them, without pages.
            out: [qo_indptr[-1], num_qo_heads, head_dim_vo], written in place; None: allocated.
            lse: [qo_indptr[-1], num_qo_heads] fp32, base 2, written in place. A row that sees no token has
                out = 0 and lse = -inf, or sink * log2(e) with sinks.
            return_lse: also return lse.
            enable_pdl: programmatic dependent launch; None: if the card has it.
            sinks: [num_qo_heads] fp32, natural-log units, which join the denominator, and so the lse.
            window_left: replaces the planned one for this run.
            lse_base: FlashInfer's name for `lse_mode`: "log2" or "ln".
            lse_layout: "NH" ([rows, heads]).
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).
        """
        if args:
            raise RunError(checks.extra_positions(args))
        if not (kv_cache_sf is None and lse_base == "log2" and lse_layout == "NH"):
            checks.refuse_run_options(None, None, None, lse_layout)
            lse_mode = mode_of(lse_base, lse_mode)
        values = self._now if window_left is None else self._values(window_left)
        is_unscaled = q_scale is k_scale is v_scale is o_scale is None  # scales_of would be a frame more
        scales = NO_SCALES if is_unscaled else scales_of(q_scale, k_scale, v_scale, o_scale)
        kv = (k, v) if kv_cache_sf is None else kv_view.with_scales((k, v), kv_cache_sf)
        if lse_mode is not BASE_2:
            return self._attention.run_of(lse_mode)(q, kv, out, lse, return_lse, values, scales, sinks, enable_pdl)
        return self._attention.run(q, kv, out, lse, return_lse, values, scales, sinks, enable_pdl)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str | None = None,
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
        *,
        lse_mode: str = BASE_2,
    ) -> Any:
        """`run` with options that replace the planned ones, defaults included (pos_encoding_mode None: as planned)."""
        checks.refuse_given(use_fp16_qk_reduction=use_fp16_qk_reduction)
        self._take_values(
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, k, v, return_lse=return_lse, lse_mode=lse_mode)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
