"""Context parallel attention: each rank attends to its own pages, and the ranks' states are merged."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import torch

from ..base import checks
from ..base.errors import CapabilityError, PlanError, RunError
from ..base.unique import Unique
from ..kernels.options import check_head_dim, check_window
from ..plan.lengths import Lengths, Names, all_to_host, batch_of
from ..plan.page_indices import Pages
from ..run.checks import NO_SCALES, check_output
from ..variants.row_mask import WITHIN, RowMask
from ..wrappers.base import Attention
from ..wrappers.lse_mode import BASE_2, in_base_e, is_natural
from ..wrappers.plan_arguments import Checked, PrefillArguments
from .layout import ContextLayout, LocalPages, check_lists
from .mask import Visible
from .merge import StateGroup

_NAMES = Names("qo_indptr", "kv_indptr", "seq_lens", "seq_lens", "kv_indices")
_PAGES = ("all", "own")
_REFUSED = {
    "pos_encoding_mode": "a rank does not know where in a request its tokens stand: rotate q and K before",
    "custom_mask": "its columns are a whole request's tokens: run it on one rank, or use causal and window_left",
    "packed_custom_mask": "its bits are a whole request's tokens: run it on one rank, or use causal and window_left",
    "kv_format": "spread caches have element types: pass kv_data_type",
    "variant": "its kv_idx would count a rank's own tokens: run it on one rank, or use causal and window_left",
}


class ContextParallelAttention(Unique):
    """Decode, append and short prefill over a paged KV cache that is spread over the ranks of a process group.

    Every rank calls `plan` once a step and `run` once a layer, for the same batch. All ranks have all queries (of their
    own heads, under tensor parallelism) and their share of each request's tokens. Results equal those of one device up
    to one more rounding of each rank's output, and are bitwise equal on all ranks. `causal` and `window_left` count
    positions in the whole request.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs (128 MiB is plenty);
            a CPU tensor selects the CPU backend.
        kv_layout: "NHD": [pages, page_size, heads, dim]; "HND": [pages, heads, page_size, dim].
        group: a torch.distributed process group (NCCL for CUDA, gloo for the CPU); None: the default one.
        order, interleave: where tokens lie, as in ContextLayout.
        pages: what the lists of `plan` name. "all": every page of a request, by its number on the rank that holds it.
            "own": only this rank's pages.
        heads: "all": every rank gets the output of all heads. "own": each rank gets its share, the rank-th run of
            neighbouring heads, [rows, num_qo_heads / world_size, head_dim], which moves fewer bytes.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        group: Any = None,
        *,
        order: str = "interleaved",
        interleave: int = 0,
        pages: str = "all",
        heads: str = "all",
    ) -> None:
        if pages not in _PAGES:
            raise PlanError(f"pages={pages!r} is unknown: pass 'all' or 'own'.")
        self._states = StateGroup(group, heads)
        self._layout = ContextLayout(self._states.rank, self._states.world_size, 1, order, interleave)
        self._has_all_pages = pages == "all"
        self._attention = Attention(float_workspace_buffer, kv_layout, names=_NAMES)
        self._checked = Checked()
        self._mask = RowMask(WITHIN, self._attention.device)
        self._is_planned = False

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._states.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._states.world_size

    @property
    def last_plan(self) -> Any:
        """The Plan of this rank's share of the batch."""
        return self._attention.last_plan

    def layout(self, page_size: int) -> ContextLayout:
        """Which tokens lie on this rank, and where: use it to append new tokens."""
        return dataclasses.replace(self._layout, page_size=page_size)

    def plan(
        self,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        qo_indptr: torch.Tensor | None = None,
        causal: bool = False,
        window_left: int = -1,
        head_dim_vo: int | None = None,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        pos_encoding_mode: str = "NONE",
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        variant: Any = None,
        kv_format: Any = None,
    ) -> None:
        """Plans a batch. Index tensors: int32 or int64, on the host (nothing waits) or on the device (one copy back).

        Args:
            kv_indptr: [batch + 1], where each request's pages begin in `kv_indices`.
            kv_indices: page numbers in this rank's cache; with pages="all" those of other ranks' pages are skipped.
            seq_lens: [batch], tokens of the whole requests, on all ranks together.
            num_qo_heads, num_kv_heads, head_dim, page_size: as in q and in this rank's cache.
            qo_indptr: [batch + 1], where each request's rows begin in q; None: one row for each request (decode).
            causal: row r of a request sees its tokens up to seq_len - rows + r.
            window_left: tokens visible left of the row's own; -1: all.

        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan; those after `disable_split_kv`
        are refused.
        """
        self._is_planned = False
        if checks.position_encoding(pos_encoding_mode) != "NONE":
            _refuse("pos_encoding_mode", repr(pos_encoding_mode))
        masks = {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask, "variant": variant}
        for name, value in masks.items():
            if value is not None:
                _refuse(name, f"a {type(value).__name__}")
        if kv_format is not None:
            _refuse("kv_format", checks.shown(kv_format))
        causal = checks.flag("causal", causal)
        layout = self.layout(page_size)
        kv_indptr, seq_lens, q_indptr = _on_host(kv_indptr, seq_lens, qo_indptr)
        checks.tensor(kv_indices, "kv_indices", PlanError)
        if self._has_all_pages:
            local = layout.pages(kv_indptr, kv_indices, seq_lens)
        else:
            check_lists(kv_indptr, kv_indices)
            local = LocalPages(kv_indptr, kv_indices, layout.tokens(seq_lens).int())
        visible = Visible.of(layout, q_indptr, seq_lens, causal, check_window(window_left))
        mask = row_runs = None
        if visible is not None:
            runs = visible.runs(q_indptr)
            mask, row_runs = visible.mask(runs, self._mask), runs.table()
        options, values = self._checked.of(
            PrefillArguments(
                "paged",
                num_qo_heads,
                num_kv_heads,
                check_head_dim("head_dim", head_dim),
                page_size,
                head_dim_vo,
                sm_scale=sm_scale,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=checks.optional_dtype("kv_data_type", kv_data_type),
                o_data_type=o_data_type,
                fixed_split_size=fixed_split_size,
                disable_split_kv=disable_split_kv,
            )
        )
        if options.out_dtype.is_fp8:
            raise CapabilityError(
                f"o_data_type={o_data_type} is not supported: outputs of ranks are merged in 16 or 32 bits. Leave it "
                "None, and quantise the merged output."
            )
        if mask is not None:
            options = dataclasses.replace(options, variant=mask)
        lengths = Lengths(q_indptr, local.indptr, None, local.seq_lens)
        self._attention.plan(lengths, Pages(local.indices, row_runs=row_runs), options, values)
        if mask is not None:
            self._mask.copy()
        self._is_planned = True

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        sinks: torch.Tensor | None = None,
        lse_mode: str = BASE_2,
    ) -> Any:
        """Attention of the planned batch. A collective: every rank of the group must call it.

        Args:
            q: [rows, num_qo_heads, head_dim], the same on every rank.
            paged_kv_cache: this rank's pages, as BatchPrefillWithPagedKVCacheWrapper.run takes them.
            out: [rows, num_qo_heads, head_dim_vo] (heads="own": num_qo_heads / world_size), dense; None: allocated.
            lse: [rows, num_qo_heads] (heads="own": num_qo_heads / world_size), fp32, base 2, written; None: allocated.
            return_lse: also return lse.
            q_scale, k_scale, v_scale: numbers, or fp32 tensors of one entry or one a head.
            sinks: [num_qo_heads] fp32, natural-log units, given on every rank and counted once.
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).
        """
        if not self._is_planned:
            raise RunError("run: ContextParallelAttention has no plan: call plan(...) first, and again if it failed.")
        return_lse, natural = checks.flag("return_lse", return_lse, RunError), is_natural(lse_mode)
        if checks.tensor(q, "q", RunError).dim() != 3:
            raise RunError(f"q has shape {tuple(q.shape)}: pass [rows, num_qo_heads, head_dim].")
        attention, states = self._attention, self._states
        shape = (q.shape[0], q.shape[1], attention.options.head_dim_vo)
        out_shape = states.out_shape(shape)
        out = _output(out, "out", out_shape, attention.out_dtype, q.device)
        lse = _output(lse, "lse", out_shape[:2], torch.float32, q.device)
        scales = NO_SCALES if q_scale is k_scale is v_scale is None else (q_scale, k_scale, v_scale)

        def write(to: torch.Tensor, lse_to: torch.Tensor) -> None:
            mine = sinks if states.rank == 0 else None
            attention.run(q, paged_kv_cache, to, lse_to, scales=scales, sinks=mine)
            unused = attention.session.first_row  # rows of no request
            to[:unused].zero_()
            lse_to[:unused].fill_(-torch.inf)

        if sinks is not None:  # on every rank, or the others would wait for the one that refuses them
            checks.sinks(sinks, q.shape[1], q.device)
        if states.world_size == 1:
            write(out, lse)
        elif q.shape[0]:
            states.merge(write, shape, out, lse)
        result = (out, lse) if return_lse else out
        return in_base_e(result, lse) if natural else result

    run_return_lse = functools.partialmethod(run, return_lse=True)


