"""FlashInfer's paged prefill wrapper with attention sinks, which are positional arguments of run."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..base import checks
from ..base.dtypes import DType
from ..base.errors import PlanError, RunError
from ..kernels import kv_formats
from ..kernels.options import Options, check_scale
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from .plan_arguments import Arguments


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The paged prefill wrapper as `run(q, paged_kv_cache, sinks, sm_scale)`. plan must repeat the constructor's types,
    dims and window.

    Args:
        q_data_type, kv_data_type, head_dim_qk, head_dim_vo: those of every plan.
        window_left: for every plan that is not given another one.

    The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        checks.refuse_given(use_fp16_qk_reduction=use_fp16_qk_reduction)
        super().__init__(
            *(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                qo_indptr_buf,
                paged_kv_indptr_buf,
                paged_kv_indices_buf,
            ),
            *(paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend),
        )
        self._given = {
            "pos_encoding_mode": checks.position_encoding(pos_encoding_mode),
            "q_data_type": checks.dtype("q_data_type", q_data_type),
            "kv_data_type": kv_formats.check(None, kv_data_type, DType.BFLOAT16).kv_dtype,
            "head_dim_qk": checks.whole("head_dim_qk", head_dim_qk, 1),
            "head_dim_vo": checks.whole("head_dim_vo", head_dim_vo, 1),
        }
        self._given_window = checks.whole("window_left", window_left, -(2**31))

    @functools.wraps(BatchPrefillWithPagedKVCacheWrapper.plan)
    def plan(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if kwargs.get("window_left", -1) == -1 and len(args) < _WINDOW_POSITION:
            kwargs["window_left"] = self._given_window
        super().plan(*args, **kwargs)

    begin_forward = plan  # type: ignore[assignment]

    def _check(self, arguments: Arguments) -> None:
        super()._check(arguments)
        self._check_constructor_options(self._options)

    def _check_planned(self) -> None:
        super()._check_planned()
        self._check_constructor_options(self._planner.options)

    def _check_constructor_options(self, options: Options) -> None:
        planned = {
            "pos_encoding_mode": options.position_encoding,
            "q_data_type": options.q_dtype,
            "kv_data_type": options.kv_dtype,
            "head_dim_qk": options.head_dim_qk,
            "head_dim_vo": options.head_dim_vo,
        }
        for name, given in self._given.items():
            if planned[name] != given:
                self._arguments = None
                raise PlanError(
                    f"{name}={planned[name]} in plan but {given} in the constructor: pass the same value to both."
                )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        sinks: torch.Tensor | None = None,
        sm_scale: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """`run` of the paged prefill wrapper with `sinks`, and an `sm_scale` that replaces the planned one.

        Args:
            q, paged_kv_cache, kwargs: see `BatchPrefillWithPagedKVCacheWrapper.run`.
            sinks: [num_qo_heads] fp32, natural-log units, which join the denominator, and so the lse: a row that sees
                no token has out = 0 and lse = sink * log2(e).
            sm_scale: for this run; None: the planned one.
        """
        if args:
            raise RunError(checks.extra_positions(args))
        planned = self._sm_scale
        if sm_scale is not None:
            self._sm_scale = check_scale(sm_scale, 1)
        try:
            return super().run(q, paged_kv_cache, sinks=sinks, **kwargs)
        finally:
            self._sm_scale = planned

    run_return_lse = functools.partialmethod(run, return_lse=True)


_WINDOW_POSITION = 16  # of window_left among plan's positional arguments, counted from 1
