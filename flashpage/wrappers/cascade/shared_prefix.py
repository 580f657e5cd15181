"""Batches over one shared prefix in separate tensors, and a paged KV cache for the tokens after it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...base import checks
from ...base.dtypes import DType
from ...base.errors import FlashpageError, PlanError, RunError
from ...base.unique import Unique
from ...kernels.options import check_head_dim
from ...plan.lengths import Lengths, Names, to_host
from ...plan.page_indices import NO_PAGES, Pages, kept
from ..base import PAGED, RAGGED, Attention
from ..merge import Part, merge_parts, part_of
from ..plan_arguments import Arguments, DecodeArguments, PrefillArguments
from ..planned_by_runs import PlannedByRuns
from ..prewarm import Prewarmed

_UNIQUE = Names("qo_indptr", "unique_kv_indptr", "unique_kv_last_page_len", "seq_lens", "unique_kv_indices")
_OF_SHARED = {"k": "k_shared", "v": "v_shared"}
_OF_UNIQUE = {name: f"unique_kv_cache's {name}" for name in ("k", "v")} | {"paged_kv_cache": "unique_kv_cache"}


class _SharedPrefix(Unique):
    """The base of the two wrappers: a ragged batch of one for the prefix, a paged batch for the rest, one merge."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, names: Names) -> None:
        self._kv_layout = checks.layout(kv_layout)
        owner = type(self).__name__
        self._workspace = float_workspace_buffer

        def planned(names: Names) -> PlannedByRuns:
            return PlannedByRuns(lambda: Attention(self._workspace, kv_layout, names=names, owner=owner))

        self._unique, self._shared, self._names = planned(names), planned(RAGGED), names
        self._planned: _Batch | None = None
        self._dtypes: tuple[Any, Any] = (None, None)  # types of q and the caches, as planned
        self._seen: tuple[Any, Any] | None = None  # types of forward's tensors, if begin_forward got others

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Takes other workspaces; call begin_forward again before the next forward."""
        self._planned, self._workspace = None, float_workspace_buffer
        self._shared.forget()
        self._unique.attention.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        shared = self._shared.attention
        shared.reset_workspace_buffer(float_workspace_buffer, shared.session.workspaces.int_buffer)

    def end_forward(self) -> None:
        """Does nothing: a plan needs no end."""

    def _begin(self, lengths: Lengths, kv_indices: Any, arguments: Arguments, dtypes: tuple[Any, Any]) -> None:
        """`dtypes`: types to plan for if no tensors were seen yet."""
        is_decode = isinstance(arguments, DecodeArguments)
        for name, tensor in zip(self._names[:3], lengths, strict=False):
            if name != "qo_indptr" or not is_decode:
                checks.tensor(tensor, name, PlanError)
        copies = Lengths(*(None if t is None else t.clone() for t in to_host(lengths)))  # forward may plan again
        self._planned = None
        self._plan(_Batch(copies, kept(kv_indices, self._names.indices), arguments), self._seen or dtypes)

    def _plan(self, batch: _Batch, dtypes: tuple[Any, Any]) -> None:
        arguments: Any = batch.arguments._replace(q_data_type=dtypes[0], kv_data_type=dtypes[1])
        given = batch.lengths, Pages(batch.kv_indices), *arguments.checked()
        self._unique.plan(None, lambda unique: unique.plan(*given))
        self._planned, self._dtypes = batch, dtypes

    def _forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Any,
        causal: bool,
        sm_scale: float | None,
    ) -> torch.Tensor:
        if self._planned is None:
            raise RunError(f"forward: {type(self).__name__} has no plan: call begin_forward(...) first.")
        for name, tensor in (("q", q), ("k_shared", k_shared), ("v_shared", v_shared)):
            if checks.tensor(tensor, name, RunError).dim() != 3:
                raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass three dimensions, rows, heads and dim.")
        if (q.dtype, k_shared.dtype) != self._dtypes:
            seen = (q.dtype, k_shared.dtype)
            checks.dtype_of(q, "q", RunError), checks.dtype_of(k_shared, "k_shared", RunError)
            self._plan(self._planned, seen)
            self._seen = seen  # what no kernel takes is not planned for again
        unique = self._unique.used()
        prefix_len = k_shared.shape[0 if self._kv_layout == "NHD" else 1]
        parts = []
        if prefix_len:
            shared = self._plan_prefix(unique, prefix_len)
            values = shared.values._replace(sm_scale=sm_scale)
            parts.append(_named(part_of(shared, q, (k_shared, v_shared), values), _OF_SHARED))
        if unique.session.result.total_kv or not prefix_len:
            values = unique.values._replace(sm_scale=sm_scale, causal=causal)
            parts.append(_named(part_of(unique, q, unique_kv_cache, values), _OF_UNIQUE))
        out = torch.empty(q.shape, dtype=unique.out_dtype, device=q.device)
        merge_parts(parts, out, None)
        return out

    def _plan_prefix(self, unique: Attention, prefix_len: int) -> Attention:
        """Plans all rows as one request over the prefix."""
        rows, options = unique.session.total_q, unique.options
        heads = (options.num_q_heads, options.num_kv_heads, options.head_dim_qk)
        arguments = PrefillArguments("ragged", *heads, q_data_type=self._dtypes[0], kv_data_type=self._dtypes[1])

        def plan(shared: Attention) -> None:
            q_indptr, kv_indptr = (torch.tensor([0, n], dtype=torch.int32, device="cpu") for n in (rows, prefix_len))
            shared.plan(Lengths(q_indptr, kv_indptr), NO_PAGES, *arguments.checked())

        return self._shared.plan((prefix_len, rows, arguments), plan)


def _named(part: Part, names: dict[str, str]) -> Part:
    """The part with errors that name the caller's arguments."""

    def run(out: torch.Tensor, lse: torch.Tensor | None) -> None:
        try:
            part(out, lse)
        except FlashpageError as error:
            error.use_names(names)
            raise

    return run


