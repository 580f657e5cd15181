"""Batches of prefills and decodes together, as FlashInfer's persistent wrapper takes them."""

from __future__ import annotations

from typing import Any

import torch

from ..base import checks
from ..base.errors import PlanError, RunError
from ..kernels.options import check_heads
from ..plan.lengths import all_to_host, batch_of
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper

_WORKSPACE_BYTES = 128 << 20
_FEW_ROWS = 64  # packed rows of a request and KV head that a decode kernel takes


class BatchAttention:
    """Attention of a batch whose requests have any number of rows.

    A batch in which requests of few rows stand before or behind those of many is run as two plans over its own parts
    of q and out, since they want other tiles; any other batch is one plan.

    Args:
        kv_layout: "NHD": [pages, page_size, heads, dim]; "HND": [pages, heads, page_size, dim].
        device: where it runs; workspaces are allocated there.
    """

    def __init__(self, kv_layout: str = "NHD", device: Any = "cuda") -> None:
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise PlanError(f"device={str(device)!r}: torch finds no CUDA device here; pass device='cpu'.")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = [BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout) for _ in range(2)]
        self._parts: list[tuple[BatchPrefillWithPagedKVCacheWrapper, int]] = []  # of the plan, and where its rows end

    @property
    def float_workspace_buffer(self) -> torch.Tensor:
        """Memory for partial results."""
        return self._wrappers[0]._float_workspace_buffer

    @property
    def int_workspace_buffer(self) -> torch.Tensor:
        """Memory for the plan."""
        return self._wrappers[0]._int_workspace_buffer

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plans a batch. Index tensors: int32 or int64, on the host (nothing waits) or on the device (one copy back).

        Args:
            qo_indptr: [batch + 1], where each request's rows begin in q.
            kv_indptr, kv_indices: where each request's pages begin, [batch + 1], and their numbers.
            kv_len_arr: [batch], tokens of each request.
            The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan.
        """
        checks.refuse_given(use_profiler=use_profiler)
        self._parts = []
        num_qo_heads, num_kv_heads = check_heads(num_qo_heads, num_kv_heads)
        batch = batch_of(qo_indptr, "qo_indptr")
        checks.tensor(kv_indptr, "kv_indptr", PlanError)
        checks.tensor(kv_len_arr, "kv_len_arr", PlanError)
        qo_indptr, kv_indptr, kv_len_arr = all_to_host([qo_indptr, kv_indptr, kv_len_arr])  # type: ignore[assignment]
        ends = [batch]
        if kv_indptr.shape == qo_indptr.shape and kv_len_arr.shape == (batch,):  # else the planner tells
            ends = _ends(qo_indptr, num_qo_heads // num_kv_heads)
        begin = 0
        for wrapper, end in zip(self._wrappers, ends, strict=False):
            plan: Any = wrapper.plan
            plan(
                *(qo_indptr[begin : end + 1], kv_indptr[begin : end + 1], kv_indices, None),
                *(num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo),
                causal=causal,
                sm_scale=sm_scale,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                seq_lens=kv_len_arr[begin:end],
            )
            begin = end
        self._parts = [(wrapper, wrapper._planner.total_q) for wrapper, _ in zip(self._wrappers, ends, strict=False)]

    def run(
        self,
        q: torch.Tensor,
        kv_cache: Any,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Args:
            q: [rows, num_qo_heads, head_dim_qk].
            kv_cache: pages, as BatchPrefillWithPagedKVCacheWrapper.run takes them.
            out, lse: [rows, num_qo_heads, head_dim_vo] and [rows, num_qo_heads] fp32, base 2, written in place; None:
                allocated.
            k_scale, v_scale: numbers, or fp32 tensors of one entry or one a head.
            logits_soft_cap: 0: the planned one.

        Returns:
            out and lse.
        """
        checks.refuse_given(profiler_buffer=profiler_buffer)
        if not self._parts:
            raise RunError("run: BatchAttention has no plan: call plan(...) first.")
        rows = checks.tensor(q, "q", RunError).shape[0]
        if rows != self._parts[-1][1]:
            raise RunError(f"q has {rows} rows but the plan is for {self._parts[-1][1]}: plan again for this batch.")
        if out is None:
            options = self._parts[0][0]._options
            out = torch.empty((*q.shape[:2], options.head_dim_vo), dtype=options.out_dtype.torch, device=q.device)
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        scales = {"k_scale": k_scale, "v_scale": v_scale, "kv_cache_sf": kv_cache_sf}
        for wrapper, end in self._parts:
            planned = wrapper._logits_soft_cap
            if logits_soft_cap:
                wrapper._logits_soft_cap = checks.real("logits_soft_cap", logits_soft_cap)
            try:
                wrapper.run(q[:end], kv_cache, out=out[:end], lse=lse[:end], **scales)
            finally:
                wrapper._logits_soft_cap = planned
        return out, lse


def _ends(qo_indptr: torch.Tensor, group: int) -> list[int]:
    """Where the parts of a batch end: two where its requests of few rows stand on one side, else one."""
    is_few = qo_indptr.diff() * group <= _FEW_ROWS
    changes = (is_few[1:] != is_few[:-1]).nonzero().flatten().tolist()
    return [changes[0] + 1, len(is_few)] if len(changes) == 1 else [len(is_few)]
