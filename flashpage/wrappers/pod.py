"""Prefills and decodes in one call, as in FlashInfer's POD wrappers: each side has its own plan, on one stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base import checks
from ..base.errors import FlashpageError, PlanError, RunError
from ..base.unique import Unique
from ..kernels.options import check_head_dim
from ..plan.lengths import Lengths, Names, all_to_host
from ..plan.page_indices import Mask, Pages, kept
from .base import DECODE, RAGGED, Attention
from .graph_buffers import take_graph_buffers
from .plan_arguments import Checked, DecodeArguments, PrefillArguments, types_of
from .planned_by_runs import PlannedByRuns
from .single import plan_of_one

# The callers' names: a suffix says which side an argument is for.
_PREFILLS = Names("qo_indptr_p", "kv_indptr_p", "last_page_len_p", "seq_lens", "kv_indices_p")
_DECODES = Names("qo_indptr_d", "kv_indptr_d", "last_page_len_d", "seq_lens", "kv_indices_d")
_OPTIONS = ("causal", "pos_encoding_mode", "sm_scale", "window_left", "rope_scale", "rope_theta")
_OF_PREFILL = {name: f"{name}_p" for name in ("q", "k", "v", "paged_kv_cache", "packed_custom_mask", *_OPTIONS)}
_OF_PREFILL |= {"head_dim_qk": "head_dim of q_p", "head_dim_vo": "head_dim of v_p", "custom_mask": "custom_mask_p"}
_OF_DECODE = {name: f"{name}_d" for name in ("q", "paged_kv_cache", *_OPTIONS)}
_OF_DECODE |= {"k": "paged_kv_cache_d's k", "v": "paged_kv_cache_d's v"}
_OF_PAGED_PREFILL = _OF_PREFILL | {"k": "paged_kv_cache_p's k", "v": "paged_kv_cache_p's v"}


class PODWithPagedKVCacheWrapper(Unique):
    """One request's prefill over dense K and V, and a batch of decodes over a paged cache.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs.
        kv_layout: of the paged cache: "NHD" or "HND".
        use_cuda_graph, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: for the decodes,
            as BatchDecodeWithPagedKVCacheWrapper takes them.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: list[Any] | None = None,
    ) -> None:
        checks.refuse_given(jit_args=jit_args)
        self._kv_layout = kv_layout
        self._decode = Attention(
            float_workspace_buffer,
            kv_layout,
            is_graph=checks.flag("use_cuda_graph", use_cuda_graph),
            names=DECODE,
            owner=type(self).__name__,
        )
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        take_graph_buffers(self._decode, None, buffers)
        self._checked = Checked(self._decode.session)
        self._prefills = {layout: PlannedByRuns(self._maker(layout)) for layout in checks.LAYOUTS}

    def _maker(self, layout: str) -> Callable[[], Attention]:
        workspaces, owner = self._decode.session.workspaces, type(self).__name__
        return lambda: Attention(workspaces.float_buffer, layout, names=RAGGED, owner=owner)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether runs may be captured, and replayed after later plans of the decodes and other prefills."""
        return self._decode.session.is_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Takes other workspaces; call plan again before the next run."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        for prefill in self._prefills.values():
            prefill.forget()
            attention = prefill.attention
            attention.reset_workspace_buffer(float_workspace_buffer, attention.session.workspaces.int_buffer)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans the decodes, as BatchDecodeWithPagedKVCacheWrapper.plan does; `run` plans the prefill."""
        arguments = DecodeArguments(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=checks.optional_dtype("kv_data_type", kv_data_type),
            data_type=data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        lengths, pages = Lengths(None, indptr, last_page_len), Pages(indices, non_blocking=non_blocking)
        self._decode.plan(lengths, pages, *self._checked.of(arguments))

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: Any,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the prefill and of the planned decodes.

        Args:
            q_p: [q_len, num_qo_heads, head_dim].
            k_p, v_p: [kv_len, num_kv_heads, head_dim] (kv_layout_p HND: heads first).
            q_d, paged_kv_cache_d: as BatchDecodeWithPagedKVCacheWrapper.run takes them.
            custom_mask_p, packed_custom_mask_p, causal_p: what the prefill's rows see, as
                single_prefill_with_kv_cache takes it.
            causal_d: no effect, as a decode has one row.
            pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d: if given, they replace the
                planned values for this run.
            q_scale, k_scale, v_scale: for the decodes.

        Returns:
            The outputs of the prefill and of the decodes.
        """
        if args:
            raise RunError(checks.extra_positions(args))
        checks.refuse_given(
            return_lse_p=return_lse_p,
            return_lse_d=return_lse_d,
            custom_mask_d=custom_mask_d,
            packed_custom_mask_d=packed_custom_mask_d,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
        )
        if checks.layout(kv_layout_d, RunError, "kv_layout_d") != self._kv_layout and kv_layout_d != "NHD":
            raise RunError(
                f"kv_layout_d={kv_layout_d!r} but the wrapper has {self._kv_layout!r}: make another wrapper for it."
            )
        self._decode.require_plan("run")
        options = (causal_p, pos_encoding_mode_p, sm_scale_p, window_left_p, rope_scale_p, rope_theta_p)
        try:
            mask = Mask.of(custom_mask_p, packed_custom_mask_p)
            prefill = self._plan_prefill(q_p, k_p, v_p, kv_layout_p, mask, dict(zip(_OPTIONS, options, strict=True)))
            out_p = prefill.run(q_p, (k_p, v_p), enable_pdl=enable_pdl)
        except FlashpageError as error:
            error.use_names(_OF_PREFILL)
            raise
        checks.flag("causal_d", causal_d, RunError)
        given = {"sm_scale": sm_scale_d, "rope_scale": rope_scale_d, "rope_theta": rope_theta_d}
        changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if checks.whole("window_left_d", window_left_d, -(2**31), error=RunError) != -1:
            changed["window_left"] = window_left_d
        if pos_encoding_mode_d != "NONE":
            changed["pos_encoding_mode"] = pos_encoding_mode_d
        values, scales = self._decode.values._replace(**changed), (q_scale, k_scale, v_scale)
        try:
            out_d = self._decode.run(q_d, paged_kv_cache_d, values=values, scales=scales, enable_pdl=enable_pdl)
        except FlashpageError as error:
            error.use_names(_OF_DECODE)
            raise
        return out_p, out_d

    def _plan_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Any,
        mask: Mask | None,
        options: dict[str, Any],
    ) -> Attention:
        """Plans the prefill once a step, in its first layer; a mask is read again in every layer."""
        plan = plan_of_one(q, k, v, (layout, "_p"), mask, options)
        key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, *options.values())
        return self._prefills[layout].plan(None if mask is not None else key, plan)

    def end_forward(self) -> None:
        """Does nothing: a plan needs no end."""


class BatchPODWithPagedKVCacheWrapper(Unique):
    """A batch of prefills and a batch of decodes over paged caches.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs.
        kv_layout: of both caches: "NHD" or "HND".
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        owner = type(self).__name__
        self._decode = Attention(float_workspace_buffer, kv_layout, names=_DECODES, owner=owner)
        self._prefill = PlannedByRuns(
            lambda: Attention(float_workspace_buffer, kv_layout, names=_PREFILLS, owner=owner)
        )
        self._prefills: tuple[Lengths, Pages, PrefillArguments] | None = None  # as planned, for a plan with a mask
        self._is_masked = False  # whether the prefills' present plan has a mask

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False: there are no buffers for later plans; runs can be captured with their present plan."""
        return False

    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans both batches; lengths on a device come to the host in one copy.

        Args:
            qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p: the prefills.
            qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d: the decodes, which see all of their tokens.

        The other arguments are for both, as in BatchPrefillWithPagedKVCacheWrapper.plan.
        """
        self._prefill.attention.session.invalidate()
        self._decode.session.invalidate()
        self._prefills = None
        given = {"qo_indptr_p": qo_indptr_p, "kv_indptr_p": kv_indptr_p, "last_page_len_p": last_page_len_p}
        given |= {"qo_indptr_d": qo_indptr_d, "kv_indptr_d": kv_indptr_d, "last_page_len_d": last_page_len_d}
        for name, tensor in given.items():
            checks.tensor(tensor, name, PlanError)
        lengths = [tensor.clone() for tensor in all_to_host(list(given.values()))]  # type: ignore[union-attr]
        q_data_type, kv_data_type = types_of(q_data_type, kv_data_type, data_type)
        arguments = PrefillArguments(
            "paged",
            num_qo_heads,
            num_kv_heads,
            check_head_dim("head_dim", head_dim),
            page_size,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=checks.optional_dtype("kv_data_type", kv_data_type),
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        options, values = arguments.checked()
        prefills, pages = Lengths(*lengths[:3]), Pages(kept(kv_indices_p, "kv_indices_p"), non_blocking=non_blocking)
        self._prefill.plan(None, lambda prefill: prefill.plan(prefills, pages, options, values))
        self._decode.plan(Lengths(*lengths[3:]), Pages(kv_indices_d, non_blocking=non_blocking), options, values)
        self._prefills, self._is_masked = (prefills, pages, arguments), False

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: Any,
        q_d: torch.Tensor,
        paged_kv_cache_d: Any,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *,
        lse_mode: str = "base2",
    ) -> Any:
        """Attention of both batches.

        Args:
            q_p, paged_kv_cache_p, q_d, paged_kv_cache_d: as BatchPrefillWithPagedKVCacheWrapper.run takes them.
            custom_mask_p, packed_custom_mask_p: for the prefills, as in their plan; a run with a mask plans them again,
                and so does the next run without one.
            causal_p: for the prefills; a mask replaces it.
            q_scale, k_scale, v_scale: for the decodes.
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).

        Returns:
            The outputs of the prefills and of the decodes; with `return_lse` a pair of output and lse each.
        """
        checks.refuse_given(use_fp16_qk_reduction=use_fp16_qk_reduction)
        self._decode.require_plan("run")
        try:
            prefill = self._planned_prefill(Mask.of(custom_mask_p, packed_custom_mask_p))
            values = prefill.values._replace(causal=checks.flag("causal_p", causal_p, RunError))
            given: dict[str, Any] = {"return_lse": return_lse, "enable_pdl": enable_pdl}
            found_p = prefill.run_of(lse_mode)(q_p, paged_kv_cache_p, values=values, **given)
        except FlashpageError as error:
            error.use_names(_OF_PAGED_PREFILL)
            raise
        try:
            run, scales = self._decode.run_of(lse_mode), (q_scale, k_scale, v_scale)
            return found_p, run(q_d, paged_kv_cache_d, scales=scales, **given)
        except FlashpageError as error:
            error.use_names(_OF_DECODE)
            raise

    def _planned_prefill(self, mask: Mask | None) -> Attention:
        """The prefills with the mask of this run."""
        if self._prefills is not None and (mask is not None or self._is_masked):
            lengths, pages, arguments = self._prefills
            options, values = arguments._replace(has_mask=mask is not None).checked()
            self._is_masked = True  # until the plan succeeds
            self._prefill.plan(None, lambda prefill: prefill.plan(lengths, pages, options, values, mask))
            self._is_masked = mask is not None
        prefill = self._prefill.used()
        prefill.require_plan("run")
        return prefill

    def end_forward(self) -> None:
        """Does nothing: a plan needs no end."""