class _Batch(NamedTuple):
    """begin_forward's arguments, with lengths on the host."""

    lengths: Lengths
    kv_indices: Any
    arguments: Arguments


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Decode of a batch whose requests share a prefix.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs.
        kv_layout: of the prefix and of the paged cache, "NHD" or "HND".
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout, _UNIQUE)

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = "float16",
    ) -> None:
        """Plans a batch; the first `forward` plans the prefix, whose length is not known here.

        Args:
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len: the pages after the prefix, as
                BatchDecodeWithPagedKVCacheWrapper.plan takes them.
            data_type: type of q and the caches; if `forward`'s tensors have other types, these are planned.
        """
        lengths = Lengths(None, unique_kv_indptr, unique_kv_last_page_len)
        arguments = DecodeArguments(num_qo_heads, num_kv_heads, head_dim, page_size)
        self._begin(lengths, unique_kv_indices, arguments, _dtypes(data_type))

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Any
    ) -> torch.Tensor:
        """Attention of one row a request over the prefix and the request's own pages.

        Args:
            q: [batch, num_qo_heads, head_dim].
            k_shared, v_shared: [prefix_len, num_kv_heads, head_dim] (HND: heads first).
            unique_kv_cache: as BatchDecodeWithPagedKVCacheWrapper.run takes it.

        Returns:
            [batch, num_qo_heads, head_dim].
        """
        return self._forward(q, k_shared, v_shared, unique_kv_cache, False, None)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(Prewarmed, _SharedPrefix):
    """Prefill or append of a batch whose requests share a prefix.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs.
        kv_layout: of the prefix and of the paged cache, "NHD" or "HND".
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout, PAGED)

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Plans a batch for float16; the first `forward` plans the prefix, and other types.

        Args:
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: rows and the pages after the prefix,
                as BatchPrefillWithPagedKVCacheWrapper.plan takes them.
        """
        lengths = Lengths(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        head_dim = check_head_dim("head_dim", head_dim)
        arguments = PrefillArguments("paged", num_qo_heads, num_kv_heads, head_dim, page_size)
        self._begin(lengths, paged_kv_indices, arguments, _dtypes("float16"))

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Any,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Attention of the planned rows over the prefix and each request's own pages.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim].
            k_shared, v_shared: [prefix_len, num_kv_heads, head_dim] (HND: heads first); all rows see all of them.
            unique_kv_cache: as BatchPrefillWithPagedKVCacheWrapper.run takes it.
            causal: within a request's own tokens.
            sm_scale: of the scores; None: head_dim ** -0.5.
            rope_scale, rope_theta: None: nothing is rotated in the kernel.

        Returns:
            [qo_indptr[-1], num_qo_heads, head_dim].
        """
        checks.refuse_given(use_fp16_qk_reduction=use_fp16_qk_reduction)
        for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
            if value is not None:
                checks.refuse(name, value)
        return self._forward(q, k_shared, v_shared, unique_kv_cache, causal, sm_scale)


def _dtypes(data_type: Any) -> tuple[Any, Any]:
    """torch's types of q and the caches: q of fp8 caches is float16 until a tensor has another type."""
    given = checks.dtype("data_type", data_type)
    return (DType.FLOAT16 if given.is_fp8 else given).torch, given.torch
