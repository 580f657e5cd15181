"""Block-sparse attention: row blocks are requests, column blocks are pages. variable_sparse.py supports blocks of any
sizes."""

from __future__ import annotations

from typing import Any

import torch

from ..base import checks
from ..base.errors import FlashpageError, PlanError, RunError
from ..base.unique import Unique
from ..kernels.options import RunOptions, check_head_dim, checked_values
from ..plan.lengths import Lengths, Names, all_to_host, batch_of
from ..plan.page_indices import Mask, Pages
from ..run.checks import NO_SCALES
from .base import Attention
from .plan_arguments import Checked, PrefillArguments

# The callers' names for the inner ones.
NAMES = {"paged_kv_cache[0]": "k", "paged_kv_cache[1]": "v", "paged_kv_cache's k": "k", "paged_kv_cache's v": "v"}
NAMES |= {
    "q_scale": "scale_q",
    "k_scale": "scale_k",
    "v_scale": "scale_v",
    "custom_mask": "mask",
    "packed_custom_mask": "packed_mask",
}


class SparseWrapper(Unique):
    """The base of the wrappers for sparse matrices."""

    _names: Names

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        checks.backend(backend)
        self._attention = Attention(float_workspace_buffer, "NHD", names=self._names, owner=type(self).__name__)
        self._checked = Checked()
        self._values: RunOptions

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Takes other workspaces; call plan again before the next run."""
        self._attention.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def _take_values(self, use_fp16_qk_reduction: bool, **changed: Any) -> None:
        """Sets the options of this run and later ones, as FlashInfer's `forward` does."""
        checks.refuse_given(use_fp16_qk_reduction=use_fp16_qk_reduction)
        self._attention.require_plan("forward")
        self._values = checked_values(self._values, window_left=-1, **changed)


