"""Many prefills beside many decodes: a plan for each side, made together, launched on one stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..base import checks
from ..base.errors import PlanError
from ..plan.lengths import all_to_host
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper


class BatchPODWithPagedKVCacheWrapper:
    """A batch of prefills and a batch of decodes over paged caches.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs.
        kv_layout: of both caches: "NHD" or "HND".
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._prefill, self._decode = (
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in range(2)
        )
        self._plan_prefill: Callable[..., None] | None = None  # takes a mask
        self._is_masked = False  # the prefills' present plan

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False: there are no buffers to capture with; runs can be captured with their present plan."""
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
        """Plans both batches, whose lengths come to the host in one copy where they lie on the device.

        Args:
            qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p: the prefills.
            qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d: the decodes, which see all of their tokens.
            The other arguments are of both, as BatchPrefillWithPagedKVCacheWrapper.plan takes them.
        """
        self._prefill._planner.invalidate()
        self._decode._planner.invalidate()
        given = {"qo_indptr_p": qo_indptr_p, "kv_indptr_p": kv_indptr_p, "last_page_len_p": last_page_len_p}
        given |= {"qo_indptr_d": qo_indptr_d, "kv_indptr_d": kv_indptr_d, "last_page_len_d": last_page_len_d}
        for name, tensor in given.items():
            checks.tensor(tensor, name, PlanError)
        lengths = [tensor.clone() for tensor in all_to_host(list(given.values()))]  # type: ignore[union-attr]
        if q_data_type is None:
            q_data_type = "float16" if data_type is None else data_type
        plans: list[Callable[..., None]] = []
        sides = ((self._prefill, lengths[:3], kv_indices_p), (self._decode, lengths[3:], kv_indices_d))
        for wrapper, (qo_indptr, kv_indptr, last_page_len), indices in sides:
            plan = functools.partial(
                wrapper.plan,
                *(qo_indptr, kv_indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size),
                pos_encoding_mode=pos_encoding_mode,
                window_left=window_left,
                q_data_type=q_data_type,
                kv_data_type=data_type if kv_data_type is None else kv_data_type,
                sm_scale=sm_scale,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                non_blocking=non_blocking,
            )
            plan()
            plans.append(plan)
        self._plan_prefill, self._is_masked = plans[0], False

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
    ) -> Any:
        """Attention of both batches.

        Args:
            q_p, paged_kv_cache_p, q_d, paged_kv_cache_d: as BatchPrefillWithPagedKVCacheWrapper.run takes them.
            custom_mask_p, packed_custom_mask_p: of the prefills, as their plan takes them; a run that has one plans
                them again, as does the next that has none.
            causal_p: of the prefills; does not apply beside a mask.
            q_scale, k_scale, v_scale: of the decodes.

        Returns:
            The outputs of the prefills and of the decodes; with `return_lse` a pair of output and lse each.
        """
        checks.refuse_given(use_fp16_qk_reduction=use_fp16_qk_reduction)
        self._decode._require_plan("run")
        is_masked = custom_mask_p is not None or packed_custom_mask_p is not None
        if self._plan_prefill is not None and (is_masked or self._is_masked):
            self._plan_prefill(custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p)
            self._is_masked = is_masked
        self._prefill._require_plan("run")
        self._prefill._causal = bool(causal_p)
        common: dict[str, Any] = {"return_lse": return_lse, "enable_pdl": enable_pdl}
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return (
            self._prefill.run(q_p, paged_kv_cache_p, **common),
            self._decode.run(q_d, paged_kv_cache_d, **scales, **common),
        )

    def end_forward(self) -> None:
        """Nothing: plans need no end."""
