"""Sparse attention over latent rows (DSA): each row of q lists the tokens that it reads."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..base import checks, tensor_memory
from ..base.errors import FlashpageError, PlanError, RunError
from ..kernels.options import Options, RunOptions
from ..plan.device_lengths import TableLengths
from ..plan.lengths import Lengths, Names
from ..plan.page_indices import NO_PAGES
from ..run.binding import Binding
from ..run.checks import Scales, Tensors
from .latent_attention import LatentAttention
from .latent_run import CACHES, QUERIES, latent_cache_of, one_form, scales_of, use_run_names
from .lse_mode import BASE_2, in_base_e, is_natural
from .operators import is_traced
from .operators import run as run_as_operator
from .plan_arguments import LatentArguments, differ

# The rows of q are the requests of the planner.
SELECTED = Names("rows", "indices", "topk_length", "topk_length")


class SelectedAttention(LatentAttention):
    """An Attention whose runs read lists of tokens: call run_indices, as `run` reads the lists of the run before."""

    lens: torch.Tensor | None = None  # entries of each list that are used, to check them; None: not checked

    def run_indices(
        self,
        tensors: Tensors,
        indices: torch.Tensor,
        return_lse: bool,
        scales: Scales,
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
    ) -> Any:
        """A run over these lists; the other arguments are those of Attention.run."""
        q, cache, out, lse = tensors
        if is_traced():
            read = Tensors(*self._for_kernels(q, cache), out, lse)
            return run_as_operator(self, self.values, read, return_lse, scales, sinks, enable_pdl, indices)
        if self.lens is not None and indices.is_cpu:
            pages = latent_cache_of(self.options, cache)
            num_pages = len(pages[0] if isinstance(pages, tuple) else pages)
            check_slots(indices, self.lens, num_pages * self.options.page_size)
        self._local.indices = indices
        if self._local.bound is not None:
            self._point(self._local.bound)
        return self.run(q, cache, out, lse, return_lse, None, scales, sinks, enable_pdl)

    def _bind(self, signature: Any, values: RunOptions, tensors: Tensors) -> Binding:
        bound = super()._bind(signature, values, tensors)
        self._point(bound)
        return bound

    def _point(self, bound: Binding) -> None:
        for part in bound.parts:
            part.params.kv_indices = tensor_memory.address(self._local.indices, "indices", RunError)


class BatchMLASparseAttentionWrapper:
    """Sparse attention over latent rows (DeepSeek V3.2 and V4, GLM-5): decode and prefill are the same, as each row of
    q has a list of tokens, which an indexer has chosen. `plan` once a step, `run` once a layer.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs.
        use_cuda_graph: runs may be captured, and replayed after later plans of lists of the same shape: `plan` copies
            its lists to memory of the wrapper. Lists that runs are given are read in place.
        num_rows: with `use_cuda_graph`: rows of q in every batch.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False, num_rows: int | None = None
    ) -> None:
        self._held: torch.Tensor | None = None  # in graph mode: the lists that captured runs read
        is_graph = checks.flag("use_cuda_graph", use_cuda_graph)
        self._attention = SelectedAttention(
            float_workspace_buffer, is_graph=is_graph, names=SELECTED, owner=type(self).__name__
        )
        if is_graph:
            if num_rows is None:
                raise PlanError("use_cuda_graph=True needs num_rows: pass the rows of q in every batch.")
            self._attention.session.batch.fix_requests(checks.whole("num_rows", num_rows, 1))
        elif num_rows is not None:
            raise PlanError(f"num_rows={num_rows} without use_cuda_graph: plan has the number, leave it None.")
        self.device = self._attention.device
        self._arguments: LatentArguments | None = None
        self._options: Options
        self._values: RunOptions
        self._indices: torch.Tensor

    def plan(
        self,
        indices: torch.Tensor,
        topk_length: torch.Tensor | None = None,
        *,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        sm_scale: float,
        q_data_type: Any,
        kv_data_type: Any = None,
        kv_row_format: str | None = None,
        output_dtype: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plans a batch. The numbers in `indices` are read by runs alone.

        Args:
            indices: int32 [rows, topk] or [batch, rows, topk], contiguous, on the device: page * page_size + token of
                the page; -1: none. Runs read this tensor, with `use_cuda_graph` a copy of it, or another one of its
                shape. A card's lists are never checked: a token beyond the cache is an illegal address.
            topk_length: [rows], entries of each list that are used; None: all. If it is on a card, the plan is made
                there, and the host reads no numbers.
            num_heads: query heads, any number.
            head_dim_ckv, head_dim_kpe: columns that K and V share, and those that only K has (0: none).
            page_size: tokens a page of the cache.
            sm_scale: multiplies the scores; the model's, which no shape here tells.
            q_data_type, kv_data_type, output_dtype: types of q (None: float16), of the latent rows and of the output
                (None: q's).
            kv_row_format: as in BatchMLAPagedAttentionWrapper.plan.
            fixed_split_size: entries; every list is cut at multiples of it. None: balanced.
            disable_split_kv: no list is cut.
        """
        arguments = LatentArguments(
            num_heads=num_heads,
            head_dim_ckv=head_dim_ckv,
            head_dim_kpe=head_dim_kpe,
            page_size=page_size,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            kv_row_format=kv_row_format,
            o_data_type=None if output_dtype is None else checks.dtype("output_dtype", output_dtype),
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            is_selected=True,
        )
        lists = _lists(indices, "indices", self.device, PlanError)
        if self._held is not None and lists.shape != self._held.shape:
            raise PlanError(
                f"indices has shape {tuple(lists.shape)} but captured runs read {tuple(self._held.shape)}: pad the "
                "lists with -1, or use a wrapper for each shape."
            )
        if topk_length is not None:
            checks.tensor(topk_length, "topk_length", PlanError)
            if topk_length.is_cpu:
                _check_lengths(topk_length, *lists.shape)
        if differ(arguments, self._arguments):
            self._arguments = None
            self._attention.session.invalidate()
            self._options, self._values = arguments.checked()
            self._arguments = arguments
        lens = self._plan(lists, topk_length)
        # After a refused plan, the runs of the last one keep their lists.
        self._indices = self._kept(lists) if self._attention.is_graph else lists
        self._attention.lens = lens

    def _kept(self, lists: torch.Tensor) -> torch.Tensor:
        """The lists, where captured runs read them."""
        if self._held is None:
            self._held = lists.clone()
        else:
            self._held.copy_(lists)
        return self._held

    def _plan(self, lists: torch.Tensor, topk_length: torch.Tensor | None) -> torch.Tensor | None:
        """Plans, and returns the lengths if the host has them."""
        if topk_length is not None and not topk_length.is_cpu:
            self._plan_on_device(lists, topk_length)
            return None
        rows, topk = lists.shape
        starts = torch.arange(rows + 1, device="cpu", dtype=torch.int64) * topk
        if topk_length is None:
            lens = torch.full((rows,), topk, dtype=torch.int32, device="cpu")
        else:
            lens = topk_length.clone()
        self._attention.plan(Lengths(None, starts, None, lens), NO_PAGES, self._options, self._values)
        return lens

    def _plan_on_device(self, lists: torch.Tensor, topk_length: torch.Tensor) -> None:
        """Plans where the lengths are; the lists' rows are those of a table."""
        tables = TableLengths(
            self.device,
            topk_length,
            lists,
            q_indptr=None,
            table_rows=None,
            num_requests=None,
            max_rows=len(lists),
            options=self._options,
        )
        self._attention.plan_on_device(tables, self._options, self._values)

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        *,
        query: Any = None,
        kv_cache: Any = None,
        indices: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        ckv_scale: Any = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: Any = None,
        enable_pdl: bool | None = None,
        lse_mode: str = BASE_2,
    ) -> Any:
        """Attention of the planned rows; the other arguments are those of BatchMLAPagedAttentionWrapper.run.

        Args:
            kv_cache: [pages, page_size, head_dim_ckv + head_dim_kpe], or a pair of caches; with kv_row_format bytes,
                [pages, page_size, 656 or 584].
            indices: lists of the planned shape, such as this layer's; None: plan's.
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).
        """
        natural = is_natural(lse_mode)
        self._attention.require_plan("run")
        lists = self._indices if indices is None else _lists(indices, "indices", self.device, RunError)
        if lists.shape != self._indices.shape:
            raise RunError(
                f"indices has shape {tuple(lists.shape)} but the plan is for {tuple(self._indices.shape)}: plan again."
            )
        scales = scales_of(self._options, ckv_scale, ckv_scale_arr, kpe_scale)
        q = one_form("query", query, QUERIES, q_nope, q_pe)
        cache = one_form("kv_cache", kv_cache, CACHES, ckv_cache, kpe_cache)
        try:
            tensors = Tensors(q, cache, out, lse)
            result = self._attention.run_indices(tensors, lists, return_lse, scales, sinks, enable_pdl)
        except FlashpageError as error:
            use_run_names(error, query, kv_cache)
            raise
        return in_base_e(result, lse) if natural else result

    run_return_lse = functools.partialmethod(run, return_lse=True)

    @property
    def last_plan(self) -> Any:
        """The Plan of the last run, or a newer one: work_items(), explain(), to_svg(path)."""
        return self._attention.last_plan


def _lists(indices: Any, name: str, device: torch.device, error: Any) -> torch.Tensor:
    """Lists of tokens as [rows, topk]."""
    checks.same_device(checks.tensor(indices, name, error), device, name, error)
    if indices.dim() not in (2, 3) or indices.dtype != torch.int32 or not indices.is_contiguous():
        raise error(
            f"{name} has shape {tuple(indices.shape)} and dtype {indices.dtype}: "
            "pass contiguous int32 [rows, topk] or [batch, rows, topk]."
        )
    if not is_traced():
        tensor_memory.address(indices, name, error)
    return indices.flatten(0, -2)


def _check_lengths(lens: torch.Tensor, rows: int, topk: int) -> None:
    tensor_memory.address(lens, "topk_length", PlanError)
    if lens.shape != (rows,) or lens.dtype not in (torch.int32, torch.int64):
        raise PlanError(
            f"topk_length has shape {tuple(lens.shape)} and dtype {lens.dtype}: "
            f"pass int32 or int64, one entry a row ({rows})."
        )
    check_entries(lens, topk, "topk_length", PlanError)


def check_entries(lens: torch.Tensor, topk: int, name: str, error: type[FlashpageError]) -> None:
    """On the CPU alone: lists are no longer than their memory."""
    wrong = (lens > topk) | (lens < 0)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise error(f"{name}[{i}]={int(lens[i])} but each list has {topk} entries: pass 0 to {topk}.")


def check_slots(lists: torch.Tensor, lens: torch.Tensor, slots: int) -> None:
    """On the CPU alone, as numbers on a card would have to be waited for."""
    tensor_memory.address(lists, "indices", RunError)  # may have been shrunk after the plan
    used = lists.masked_fill(torch.arange(lists.shape[1], device="cpu") >= lens[:, None], -1)
    least, most = (int(used.min()), int(used.max())) if used.numel() else (-1, -1)
    if most >= slots or least < -1:
        found = most if most >= slots else least
        raise RunError(f"indices has {found} but the cache has {slots} tokens: pass page * page_size + token, or -1.")
