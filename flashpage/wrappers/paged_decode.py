"""Decode: few query rows for each request, over a paged KV cache."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ..base import checks, kv_view
from ..base.errors import FlashpageError, RunError
from ..plan.capacity import Capacity
from ..plan.device_lengths import TableLengths
from ..plan.lengths import Lengths, check_numbers
from ..run.checks import NO_SCALES, scales_of
from .adapter import Adapter
from .base import DECODE
from .engine_access.attributes import PagedState, Written
from .engine_access.cached_module import DecodePlanModule, PlanModule
from .lse_mode import BASE_2
from .plan_arguments import DecodeArguments, differ, named_options, options_of_device, sizes_signature


class BatchDecodeWithPagedKVCacheWrapper(PagedState, Adapter):
    """Attention of a batch of decode steps: `plan` once a step, `run` once a layer.

    A caller may change any argument of plan before the next run, except tensors that a card reads in place: int32 page
    numbers, packed masks, arguments of plan_on_device, and a variant's tensors. Those must stay as they are until the
    last run of the plan is done. (The CPU reads copies, except of a variant's tensors.) An output of run must not share
    memory with q, K, V or another output, so q itself is refused as `out`.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs (128 MiB is plenty);
            on the CPU: the CPU backend.
        kv_layout: "NHD": [pages, page_size, heads, dim]; "HND": [pages, heads, page_size, dim].
        use_cuda_graph: runs may be captured, and replayed after later plans: of the same batch size with the three
            buffers, of any batch up to `max_batch` and `max_pages` without them.
        use_tensor_cores: accepted; kernels are chosen from shapes (`_cached_module` has either kind's arguments).
        paged_kv_indptr_buffer, paged_kv_last_page_len_buffer: with `use_cuda_graph`; their lengths fix the batch size.
        paged_kv_indices_buffer: with `use_cuda_graph`; int32, plan copies the page numbers there.
        backend: "auto" ("fa2", "fa3": the same).
        max_batch, max_pages: with `use_cuda_graph`, in place of the three buffers: the most requests of a plan, and the
            most entries of `indices` in use. The first plan checks that the workspaces suffice for any such batch.
        max_rows: the most rows of q; 0: max_batch * q_len_per_req.
    """

    _length_names = DECODE
    _q_len_per_req = Written(lambda state: state._planner.options.uniform_q_len)

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        *,
        max_batch: int | None = None,
        max_pages: int | None = None,
        max_rows: int = 0,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        self._use_tensor_cores = checks.flag("use_tensor_cores", use_tensor_cores)
        self._take_graph_buffers(
            Capacity.of(use_cuda_graph, max_batch=max_batch, max_pages=max_pages, max_rows=max_rows),
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
        )

    @property
    def use_tensor_cores(self) -> bool:
        """The constructor's arguments for graph mode."""
        return self._use_tensor_cores

    @property
    def _cached_module(self) -> Any:
        """The module whose `plan` has the arguments of FlashInfer's kernel for this wrapper."""
        if not self._planner.active:
            return None
        return (PlanModule if self._use_tensor_cores else DecodePlanModule)(self)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor | None,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        **own: Any,
    ) -> None:
        """Plans a batch. Index tensors: int32 or int64, on the host (nothing waits) or on the device (one copy back).

        Args:
            indptr: [batch + 1], where each request's pages begin in `indices`.
            indices: page numbers, at least indptr[-1] of them, unchecked if on a card: one beyond the cache is an
                illegal address there.
            last_page_len: [batch], tokens in each request's last page, 1 to page_size (0 too where it has no
                pages). None: `seq_lens` gives the tokens, or each page has one.
            num_qo_heads, num_kv_heads: query heads, a multiple of KV heads; the most of any layer: runs may have fewer.
            head_dim, page_size: columns of q, K and V; tokens of a page.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" (the kernel rotates q and K) or "ALIBI", whose bias is 0 at the
                row's own token, unlike FlashInfer's (docs/coming-from/flashinfer.md).
            window_left: tokens visible left of the row's own; -1: all.
            logits_soft_cap: scores become cap * tanh(score / cap); None or 0: no cap.
            q_data_type, kv_data_type, o_data_type: types of q ("float16"), of the cache (q's; torch.uint8: nvfp4) and
                of the output (q's, or "bfloat16" if that is fp8).
            data_type, sm_scale: the cache's type if kv_data_type is None; the factor of scores (head_dim ** -0.5).
            rope_scale, rope_theta: for ROPE_LLAMA; None: 1 and 1e4.
            non_blocking: whether copies of page numbers may be asynchronous.
            block_tables: [batch, pages], a row of page numbers for each request: in place of `indices` if that is None,
                otherwise checked against it. FLASHPAGE_CHECK_INDICES=on checks all numbers on a card, too.
            seq_lens: [batch], tokens of each request; wins over `last_page_len`.
            fixed_split_size: pages; every request is cut at multiples of this size, so that results do not depend on
            the rest of the batch. None or -1: balanced.
            disable_split_kv: no request is cut.
            q_len_per_req: query rows of each request (more than one: causal among them).
            own: `variant`, a flashpage.Variant; `chunk`, a number of tokens: positions are cut at its multiples, and a
                row sees only tokens of its own chunk (Llama 4); `kv_format`, how K and V are stored.
        """
        if deprecated_positional_args:
            given = {name: value for name, value in locals().items() if name in _PLAN_NAMES}
            self.plan(**(given | named_options(deprecated_positional_args)), **own)
            return
        arguments = (
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode,
            window_left,
            window_right,
            logits_soft_cap,
            q_data_type,
            kv_data_type,
            o_data_type,
            data_type,
            sm_scale,
            rope_scale,
            rope_theta,
            fixed_split_size,
            disable_split_kv,
            q_len_per_req,
            own,
        )
        try:
            is_new = arguments != self._arguments
        except (RuntimeError, ValueError):  # for example an array, which is refused when it is checked
            is_new = True
        if is_new:
            self._check(DecodeArguments(*arguments))
        self._now = self._planned
        lengths, pages = (None, indptr, last_page_len, seq_lens), (indices, block_tables, non_blocking, None)
        self._attention.plan(lengths, pages, self._options, self._now)

    begin_forward = plan

    def workspace_size(self, *lengths_and_heads: Any, **options: Any) -> tuple[int, int]:
        """Bytes of the float and of the int workspace that suffice for this batch and every smaller one; plan's
        arguments without window_right and non_blocking."""
        bound = _SIZE.bind(self, *lengths_and_heads, **options)
        bound.apply_defaults()
        given = bound.arguments
        arguments = DecodeArguments(**{name: given[name] for name in DecodeArguments._fields if name in given})
        lengths = Lengths(None, given["indptr"], given["last_page_len"], given["seq_lens"])
        for name in ("indices", "block_tables"):  # their sizes follow from the lengths
            if given[name] is not None:
                check_numbers(given[name], name)
        return self._attention.workspace_size(lengths, arguments.checked()[0])

    def plan_on_device(
        self,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        table_rows: torch.Tensor | None = None,
        num_requests: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        """Plans by one small kernel on the current stream: nothing is copied, the host neither waits nor knows the
        lengths. Captured in a graph before the runs, it plans again at every replay, from the tensors' contents at that
        time; call it once before the capture. The plan equals that of `plan` for the same lengths.

        Args:
            seq_lens: [batch] int32 or int64 on the device, tokens of each request.
            block_tables: [batch, pages] int32 on the device, read in place: page numbers of each request, as many as
                its tokens need; later entries are not read.
            table_rows: [batch] int32 or int64 on the device, each request's row of `block_tables`; None: 0, 1, 2, ...
            num_requests: [1] int32 on the device: how many of the batch's requests exist; the others are not planned
            and none of their rows is written. None: all.
            options: the options of `plan`, by keyword.

        On a card lengths must lie within 0 and a row of `block_tables`, and pages within the cache: the CPU checks it.
        """
        arguments = DecodeArguments(num_qo_heads, num_kv_heads, head_dim, page_size, **options_of_device(options))
        if differ(arguments, self._arguments):
            self._check(arguments)
        self._now = self._planned
        tables = TableLengths(
            self.device,
            seq_lens,
            block_tables,
            q_indptr=None,
            table_rows=table_rows,
            num_requests=num_requests,
            max_rows=0,
            options=self._options,
        )
        self._attention.plan_on_device(tables, self._options, self._now)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
        lse_mode: str = BASE_2,
        o_scale: Any = None,
    ) -> Any:
        """Attention of the planned batch.

        Args:
            q: [batch * q_len_per_req, num_qo_heads, head_dim], any strides, last dimension contiguous.
            paged_kv_cache: [pages, 2, page_size, num_kv_heads, head_dim] (HND: heads before tokens), or (K, V)
                without the 2; without the page_size dimension: pages of one token.
            q_scale, k_scale, v_scale: numbers, or fp32 tensors of one entry, of [heads], [batch, heads] or [batch, 1].
            o_scale: divides outputs of float8_e4m3fn: a number, or an fp32 tensor of one entry.
            kv_cache_sf: the scales of K and V in nvfp4 or in a kv_format, a pair or a tensor [pages, 2, ...]: of nvfp4
                float8_e4m3fn with head_dim / 16 columns; of others fp32, without that dimension.
            out: [batch * q_len_per_req, num_qo_heads, head_dim], written in place; None: allocated.
            lse: [batch * q_len_per_req, num_qo_heads] fp32, base 2, written in place. A row that sees no token has
                out = 0 and lse = -inf, or sink * log2(e) with sinks.
            return_lse, window_left: also return lse; replaces the planned one for this run.
            enable_pdl: programmatic dependent launch; None: if the card has it.
            sinks: [num_qo_heads] fp32, natural-log units, which join the denominator, and so the lse.
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).
        """
        if args:
            raise RunError(checks.extra_positions(args))
        if not (q_len_per_req is None and skip_softmax_threshold_scale_factor is None and kv_cache_sf is None):
            checks.refuse_given(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
            self._check_q_len(q_len_per_req)
            paged_kv_cache = kv_view.with_scales(paged_kv_cache, kv_cache_sf)
        values = self._now if window_left is None else self._values(window_left)
        is_unscaled = q_scale is k_scale is v_scale is o_scale is None  # scales_of would be a frame more
        scales = NO_SCALES if is_unscaled else scales_of(q_scale, k_scale, v_scale, o_scale)
        run = self._attention.run if lse_mode is BASE_2 else self._attention.run_of(lse_mode)
        return run(q, paged_kv_cache, out, lse, return_lse, values, scales, sinks, enable_pdl)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _check_q_len(self, q_len_per_req: int | None) -> None:
        self._attention.require_plan("run")
        if q_len_per_req is None:
            return
        if checks.whole("q_len_per_req", q_len_per_req, 1, error=RunError) != self._options.uniform_q_len:
            raise RunError(
                f"q_len_per_req={q_len_per_req} but the plan is for {self._options.uniform_q_len}: pass it to plan."
            )

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        pos_encoding_mode: str | None = None,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
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
        self._take_values(
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self.run(q, paged_kv_cache, **scales, return_lse=return_lse, lse_mode=lse_mode)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


_PLAN = inspect.signature(BatchDecodeWithPagedKVCacheWrapper.plan)
_PLAN_NAMES = set(_PLAN.parameters) - {"self", "deprecated_positional_args", "own"}
_SIZE = sizes_signature(_PLAN)
BatchDecodeWithPagedKVCacheWrapper.workspace_size.__signature__ = _SIZE  # type: ignore[attr-defined]


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with `use_cuda_graph=True` and its three buffers."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        try:
            super().__init__(
                workspace_buffer,
                kv_layout,
                use_cuda_graph=True,
                use_tensor_cores=use_tensor_cores,
                paged_kv_indptr_buffer=indptr_buffer,
                paged_kv_indices_buffer=indices_buffer,
                paged_kv_last_page_len_buffer=last_page_len_buffer,
            )
        except FlashpageError as error:
            names = {f"paged_kv_{name}": name for name in ("indptr_buffer", "indices_buffer", "last_page_len_buffer")}
            error.use_names(names | {"float_workspace_buffer": "workspace_buffer"})
            raise


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """`plan` under the name that engines install for graph replays (`functools.partial(fast_decode_plan, wrapper)`).

    `data_type` is the type of q and the cache if neither is given; `global_override_indptr_cpu` is indptr on the host.
    """
    given: dict[str, Any] = dict(locals())
    del given["self"], given["global_override_indptr_cpu"]
    if global_override_indptr_cpu is not None:
        given["indptr"] = global_override_indptr_cpu
    type(self).plan(self, **given)
