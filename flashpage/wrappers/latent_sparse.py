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
from .two_lists import SecondLists, second_of

# The rows of q are the requests of the planner.
SELECTED = Names("rows", "indices", "topk_length", "topk_length")


class SelectedAttention(LatentAttention):
    """An Attention whose runs read lists of tokens: call run_indices, as `run` reads the lists of the run before."""

    lens: torch.Tensor | None = None  # entries of each list that are used, to check them; None: not checked
    extra_lens: torch.Tensor | None = None  # of each list of a second cache

    def run_indices(
        self,
        tensors: Tensors,
        indices: torch.Tensor,
        return_lse: bool,
        scales: Scales,
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
        second: SecondLists | None = None,
    ) -> Any:
        """A run over these lists; the other arguments are those of Attention.run."""
        q, cache, out, lse = tensors
        if is_traced():
            if second is not None:
                raise RunError("runs over two caches cannot be traced: call them outside of torch.compile.")
            read = Tensors(*self._for_kernels(q, cache), out, lse)
            return run_as_operator(self, self.values, read, return_lse, scales, sinks, enable_pdl, indices)
        if self.lens is not None and indices.is_cpu:
            pages = latent_cache_of(self.options, cache)
            num_pages = len(pages[0] if isinstance(pages, tuple) else pages)
            check_slots(indices, self.lens, num_pages * self.options.page_size)
        if second is not None and self.extra_lens is not None and second.indices.is_cpu:
            check_slots(second.indices, self.extra_lens, second.slots(), "extra_indices")
        self._local.indices, self._local.second = indices, second
        if self._local.bound is not None:
            self._point(self._local.bound)
        return self.run(q, cache, out, lse, return_lse, None, scales, sinks, enable_pdl)

    def _bind(self, signature: Any, values: RunOptions, tensors: Tensors) -> Binding:
        bound = super()._bind(signature, values, tensors)
        self._point(bound)
        return bound

    def _point(self, bound: Binding) -> None:
        second = self._local.second
        for part in bound.parts:
            part.params.kv_indices = tensor_memory.address(self._local.indices, "indices", RunError)
            part.params.num_kv_indices = self._local.indices.numel()  # a plan counts the entries of both lists
            if second is not None:
                second.read_from(part.params, self.options, self._local.indices.shape[1])


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
        self._held: dict[str, torch.Tensor] = {}  # in graph mode: the lists and lengths that captured runs read
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
        self._extra: torch.Tensor | None = None  # the lists of a second cache
        self._first_lengths: torch.Tensor | None = None  # of the first lists, if there are second ones

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
        extra_indices: torch.Tensor | None = None,
        extra_topk_length: torch.Tensor | None = None,
    ) -> None:
        """Plans a batch. The numbers in `indices` are read by runs alone.

        Args:
            indices: int32 [rows, topk] or [batch, rows, topk], contiguous, on the device: page * page_size + token of
                the page; -1: none. Runs read this tensor, with `use_cuda_graph` a copy of it, or another one of its
                shape. A card's lists are never checked: a token beyond the cache is an illegal address.
            topk_length: [rows], entries of each list that are used; None: all. If it is on a card, the plan is made
                there, and the host reads no numbers. With `extra_indices` extra_topk_length says where the plan is
                made, and runs read topk_length: int32 on a card is read in place, with `use_cuda_graph` in a copy.
            num_heads: query heads, any number.
            head_dim_ckv, head_dim_kpe: columns that K and V share, and those that only K has (0: none).
            page_size: tokens a page of the cache.
            sm_scale: multiplies the scores; the model's, which no shape here tells.
            q_data_type, kv_data_type, output_dtype: types of q (None: float16), of the latent rows and of the output
                (None: q's).
            kv_row_format: as in BatchMLAPagedAttentionWrapper.plan.
            fixed_split_size: entries; every list is cut at multiples of it. None: balanced.
            disable_split_kv: no list is cut.
            extra_indices, extra_topk_length: lists of a second cache, whose tokens join the softmax: with
                kv_row_format="deepseek_v4" alone. Its pages have any size.
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
            has_two_caches=extra_indices is not None,
        )
        lists = self._checked_lists(indices, "indices", topk_length, "topk_length")
        extra = first = None
        if extra_indices is not None:
            extra = self._checked_lists(extra_indices, "extra_indices", extra_topk_length, "extra_topk_length")
            if len(extra) != len(lists):
                raise PlanError(f"extra_indices has {len(extra)} rows but indices {len(lists)}: pass equally many.")
            first = self._first_lengths_of(lists, topk_length)
        elif extra_topk_length is not None:
            raise PlanError(
                f"extra_topk_length={checks.shown(extra_topk_length)} without extra_indices: pass the lists of the "
                "second cache as extra_indices, or leave it None."
            )
        if differ(arguments, self._arguments):
            self._arguments = None
            self._attention.session.invalidate()
            self._options, self._values = arguments.checked()
            self._arguments = arguments
        attention = self._attention
        if extra is None:
            attention.lens, attention.extra_lens = self._plan(lists, topk_length, 0, lists.shape[1]), None
        else:
            attention.extra_lens = self._plan(lists, extra_topk_length, lists.shape[1], extra.shape[1])
            attention.lens = _lens_of(topk_length, *lists.shape)
        # After a refused plan, the runs of the last one keep their lists.
        self._indices = self._kept(lists, "indices")
        self._extra = None if extra is None else self._kept(extra, "extra_indices")
        self._first_lengths = None if first is None else self._kept(first, "topk_length")

    def _checked_lists(self, indices: Any, name: str, lengths: Any, lengths_name: str) -> torch.Tensor:
        """Checks lists and their lengths; returns the lists as [rows, topk]."""
        lists = _lists(indices, name, self.device, PlanError)
        held = self._held.get(name)
        if held is not None and lists.shape != held.shape:
            raise PlanError(
                f"{name} has shape {tuple(lists.shape)} but captured runs read {tuple(held.shape)}: pad the lists with "
                "-1, or use a wrapper for each shape."
            )
        if lengths is not None and checks.tensor(lengths, lengths_name, PlanError).is_cpu:
            rows, topk = lists.shape
            _check_lengths(lengths, rows, lengths_name)
            check_entries(lengths, topk, lengths_name, PlanError)
        return lists

    def _first_lengths_of(self, lists: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor | None:
        """The lengths of the first of two lists, as runs read them: contiguous, and apart from a host's tensor, which
        may change. Captured runs always read some, as later plans may have them."""
        rows, topk = lists.shape
        if lengths is None:
            is_graph = self._attention.is_graph
            return torch.full((rows,), topk, dtype=torch.int32, device=self.device) if is_graph else None
        if lengths.is_cpu:
            return lengths.to(self.device, torch.int32, copy=True).contiguous()
        checks.same_device(lengths, self.device, "topk_length", PlanError)
        _check_lengths(lengths, rows, "topk_length")
        return lengths.to(torch.int32).contiguous()

    def _kept(self, given: torch.Tensor, name: str) -> torch.Tensor:
        """Lists or lengths, where captured runs read them."""
        if not self._attention.is_graph:
            return given
        if name not in self._held:
            with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
                self._held[name] = given.clone()
        return self._held[name].copy_(given)

    def _plan(self, lists: torch.Tensor, lengths: torch.Tensor | None, before: int, topk: int) -> torch.Tensor | None:
        """Plans rows whose tokens are the first `lengths` of `topk` entries (None: all). With two lists these are
        entries of the second one, and each row also has the `before` entries of the first one. Returns the lengths if
        the host has them."""
        if lengths is not None and not lengths.is_cpu:
            self._plan_on_device(lists, lengths + before if before else lengths, before + topk)
            return None
        lens = _lens_of(lengths, len(lists), topk)
        assert lens is not None
        starts = torch.arange(len(lists) + 1, device="cpu", dtype=torch.int64) * (before + topk)
        of_plan = lens + before if before else lens
        self._attention.plan(Lengths(None, starts, None, of_plan), NO_PAGES, self._options, self._values)
        return lens

    def _plan_on_device(self, lists: torch.Tensor, topk_length: torch.Tensor, entries: int) -> None:
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
            list_entries=entries,
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
        extra_kv_cache: torch.Tensor | None = None,
        extra_indices: torch.Tensor | None = None,
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
            extra_kv_cache, extra_indices: the second cache of a plan with extra_indices, and lists in place of plan's.
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).
        """
        natural = is_natural(lse_mode)
        self._attention.require_plan("run")
        lists, second = self._run_lists(indices, self._indices, "indices"), None
        if self._extra is not None:
            others = self._run_lists(extra_indices, self._extra, "extra_indices")
            second = second_of(self._options, extra_kv_cache, others, self._first_lengths, self.device)
        elif extra_kv_cache is not None or extra_indices is not None:
            raise RunError("extra_kv_cache and extra_indices without such a plan: pass extra_indices to plan, too.")
        scales = scales_of(self._options, ckv_scale, ckv_scale_arr, kpe_scale)
        q = one_form("query", query, QUERIES, q_nope, q_pe)
        cache = one_form("kv_cache", kv_cache, CACHES, ckv_cache, kpe_cache)
        try:
            tensors = Tensors(q, cache, out, lse)
            result = self._attention.run_indices(tensors, lists, return_lse, scales, sinks, enable_pdl, second)
        except FlashpageError as error:
            use_run_names(error, query, kv_cache)
            raise
        return in_base_e(result, lse) if natural else result

    def _run_lists(self, given: Any, planned: torch.Tensor, name: str) -> torch.Tensor:
        if given is None:
            return planned
        lists = _lists(given, name, self.device, RunError)
        if lists.shape != planned.shape:
            raise RunError(
                f"{name} has shape {tuple(lists.shape)} but the plan is for {tuple(planned.shape)}: plan again."
            )
        return lists

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


