"""Prefill and append over a paged KV cache."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ..base import checks, kv_view
from ..base.errors import PlanError, RunError
from ..plan.capacity import Capacity
from ..plan.device_lengths import TableLengths
from ..plan.lengths import Lengths
from ..plan.page_indices import Mask
from ..run.checks import NO_SCALES, scales_of
from ..variants.multi_item import ItemArguments
from .engine_access.attributes import PagedState
from .lse_mode import BASE_2, mode_of
from .plan_arguments import PrefillArguments, differ, options_of_device
from .prefill_base import PrefillWrapper, only_items


class BatchPrefillWithPagedKVCacheWrapper(PagedState, PrefillWrapper):
    """Attention of a batch of prefills or appends over a paged KV cache: `plan` once a step, `run` once a layer.

    A caller may change any argument of plan before the next run, except tensors that a card reads in place: int32 page
    numbers, packed masks, arguments of plan_on_device, and a variant's tensors. Those must stay as they are until the
    last run of the plan is done. (The CPU reads copies, except of a variant's tensors.) An output of run must not share
    memory with q, K, V or another output, so q itself is refused as `out`.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs (128 MiB is plenty);
            on the CPU: the CPU backend. On Hopper a run first copies K or V into the rest of it, if that is worth it
            and all of the batch's fit: pages of one token, pages in fp8 or formats, rotated keys, V under e4m3
            queries. Wrappers whose runs overlap, on two streams, need one each.
        kv_layout: "NHD": [pages, page_size, heads, dim]; "HND": [pages, heads, page_size, dim].
        use_cuda_graph: runs may be captured, and replayed after later plans: with the four buffers of the same batch
            size and at most `max_total_num_rows`, without them of any batch within the capacities.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf: with `use_cuda_graph`; their lengths fix the
            batch.
        paged_kv_indices_buf: with `use_cuda_graph`; int32, plan copies the page numbers there.
        custom_mask_buf, mask_indptr_buf: with `use_cuda_graph` and masks; plan copies the packed bits to the first, and
            where each request's bytes begin to the second.
        backend: "auto" ("fa2", "fa3": the same).
        max_total_num_rows: with `use_cuda_graph` and the four buffers, the most rows of q in all plans; None: the first
            plan's.
        max_batch, max_pages, max_rows: with `use_cuda_graph`, in place of the four buffers: the most requests of a
            plan, entries of `paged_kv_indices` in use, and rows of q. The first plan checks that the workspaces suffice
            for any such batch. `max_rows / max_batch` chooses the kernel's tile.
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
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
        *,
        max_batch: int | None = None,
        max_pages: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        checks.refuse_given(variant_owns_mask=variant_owns_mask)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        self._take_graph_buffers(
            Capacity.of(use_cuda_graph, max_batch=max_batch, max_pages=max_pages, max_rows=max_rows),
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
        )
        if max_total_num_rows is not None:
            if not self._planner.is_graph or self._planner.capacity is not None:
                raise PlanError(
                    f"max_total_num_rows={checks.shown(max_total_num_rows)} is for use_cuda_graph=True and the four "
                    "buffers: without them, pass max_rows next to max_batch and max_pages."
                )
            self._max_total_num_rows = checks.whole("max_total_num_rows", max_total_num_rows, 0)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor | None,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        **own: Any,
    ) -> None:
        """Plans a batch. Index tensors: int32 or int64, on the host (nothing waits) or on the device (one copy back).

        Args:
            qo_indptr: [batch + 1], where each request's rows begin in q.
            paged_kv_indptr: [batch + 1], where each request's pages begin in `paged_kv_indices`.
            paged_kv_indices: page numbers, at least paged_kv_indptr[-1] of them. One beyond the cache is an
                illegal address on a card, where numbers are checked only with FLASHPAGE_CHECK_INDICES=on.
            paged_kv_last_page_len: [batch], tokens in each request's last page, 1 to page_size (0 too
                where it has no pages). None: `seq_lens` gives the tokens, or each page has one.
            num_qo_heads, num_kv_heads: query heads, a multiple of KV heads; the most of any layer: runs may have fewer.
            head_dim_qk, head_dim_vo: of q and K; of V and the output (None: the same).
            page_size: tokens a page.
            custom_mask: each request's q_len x kv_len booleans (True: visible), flattened and joined; it replaces
                causal. It is part of the plan, so plan again if it changes; with use_cuda_graph every run reads
                custom_mask_buf.
            packed_custom_mask: the mask as bits, `segment_packbits(mask, indptr, bitorder="little")`.
            causal: row r of a request sees tokens up to kv_len - q_len + r.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" (the kernel rotates q and K) or "ALIBI", whose bias is 0 at the
                row's own token, unlike FlashInfer's (docs/coming-from/flashinfer.md).
            sm_scale: multiplies the scores; None: head_dim_qk ** -0.5.
            window_left: tokens visible left of the row's own; -1: all.
            logits_soft_cap: scores become cap * tanh(score / cap); None or 0: no cap.
            rope_scale, rope_theta: for ROPE_LLAMA; None: 1 and 1e4.
            q_data_type, kv_data_type, o_data_type: types of q ("float16"), of the cache (q's; torch.uint8: nvfp4) and
                of the output (q's, or "bfloat16" if that is fp8).
            non_blocking: whether copies of page numbers and masks may be asynchronous.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len: multi-item scoring: [batch] tokens of the
                shared prefix; each later token's position in its item (0 at a delimiter), joined with a common length a
                request.
            max_item_len_ptr: [batch], at least the longest position of each request.
            seq_lens: [batch], tokens of each request; wins over `paged_kv_last_page_len`.
            block_tables: [batch, pages], a row of page numbers for each request: in place of `paged_kv_indices` if that
                is None, otherwise checked against it (on the device only with FLASHPAGE_CHECK_INDICES=on).
            max_token_per_sequence, max_sequence_kv: bounds, against which the batch is checked.
            fixed_split_size: pages; every request is cut at multiples of this size, so that results do not depend on
            the rest of the batch. None or -1: balanced.
            disable_split_kv: no request is cut.
            own: options that FlashInfer does not have (plan_arguments.Own): `variant`, a flashpage.Variant; `chunk`, a
                number of tokens: positions are cut at its multiples, and a row sees only tokens of its own chunk
                (Llama 4); `kv_format`, how K and V are stored (docs/guides/kv-formats.md).
        """
        if seq_lens_q is not None:
            checks.refuse_given(seq_lens_q=seq_lens_q)
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
            "paged",
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
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
        lengths = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)
        pages = (paged_kv_indices, block_tables, non_blocking, None)
        self._plan(arguments, lengths, pages, mask, (max_token_per_sequence, max_sequence_kv))

    begin_forward = plan

    def workspace_size(self, *lengths_and_heads: Any, **options: Any) -> tuple[int, int]:
        """Bytes of the float and of the int workspace that suffice for this batch and every smaller one; plan's
        arguments."""
        bound = _PLAN.bind(self, *lengths_and_heads, **options)
        bound.apply_defaults()
        given = bound.arguments | {"kv_source": "paged"}
        given["has_mask"] = given["custom_mask"] is not None or given["packed_custom_mask"] is not None
        arguments = PrefillArguments(*(given[name] for name in PrefillArguments._fields))
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "seq_lens")
        return self._attention.workspace_size(Lengths(*(given[name] for name in names)), arguments.checked()[0])

    def plan_on_device(
        self,
        qo_indptr: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        max_rows: int | None = None,
        table_rows: torch.Tensor | None = None,
        num_requests: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        """Plans by one small kernel on the current stream: nothing is copied, the host neither waits nor knows the
        lengths. Captured in a graph before the runs, it plans again at every replay, from the tensors' contents at that
        time; call it once before the capture. The plan equals that of `plan` for the same lengths, except that a mixed
        batch has one plan and not two.

        Args:
            qo_indptr: [batch + 1] int32 on the device, where each request's rows begin in q.
            seq_lens: [batch] int32 or int64 on the device, tokens of each request, with the appended ones.
            block_tables: [batch, pages] int32 on the device, read in place: page numbers of each request, as many as
                its tokens need; later entries are not read.
            max_rows: rows of q in the runs; rows of no request are not written. None: the constructor's.
            table_rows: [batch] int32 or int64 on the device, the row of `block_tables` of each request (a pool's table
            of all requests is read in place); None: 0, 1, 2, ...
            num_requests: [1] int32 on the device: how many of the batch's requests exist; the others are not planned
            and none of their rows is written. None: all.
            options: the options of `plan`, by keyword.

        On a card lengths must lie within 0 and the capacity of a row of `block_tables`, rows within 0 and `max_rows`,
        and page numbers within the cache. The CPU checks them, and with FLASHPAGE_CHECK_INDICES=on a card's are checked
        outside of captures.
        """
        if max_rows is None:
            if self._planner.capacity is None:
                raise PlanError("max_rows=None: pass the rows of q, as qo_indptr is on the device.")
            max_rows = self._planner.capacity.rows
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        arguments = PrefillArguments("paged", *heads, **options_of_device(options))
        if differ(arguments, self._arguments):
            self._check(arguments)
        self._now = self._planned
        tables = TableLengths(
            self.device,
            seq_lens,
            block_tables,
            q_indptr=checks.tensor(qo_indptr, "qo_indptr", PlanError),
            table_rows=table_rows,
            num_requests=num_requests,
            max_rows=checks.whole("max_rows", max_rows, 0),
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
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        lse_mode: str = BASE_2,
        o_scale: Any = None,
    ) -> Any:
        """Attention of the planned batch.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk], any strides, last dimension contiguous.
            paged_kv_cache: [pages, 2, page_size, num_kv_heads, head_dim] (HND: heads before tokens), or (K, V)
                without the 2; without the page_size dimension: pages of one token.
            q_scale, k_scale, v_scale: numbers, or fp32 tensors of one entry, one for each head, [batch, heads] or
                [batch, 1].
            o_scale: divides outputs of float8_e4m3fn: a number, or an fp32 tensor of one entry.
            kv_cache_sf: the scales of K and V in nvfp4 or in a kv_format, a pair or a tensor [pages, 2, ...]: of nvfp4
                float8_e4m3fn with head_dim / 16 columns; of others fp32, without that dimension.
            out: [qo_indptr[-1], num_qo_heads, head_dim_vo], written in place; None: allocated.
            lse: [qo_indptr[-1], num_qo_heads] fp32, base 2, written in place. A row that sees no token has
                out = 0 and lse = -inf, or sink * log2(e) with sinks.
            return_lse: also return lse.
            enable_pdl: programmatic dependent launch; None: if the card has it.
            window_left: replaces the planned one for this run.
            sinks: [num_qo_heads] fp32, natural-log units, which join the denominator, and so the lse.
            lse_base: FlashInfer's name for `lse_mode`: "log2" or "ln".
            lse_layout: "NH" ([rows, heads]).
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).
        """
        if args:
            raise RunError(checks.extra_positions(args))
        is_usual = kv_cache_sf is skip_softmax_threshold_scale_factor is use_fp16_softmax is uses_spcompress is None
        if not (is_usual and lse_base == "log2" and lse_layout == "NH"):
            checks.refuse_run_options(
                *(skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress, lse_layout)
            )
            paged_kv_cache = kv_view.with_scales(paged_kv_cache, kv_cache_sf)
            lse_mode = mode_of(lse_base, lse_mode)
        values = self._now if window_left is None else self._values(window_left)
        is_unscaled = q_scale is k_scale is v_scale is o_scale is None  # scales_of would be a frame more
        scales = NO_SCALES if is_unscaled else scales_of(q_scale, k_scale, v_scale, o_scale)
        if lse_mode is not BASE_2:
            return self._attention.run_of(lse_mode)(
                q, paged_kv_cache, out, lse, return_lse, values, scales, sinks, enable_pdl
            )
        return self._attention.run(q, paged_kv_cache, out, lse, return_lse, values, scales, sinks, enable_pdl)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str | None = None,
        use_fp16_qk_reduction: bool = False,
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
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return self.run(q, paged_kv_cache, **scales, return_lse=return_lse, lse_mode=lse_mode)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


_PLAN = inspect.signature(BatchPrefillWithPagedKVCacheWrapper.plan)
