"""Cascade attention: requests that share tokens read them once, level by level, and the levels' states are merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...base import checks, kv_view
from ...base.errors import CapabilityError, PlanError, RunError
from ...base.unique import Unique
from ...kernels.options import check_head_dim
from ...plan.lengths import Lengths, Names, all_to_host, batch_of
from ...plan.page_indices import Pages
from ...run.checks import NO_SCALES
from ..base import Attention
from ..graph_buffers import take_graph_buffers
from ..lse_mode import BASE_2, in_base_e, is_natural
from ..merge import merge_parts, part_of
from ..plan_arguments import Checked, PrefillArguments
from ..prewarm import Prewarmed
from .fold import PagedLevel, folded
from .window import LevelWindows

_ARRAYS = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")


def _names(level: int) -> Names:
    """The caller's names for the lists of a level."""
    q_indptr, kv_indptr, indices, last_page_len = (f"{name}[{level}]" for name in _ARRAYS)
    return Names(q_indptr, kv_indptr, last_page_len, "seq_lens", indices)


class MultiLevelCascadeAttentionWrapper(Prewarmed, Unique):
    """Attention of requests whose tokens lie in levels: tokens that many requests share first, each one's own last.

    A level is a batch over the same rows: `qo_indptr_arr[level]` says which rows share each of its page lists. All
    levels are planned from one copy of the lengths. A level without tokens costs nothing. A level that only one request
    uses is joined with the level below it if its pages are full. A single level writes the output itself; several are
    merged in one pass.

    Args:
        num_levels: at least one.
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs (128 MiB is plenty);
            on the CPU: the CPU backend. The levels share it.
        kv_layout: "NHD": [pages, page_size, heads, dim]; "HND": [pages, heads, page_size, dim].
        use_cuda_graph: runs may be captured, and replayed after later plans of the same batch sizes and at most the
            first plan's rows.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr: with
            `use_cuda_graph`; one tensor for each level, as in BatchPrefillWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._num_levels = checks.whole("num_levels", num_levels, 1)
        self._use_cuda_graph = checks.flag("use_cuda_graph", use_cuda_graph)
        buffers: dict[str, Any] = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        for name, arrays in buffers.items() if self._use_cuda_graph else ():
            self._check_count(f"{name}_arr", arrays)
        self._levels = [
            Attention(
                float_workspace_buffer,
                kv_layout,
                is_graph=self._use_cuda_graph,
                names=_names(level),
                owner=type(self).__name__,
            )
            for level in range(self._num_levels)
        ]
        if self._use_cuda_graph:
            for level, attention in enumerate(self._levels):
                take_graph_buffers(attention, None, {name: arrays[level] for name, arrays in buffers.items()})
                attention.session.wait()  # a refused level must not change what captured launches of the others read
        self._windows = LevelWindows(self._num_levels, float_workspace_buffer.device, self._use_cuda_graph)
        self._active: list[Attention] = []  # levels with tokens; empty: no plan
        self._checked = Checked()

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether runs may be captured and replayed after later plans."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Takes other workspaces, one int workspace for each level; call plan again before the next run."""
        self._check_count("int_workspace_buffers", int_workspace_buffers)
        self._active = []
        for attention, buffer in zip(self._levels, int_workspace_buffers, strict=True):
            attention.reset_workspace_buffer(float_workspace_buffer, buffer)

    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        **own: Any,
    ) -> None:
        """Plans a batch. Index tensors: int32 or int64, on the host (nothing waits) or on the device (one copy back).

        Args:
            qo_indptr_arr: for each level [requests + 1], which rows share its page lists; all end at the same row.
            paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: for each level its pages, as
                BatchPrefillWithPagedKVCacheWrapper.plan takes them. A level or a request may have none.
            num_qo_heads, num_kv_heads, head_dim, page_size: those of all levels.
            causal: for the last level; rows see all tokens of the levels above it.
            pos_encoding_mode: "NONE", as positions inside a level are not those of the request.
            window_left: tokens visible left of the row's own, counted across levels; -1: all.

        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan.
        """
        self._active = []
        page_size = checks.whole("page_size", page_size, 1)
        given = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for name, arrays in zip(_ARRAYS, given, strict=True):
            self._check_count(name, arrays)
        if self._num_levels > 1 and checks.position_encoding(pos_encoding_mode) != "NONE":
            raise CapabilityError(
                f"pos_encoding_mode={pos_encoding_mode!r} is not supported with num_levels={self._num_levels}. "
                "A level does not know the positions of its tokens in a request: "
                "rotate q and K before, or add the bias with one level."
            )
        qo_indptrs, kv_indptrs, last_page_lens = self._to_host(
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_last_page_len, page_size
        )
        self._check_rows(qo_indptrs)
        lists = zip(range(self._num_levels), qo_indptrs, kv_indptrs, paged_kv_indices_arr, last_page_lens, strict=True)
        levels = [PagedLevel(*level) for level in lists]
        if not self._use_cuda_graph and all(isinstance(level.indices, torch.Tensor) for level in levels):
            levels = folded(levels, page_size, checks.flag("causal", causal))
        options, values = self._checked.of(
            PrefillArguments(
                "paged",
                num_qo_heads,
                num_kv_heads,
                check_head_dim("head_dim", head_dim),
                page_size,
                causal=causal,
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                own=own,
            )
        )
        if options.variant is not None and len(levels) > 1:
            raise CapabilityError(
                f"variant is not supported with num_levels={self._num_levels}. "
                "A level does not know the positions of its tokens in a request: use one level."
            )
        shown = self._windows.plan(levels, options)
        whole = dataclasses.replace(shown.options, causal=False, window_left=-1)
        values_of_whole = values._replace(causal=False, window_left=-1)
        for level, variant, row_runs in zip(levels, shown.variants, shown.row_runs, strict=True):
            of_level = (shown.options, values) if level is levels[-1] else (whole, values_of_whole)
            lengths = Lengths(level.q_indptr, level.kv_indptr, level.last_page_len)
            level_options = of_level[0] if variant is None else dataclasses.replace(of_level[0], variant=variant)
            pages = Pages(level.indices, row_runs=row_runs)
            self._levels[level.number].plan(lengths, pages, level_options, of_level[1])
        planned = [self._levels[level.number] for level in levels]
        for attention in planned if self._use_cuda_graph else ():
            attention.session.publish()
        self._windows.copy()
        self._active = [
            attention
            for attention, hidden in zip(planned, shown.is_hidden, strict=True)
            if self._use_cuda_graph or (attention.session.result.total_kv > 0 and not hidden)
        ] or planned[-1:]

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_mode: str = BASE_2,
        k_scale: Any = None,
        v_scale: Any = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of the planned batch over all levels.

        Args:
            q: [rows, num_qo_heads, head_dim], any strides, last dimension contiguous.
            paged_kv_cache: the pages of all levels, as BatchPrefillWithPagedKVCacheWrapper.run takes them.
            out: [rows, num_qo_heads, head_dim], written in place; None: allocated. Contiguous if levels are merged.
            lse: [rows, num_qo_heads] fp32, contiguous, base 2, written in place.
            return_lse: also return lse.
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).
            k_scale, v_scale: numbers, or fp32 tensors of one entry or one for each head.
            kv_cache_sf: scales of K and V, as BatchPrefillWithPagedKVCacheWrapper.run takes them.
        """
        if not self._active:
            raise RunError("run: MultiLevelCascadeAttentionWrapper has no plan: call plan(...) first.")
        return_lse, natural = checks.flag("return_lse", return_lse, RunError), is_natural(lse_mode)
        paged_kv_cache = kv_view.with_scales(paged_kv_cache, kv_cache_sf)
        scales = (None, k_scale, v_scale) if self._has_scales(k_scale, v_scale) else NO_SCALES
        if len(self._active) == 1:
            return self._active[0].run_of(lse_mode)(q, paged_kv_cache, out, lse, return_lse, scales=scales)
        for name, tensor in (("q", q), ("out", out), ("lse", lse)):
            if tensor is not None or name == "q":
                checks.tensor(tensor, name, RunError)
        if out is None:
            out = torch.empty(q.shape, dtype=self._active[0].out_dtype, device=q.device)
        if return_lse and lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        parts = [part_of(attention, q, paged_kv_cache, scales=scales) for attention in self._active]
        merge_parts(parts, out, lse)
        result = (out, lse) if return_lse else out
        return in_base_e(result, lse) if natural else result

    forward = run

    def _has_scales(self, *scales: Any) -> bool:
        """Refuses scales of requests: those of a level are not the caller's."""
        for name, value in zip(("k_scale", "v_scale"), scales, strict=True):
            if isinstance(value, torch.Tensor) and value.dim() == 2 and len(value) > 1:
                raise CapabilityError(
                    f"{name} has shape {tuple(value.shape)}: pass one value, or one for each KV head."
                )
        return any(value is not None for value in scales)

    def _check_count(self, name: str, arrays: Any) -> None:
        try:
            found = "is None" if arrays is None else f"has {len(arrays)} entries"
        except TypeError:
            found = f"is a {type(arrays).__name__}"
        if found != f"has {self._num_levels} entries":
            raise PlanError(f"{name} {found} but num_levels={self._num_levels}: pass one tensor for each level.")

    def _to_host(
        self, qo_indptrs: Sequence[Any], kv_indptrs: Sequence[Any], last_page_lens: Sequence[Any], page_size: int
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Copies the lengths of all levels to the host at once."""
        for i, (qo_indptr, kv_indptr, last_page_len) in enumerate(
            zip(qo_indptrs, kv_indptrs, last_page_lens, strict=True)
        ):
            batch = batch_of(qo_indptr, f"qo_indptr_arr[{i}]")
            for name, tensor, length in (
                (f"paged_kv_indptr_arr[{i}]", kv_indptr, batch + 1),
                (f"paged_kv_last_page_len[{i}]", last_page_len, batch),
            ):
                if checks.tensor(tensor, name, PlanError).shape != (length,):
                    raise PlanError(
                        f"{name} has shape {tuple(tensor.shape)} but level {i} has {batch} requests: pass [{length}]."
                    )
        if page_size == 1:  # pages of one token: last_page_len says nothing
            last_page_lens = [None if not t.is_cpu else t for t in last_page_lens]
        host = all_to_host([*qo_indptrs, *kv_indptrs, *last_page_lens])
        count = self._num_levels
        return host[:count], host[count : 2 * count], host[2 * count :]

    def _check_rows(self, qo_indptrs: list[torch.Tensor]) -> None:
        """Checks that every level has a state for every row."""
        rows = int(qo_indptrs[-1][-1])
        for i, qo_indptr in enumerate(qo_indptrs):
            begin, end = int(qo_indptr[0]), int(qo_indptr[-1])
            if end != rows or (begin and self._num_levels > 1):
                raise PlanError(
                    f"qo_indptr_arr[{i}] covers rows {begin} to {end} but the last level's end at {rows}. "
                    "Each level covers all rows from 0: give rows that share nothing a request without pages."
                )