class BlockSparseAttentionWrapper(SparseWrapper):
    """Attention under a block-sparse matrix (BSR): blocks of R rows x C tokens.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs (128 MiB is plenty);
            on the CPU: the CPU backend.
        backend: "auto" ("fa2", "fa3": the same).
    """

    _names = Names("qo_indptr", "indptr", "", "seq_lens", "indices")

    def plan(
        self,
        indptr: torch.Tensor | None,
        indices: torch.Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
        kv_block_lens: torch.Tensor | None = None,
        q2k_indices: torch.Tensor | None = None,
        q2k_num: torch.Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Plans a matrix. Index tensors: int32 or int64, on the host (nothing waits) or on the device (one copy back).

        Args:
            indptr: [row blocks + 1], where each row block's entries begin in `indices`.
            indices: the column of each block that is not empty.
            M, N: rows and tokens; the last row block may have fewer than R rows, N is a multiple of C.
            R, C: rows and tokens of a block.
            mask: [blocks, R, C] bool, what is visible within each block; replaces causal.
            packed_mask: the mask as bits: for each row block its rows over its blocks' tokens, flattened, as
                `segment_packbits(..., bitorder="little")` packs them.
            causal: right-aligned over the visible blocks of a row block, joined.
            o_data_type: the output's type; None: q's, or bfloat16 if that is fp8 (FlashInfer: "float16", whatever q's).

        Those after `non_blocking` belong to other kernels and are refused. The other arguments are those of
        BatchPrefillWithPagedKVCacheWrapper.plan.
        """
        self._attention.session.invalidate()
        checks.refuse_given(
            block_mask=block_mask,
            kv_block_lens=kv_block_lens,
            q2k_indices=q2k_indices,
            q2k_num=q2k_num,
            kv_splits=kv_splits,
            use_clc=use_clc,
        )
        checks.refuse_all(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        M, N = checks.whole("M", M, 0), checks.whole("N", N, 0)
        R, C = checks.whole("R", R, 1), checks.whole("C", C, 1)
        rows = batch_of(indptr, "indptr")
        checks.tensor(indices, "indices", PlanError)
        if mask is not None and packed_mask is not None:
            raise PlanError("mask and packed_mask each say what is visible within the blocks: pass one of them.")
        if N % C:
            raise PlanError(f"N={N} is not a multiple of C={C}: pad the tokens to whole blocks.")
        if rows != -(-M // R):
            raise PlanError(f"indptr has {rows} row blocks but M={M} rows are {-(-M // R)} blocks of R={R}.")
        qo_indptr = (torch.arange(rows + 1, device="cpu") * R).clamp(max=M)
        (indptr,) = all_to_host([indptr])
        if mask is not None:
            mask = _flattened(mask, indptr, qo_indptr, R, C)  # type: ignore[arg-type]
        custom_mask = Mask.of(mask, packed_mask)
        arguments = PrefillArguments(
            "paged",
            num_qo_heads,
            num_kv_heads,
            check_head_dim("head_dim", head_dim),
            C,
            has_mask=custom_mask is not None,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=q_data_type,
            kv_data_type=checks.optional_dtype("kv_data_type", kv_data_type),
            o_data_type=o_data_type,
        )
        pages = Pages(indices, non_blocking=non_blocking)
        try:
            self._attention.plan(Lengths(qo_indptr, indptr), pages, *self._checked.of(arguments), custom_mask)
        except FlashpageError as error:
            error.use_names(NAMES)
            raise
        self._values = self._attention.values
        if (last := self._attention.session.indices.max_page) * C >= max(N, 1):
            self._attention.session.invalidate()
            raise PlanError(f"indices reach block {last} but N={N} tokens are {N // C} blocks.")
        self.M, self.N, self.R, self.C = M, N, R, C

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: Any = None,
        scale_k: Any = None,
        scale_v: Any = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        *,
        lse_mode: str = "base2",
    ) -> Any:
        """Attention under the planned matrix.

        Args:
            q: [M, num_qo_heads, head_dim].
            k, v: [N, num_kv_heads, head_dim].
            scale_q, scale_k, scale_v: numbers, or fp32 tensors of one entry or one a head.
            out: [M, num_qo_heads, head_dim], written in place; None: allocated.
            lse: [M, num_qo_heads] fp32, base 2, written in place. A row that sees nothing has out = 0, lse = -inf.
            return_lse: also return lse.
            lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).
        """
        self._attention.require_plan("run")
        pages = []
        for name, tensor in (("k", k), ("v", v)):
            if checks.tensor(tensor, name, RunError).dim() != 3 or tensor.shape[0] != self.N:
                raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass [N={self.N}, num_kv_heads, head_dim].")
            pages.append(tensor.unflatten(0, (self.N // self.C, self.C)))
        scales = NO_SCALES if scale_q is scale_k is scale_v is None else (scale_q, scale_k, scale_v)
        cache = tuple(pages)
        try:
            run = self._attention.run_of(lse_mode)
            return run(q, cache, out, lse, return_lse, self._values, scales, enable_pdl=enable_pdl)
        except FlashpageError as error:
            error.use_names(NAMES)
            raise

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: Any = None,
        scale_k: Any = None,
        scale_v: Any = None,
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
        return self.run(q, k, v, scale_q, scale_k, scale_v)

    def end_forward(self) -> None:
        """Does nothing: a plan needs no end."""


def _flattened(mask: Any, indptr: torch.Tensor, qo_indptr: torch.Tensor, R: int, C: int) -> torch.Tensor:
    """Bits of a mask by blocks, [blocks, R, C]: each row block's rows over the tokens of its blocks, joined."""
    checks.tensor(mask, "mask", PlanError)
    blocks = int(indptr[-1])
    if mask.shape != (blocks, R, C) or mask.dtype not in (torch.bool, torch.uint8):
        raise PlanError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}: pass bool or uint8, [{blocks}, {R}, {C}]."
        )
    parts = [
        mask[begin:end, :rows].transpose(0, 1).reshape(-1)
        for begin, end, rows in zip(indptr[:-1].tolist(), indptr[1:].tolist(), qo_indptr.diff().tolist(), strict=True)
    ]
    return torch.cat(parts) if parts else mask.reshape(-1)