def _lens_of(lengths: torch.Tensor | None, rows: int, topk: int) -> torch.Tensor | None:
    """A copy of lengths that the host has, which are `topk` if None is given; None: a card has them."""
    if lengths is None:
        return torch.full((rows,), topk, dtype=torch.int32, device="cpu")
    return lengths.clone() if lengths.is_cpu else None


def _check_lengths(lens: torch.Tensor, rows: int, name: str) -> None:
    tensor_memory.address(lens, name, PlanError)
    if lens.shape != (rows,) or lens.dtype not in (torch.int32, torch.int64):
        raise PlanError(
            f"{name} has shape {tuple(lens.shape)} and dtype {lens.dtype}: "
            f"pass int32 or int64, one entry a row ({rows})."
        )


def check_entries(lens: torch.Tensor, topk: int, name: str, error: type[FlashpageError]) -> None:
    """On the CPU alone: lists are no longer than their memory."""
    wrong = (lens > topk) | (lens < 0)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise error(f"{name}[{i}]={int(lens[i])} but each list has {topk} entries: pass 0 to {topk}.")


def check_slots(lists: torch.Tensor, lens: torch.Tensor, slots: int, name: str = "indices") -> None:
    """On the CPU alone, as numbers on a card would have to be waited for."""
    tensor_memory.address(lists, name, RunError)  # may have been shrunk after the plan
    used = lists.masked_fill(torch.arange(lists.shape[1], device="cpu") >= lens[:, None], -1)
    least, most = (int(used.min()), int(used.max())) if used.numel() else (-1, -1)
    if most >= slots or least < -1:
        found = most if most >= slots else least
        raise RunError(f"{name} has {found} but the cache has {slots} tokens: pass page * page_size + token, or -1.")
