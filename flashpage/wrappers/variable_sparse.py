"""Block-sparse attention with blocks of any sizes, and a separate matrix for each KV head."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..base import checks, tensor_memory
from ..base.errors import FlashpageError, PlanError, RunError
from ..kernels.options import check_head_dim, check_heads
from ..plan.lengths import Lengths, Names, all_to_host, check_numbers
from ..plan.page_indices import Pages
from .block_sparse import NAMES, SparseWrapper
from .plan_arguments import PrefillArguments


class VariableBlockSparseAttentionWrapper(SparseWrapper):
    """Attention under block masks: block (i, j) of a KV head has block_row_sz[head, i] rows x block_col_sz[head, j]
    tokens.

    Each row block of each KV head is a request over one KV head; its page size divides all column blocks.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs (128 MiB is plenty);
            on the CPU: the CPU backend.
        backend: "auto" ("fa2", "fa3": the same).
    """

    _names = Names("block_row_sz", "block_mask_map", "", "seq_lens", "block_mask_map")
    _sizes = (0, 0, 0, 0, 0)  # query heads, KV heads, rows, tokens, tokens of a page

    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Plans block masks, on the host (nothing waits) or on the device (one copy back).

        Args:
            block_mask_map: [num_kv_heads, row blocks, column blocks] bool, True: visible.
            block_row_sz: [num_kv_heads, row blocks], rows of each row block; all heads have equally many in total.
            block_col_sz: [num_kv_heads, column blocks], tokens of each column block, equally many for all heads.
            causal: right-aligned over the visible blocks of a row block, joined.
            q_scale, k_scale, v_scale: of other kernels, and refused.

        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan.
        """
        self._attention.session.invalidate()
        checks.refuse_all(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        num_q_heads, num_kv_heads = check_heads(num_qo_heads, num_kv_heads)
        mask, rows, columns = _checked(block_mask_map, block_row_sz, block_col_sz, num_kv_heads)
        page = max(1, math.gcd(*columns.flatten().tolist()))
        indptr, indices = _pages(mask, columns // page)
        ones = torch.cat([rows.new_zeros(1), rows.flatten().cumsum(0)])
        arguments = PrefillArguments(
            "paged",
            num_q_heads // num_kv_heads,
            1,
            check_head_dim("head_dim", head_dim),
            page,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=q_data_type,
            kv_data_type=checks.optional_dtype("kv_data_type", kv_data_type),
        )
        pages = Pages(indices, non_blocking=non_blocking)
        self._attention.plan(Lengths(ones, indptr), pages, *self._checked.of(arguments))
        self._values = self._attention.values
        self._sizes = (num_q_heads, num_kv_heads, int(rows[0].sum()), int(columns[0].sum()), page)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        *,
        lse_mode: str = "base2",
    ) -> Any:
        """Attention under the planned masks.

        Args:
            q: [num_qo_heads, rows, head_dim].
            k, v: [num_kv_heads, tokens, head_dim].
            out: [num_qo_heads, rows, head_dim], written in place; None: allocated.
            lse: [num_qo_heads, rows] fp32, base 2, written in place. A row that sees nothing has out = 0, lse = -inf.
            return_lse: also return lse.
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).
        """
        self._attention.require_plan("run")
        return_lse, run = checks.flag("return_lse", return_lse, RunError), self._attention.run_of(lse_mode)
        num_q_heads, num_kv_heads, rows, tokens, page = self._sizes
        for name, tensor, shape in (
            ("q", q, (num_q_heads, rows)),
            ("k", k, (num_kv_heads, tokens)),
            ("v", v, (num_kv_heads, tokens)),
        ):
            if checks.tensor(tensor, name, RunError).dim() != 3 or tensor.shape[:2] != shape:
                raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass [{shape[0]}, {shape[1]}, head_dim].")
        head_dim, device = v.shape[2], self._attention.device
        for name, output, sizes, dtype in (
            ("out", out, (*q.shape[:2], head_dim), self._attention.out_dtype),
            ("lse", lse, tuple(q.shape[:2]), torch.float32),
        ):
            if output is not None:
                checks.same_device(checks.tensor(output, name, RunError), device, name, RunError)
                if output.shape != sizes or output.dtype != dtype:
                    raise RunError(
                        f"{name} has shape {tuple(output.shape)} and dtype {output.dtype}: pass {sizes} of {dtype}."
                    )
                tensor_memory.check_written(output, name, RunError)
        packed = _by_kv_head(q, num_kv_heads)
        pages = tuple(t.reshape(num_kv_heads * tokens // page, page, 1, t.shape[2]) for t in (k, v))
        try:
            found, found_lse = run(packed, pages, return_lse=True, values=self._values, enable_pdl=enable_pdl)
        except FlashpageError as error:
            error.use_names(NAMES)
            raise
        result = _by_query_head(found, num_kv_heads, rows)
        out = result if out is None else out.copy_(result)
        if not return_lse and lse is None:
            return out
        result_lse = _by_query_head(found_lse.unsqueeze(-1), num_kv_heads, rows).squeeze(-1)
        lse = result_lse if lse is None else lse.copy_(result_lse)
        return (out, lse) if return_lse else out

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`run` with options that replace the planned ones, defaults included."""
        self._take_values(
            use_fp16_qk_reduction,
            pos_encoding_mode=pos_encoding_mode,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, k, v)


def _checked(mask: Any, rows: Any, columns: Any, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The checked arrays on the host, int64 (the mask: bool)."""
    if checks.tensor(mask, "block_mask_map", PlanError).dtype not in (torch.bool, torch.uint8):
        raise PlanError(f"block_mask_map has dtype {mask.dtype}: pass bool or uint8.")
    check_numbers(rows, "block_row_sz")
    check_numbers(columns, "block_col_sz")
    if rows.dim() != 2 or columns.dim() != 2 or mask.shape != (num_kv_heads, rows.shape[1], columns.shape[1]):
        raise PlanError(
            f"block_mask_map has shape {tuple(mask.shape)}, block_row_sz {tuple(rows.shape)} and block_col_sz "
            f"{tuple(columns.shape)}. "
            f"Pass [{num_kv_heads}, row blocks, column blocks] and one size for each block."
        )
    host: list[Any] = all_to_host([mask, rows, columns])
    for name, sizes in (("block_row_sz", host[1]), ("block_col_sz", host[2])):
        _check_sizes(name, sizes, num_kv_heads)
    return host[0].bool(), host[1].long(), host[2].long()


def _check_sizes(name: str, sizes: torch.Tensor, num_kv_heads: int) -> None:
    if sizes.shape[0] != num_kv_heads or sizes.dtype not in (torch.int32, torch.int64):
        raise PlanError(
            f"{name} has shape {tuple(sizes.shape)} and dtype {sizes.dtype}: "
            f"pass int32 or int64, one row for each of {num_kv_heads} KV heads."
        )
    sizes = sizes.long()
    if bool((odd := (sizes < 0) | (sizes >= 2**31)).any()):
        head, block = odd.nonzero()[0].tolist()
        raise PlanError(f"{name}[{head}, {block}]={int(sizes[head, block])} is no size: pass 0 to 2**31 - 1.")
    totals = sizes.sum(1)
    if bool((differs := totals != totals[0]).any()):
        head = int(differs.int().argmax())
        raise PlanError(
            f"{name} has sum {int(totals[head])} for KV head {head} but {int(totals[0])} for head 0: "
            "pass sizes of equal sums."
        )
    if int(totals.sum()) >= 2**31:
        raise PlanError(f"{name} has sum {int(totals.sum())} over all KV heads: pass less than 2**31.")


def _pages(mask: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page lists of all row blocks, head after head; `columns`: pages of each column block. A head's pages come after
    those of earlier heads."""
    begins = (columns.flatten().cumsum(0) - columns.flatten()).view_as(columns)
    head, _, column = mask.nonzero(as_tuple=True)
    counts = columns[head, column]
    first = torch.repeat_interleave(begins[head, column] - (counts.cumsum(0) - counts), counts)
    indices = (first + torch.arange(int(counts.sum()), device="cpu")).to(torch.int32)
    lengths = (mask * columns.unsqueeze(1)).sum(2).flatten()
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), indices


def _by_kv_head(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[query heads, rows, dim] -> [KV heads x rows, group, dim]; a view if a KV head has one query head."""
    group = q.shape[0] // num_kv_heads
    return q.unflatten(0, (num_kv_heads, group)).transpose(1, 2).flatten(0, 1)


def _by_query_head(rows: torch.Tensor, num_kv_heads: int, count: int) -> torch.Tensor:
    """The inverse of the function above."""
    return rows.unflatten(0, (num_kv_heads, count)).transpose(1, 2).flatten(0, 1)
