"""Batches of prefills and decodes together, as in FlashInfer's persistent wrapper."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..base import checks, kv_view
from ..base.errors import PlanError
from ..base.unique import Unique
from ..kernels.options import check_soft_cap
from ..plan.lengths import Lengths, Names
from ..plan.page_indices import Pages
from ..run.checks import NO_SCALES
from ..run.profiler_buffer import run_profiled
from .base import Attention
from .lse_mode import BASE_2
from .plan_arguments import Checked, PrefillArguments
from .prewarm import Prewarmed

_WORKSPACE_BYTES = 128 << 20


class BatchAttention(Prewarmed, Unique):
    """Attention of a batch whose requests have any number of rows.

    If it is faster, requests of few rows and requests of many are planned for different kernels, which run at the same
    time (plan/mixed_batch.py).

    Args:
        kv_layout: "NHD": [pages, page_size, heads, dim]; "HND": [pages, heads, page_size, dim].
        device: the device that runs; workspaces are allocated there.
    """

    _uses_profiler = False

    def __init__(self, kv_layout: str = "NHD", device: Any = "cuda") -> None:
        device = checks.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise PlanError(f"device={str(device)!r}: torch finds no CUDA device here; pass device='cpu'.")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        names = Names("qo_indptr", "kv_indptr", "kv_len_arr", "kv_len_arr", "kv_indices")
        self._attention = Attention(workspace, kv_layout, names=names, owner=type(self).__name__)
        self._checked = Checked(self._attention.session)

    @property
    def float_workspace_buffer(self) -> torch.Tensor:
        """Memory for partial results."""
        return self._attention.session.workspaces.float_buffer

    @property
    def int_workspace_buffer(self) -> torch.Tensor:
        """Memory for the plan."""
        return self._attention.session.workspaces.int_buffer

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
        *,
        kv_format: Any = None,
    ) -> None:
        """Plans a batch. Index tensors: int32 or int64, on the host (nothing waits) or on the device (one copy back).

        Args:
            qo_indptr: [batch + 1], where each request's rows begin in q.
            kv_indptr, kv_indices: where each request's pages begin, [batch + 1], and their numbers.
            kv_len_arr: [batch], tokens of each request.

            use_profiler: runs get a `profiler_buffer`.
            kv_format: how K and V are stored, in place of kv_data_type.

        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan.
        """
        self._uses_profiler = use_profiler is not False and checks.flag("use_profiler", use_profiler)
        arguments = PrefillArguments(
            "paged",
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo,
            causal=causal,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type if kv_format is None else None,
            own={} if kv_format is None else {"kv_format": kv_format},
        )
        lengths = Lengths(qo_indptr, kv_indptr, None, kv_len_arr)
        self._attention.plan(lengths, Pages(kv_indices), *self._checked.of(arguments))

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
        *,
        lse_mode: str = "base2",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Args:
            q: [rows, num_qo_heads, head_dim_qk].
            kv_cache: pages, as BatchPrefillWithPagedKVCacheWrapper.run takes them.
            out, lse: [rows, num_qo_heads, head_dim_vo] and [rows, num_qo_heads] fp32, base 2, written in place; None:
                allocated.
            k_scale, v_scale: numbers, or fp32 tensors of one entry or one for each head.
            logits_soft_cap: 0: as planned.
            kv_cache_sf: scales of K and V, as BatchPrefillWithPagedKVCacheWrapper.run takes them.
            profiler_buffer: uint64 [n], if plan got use_profiler: gets the events of each CTA, as
                flashinfer.profiler.export_to_perfetto_trace reads them (prefill, decode, reduction); the call waits.
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).

        Returns:
            out and lse.
        """
        if kv_cache_sf is not None:
            kv_cache = kv_view.with_scales(kv_cache, kv_cache_sf, "kv_cache")
        values = self._attention.values
        if (logits_soft_cap.__class__ is not float or logits_soft_cap) and (cap := check_soft_cap(logits_soft_cap)):
            values = values._replace(logits_soft_cap=cap)
        scales = NO_SCALES if k_scale is v_scale is None else (None, k_scale, v_scale)
        run = self._attention.run if lse_mode == BASE_2 else self._attention.run_of(lse_mode)
        if self._uses_profiler or profiler_buffer is not None:
            given = (q, kv_cache, out, lse, True, values, scales)
            stamped = functools.partial(run, *given)
            return run_profiled(self._attention, profiler_buffer, self._uses_profiler, stamped)
        found: tuple[torch.Tensor, torch.Tensor] = run(q, kv_cache, out, lse, True, values, scales)
        return found