def _refuse(name: str, shown: str) -> NoReturn:
    raise CapabilityError(f"{name}={shown} is not supported where a context is spread over ranks: {_REFUSED[name]}.")


def _on_host(
    kv_indptr: torch.Tensor, seq_lens: torch.Tensor, qo_indptr: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Checked kv_indptr, seq_lens and qo_indptr on the host; qo_indptr None means one row for each request."""
    batch = batch_of(kv_indptr, "kv_indptr")
    given = [kv_indptr, checks.tensor(seq_lens, "seq_lens", PlanError), qo_indptr]
    if qo_indptr is None:
        given[2] = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
    elif batch_of(qo_indptr, "qo_indptr") != batch:
        raise PlanError(
            f"qo_indptr has {len(qo_indptr)} entries but kv_indptr has {batch + 1}: pass the same requests."
        )
    if seq_lens.shape != (batch,):
        raise PlanError(
            f"seq_lens has shape {tuple(seq_lens.shape)} but kv_indptr has {batch} requests: pass [{batch}]."
        )
    kv_indptr, seq_lens, qo_indptr = all_to_host(given)  # type: ignore[assignment]
    assert qo_indptr is not None
    for name, tensor, steps in (
        ("seq_lens", seq_lens, seq_lens),
        ("kv_indptr", kv_indptr, kv_indptr.diff()),
        ("qo_indptr", qo_indptr, qo_indptr.diff()),
    ):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise PlanError(f"{name} has dtype {tensor.dtype}: pass int32 or int64.")
        if bool((steps < 0).any()):
            i = int((steps < 0).nonzero()[0]) + (steps is not tensor)
            what = (
                "negative: pass the tokens of each request" if steps is tensor else "smaller than the entry before it"
            )
            raise PlanError(f"{name}[{i}]={int(tensor[i])} is {what}.")
    if batch and int(seq_lens.max()) >= 2**31:
        raise PlanError(f"seq_lens reaches {int(seq_lens.max())}: a request has less than 2**31 tokens.")
    if int(qo_indptr[-1]) >= 2**31:
        raise PlanError(f"qo_indptr ends at {int(qo_indptr[-1])}: plans number rows with 31 bits, so split the batch.")
    return kv_indptr, seq_lens.long(), qo_indptr.long()


def _output(
    given: torch.Tensor | None, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    checks.tensor(given, name, RunError)
    check_output(given, name, shape, dtype, device)
    if not given.is_contiguous():
        raise RunError(f"{name} has strides {tuple(given.stride())}: pass a contiguous tensor.")
    return given
