"""Functions over latent rows (MLA) from block tables: each call plans on the device and runs, waits for nothing and may
be captured in a graph."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ..base import checks
from ..base.errors import RunError, named
from ..kernels.options import RunOptions
from ..run.checks import NO_SCALES
from .base import Attention
from .function_plans import Tables, plan_of
from .plan_arguments import LatentArguments
from .table_functions import as_int32, check_tables, out_dtype_of, refuse, scale_of, unless

_BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl")
_CACHE = dict.fromkeys(("paged_kv_cache", "k", "ckv_cache", "kpe_cache"), "kv_cache")
_NAMES = {"q": "query", "qo_indptr": "cum_seq_lens_q", "head_dim_ckv": "kv_lora_rank", "num_heads": "heads of query"}
_NAMES |= {"head_dim_kpe": "qk_rope_head_dim", "q_data_type": "dtype of query", "kv_data_type": "dtype of kv_cache"}
_NAMES |= _CACHE | {"o_data_type": "out's dtype", "lse_mode": "return_lse_base"}


class LatentCall(NamedTuple):
    """The tensors and the options of a call that its plan depends on."""

    query: torch.Tensor  # [rows, heads, columns]
    cache: torch.Tensor  # [pages, page_size, columns]
    head_dim_vo: Any
    tables: Tables
    q_len: int = 0  # rows of every request; 0: tables.q_indptr says
    causal: bool = True
    out_dtype: Any = None  # None: the query's
    uncut: bool = False  # no request is cut
    has_scales: bool = False  # rows of e4m3, whose scales the run is given
    workspace: Any = None  # the caller's (plan_of)

    def planned(self, sm_scale: Any, key: Hashable = None) -> tuple[Attention, RunOptions]:
        """The Attention with a plan of these lengths, and the values of its runs; `key`: FunctionPlan.on_device."""
        if self.cache.shape[2] != self.query.shape[2]:
            raise RunError(
                f"q has {self.query.shape[2]} columns but paged_kv_cache has {self.cache.shape[2]}: pass equal ones."
            )
        if self.cache.dtype != self.query.dtype and not self.has_scales:
            raise RunError(
                f"paged_kv_cache has dtype {self.cache.dtype} but q has {self.query.dtype}: pass rows of the same type."
            )
        ckv = checks.whole("head_dim_ckv", self.head_dim_vo, 1, error=RunError)
        arguments = LatentArguments(
            num_heads=self.query.shape[1],
            head_dim_ckv=ckv,
            head_dim_kpe=self.query.shape[2] - ckv,
            page_size=self.cache.shape[1],
            sm_scale=1.0,  # differs between the layers of an fp8 cache, unlike the plan
            causal=self.causal and self.q_len != 1,
            q_data_type=self.query.dtype,
            kv_data_type=self.cache.dtype,
            o_data_type=self.out_dtype,
            disable_split_kv=self.uncut,
            q_len_per_req=self.q_len,
        )
        plan = plan_of(self.query.device, "NHD", arguments, workspace=self.workspace)
        return plan.on_device(self.tables, key), plan.values._replace(sm_scale=sm_scale)


def _rows(tensor: Any, name: str, query: torch.Tensor) -> Any:
    """A tensor with the batch and the rows of a 4-D query, as a view of all rows; everything else as it is."""
    if (
        query.dim() == 3
        or not isinstance(tensor, torch.Tensor)
        or tensor.dim() < 3
        or tensor.shape[:2] != query.shape[:2]
    ):
        return tensor
    if min(tensor.shape[:2]) > 1 and tensor.stride(0) != tensor.stride(1) * tensor.shape[1]:
        raise RunError(f"{name} has strides {tensor.stride()}: pass requests that follow each other in memory.")
    return tensor.flatten(0, 1)


@named(_NAMES)
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Any:
    """Decode over latent rows from block tables. Rows of a request are causal among themselves; each row's own token is
    in the cache.

    Args:
        query: [batch, rows, heads, kv_lora_rank + qk_rope_head_dim], or [cum_seq_lens_q[-1], heads, ...].
        kv_cache: [pages, page_size, kv_lora_rank + qk_rope_head_dim] or [pages, 1, page_size, ...], any strides.
        workspace_buffer: not written; graphs whose calls have different ones may be replayed at the same time.
        qk_nope_head_dim, max_seq_len, max_q_len, is_var_seq: accepted and not used; neither are cute_dsl_impl,
            kv_scale_format and multi_ctas_kv_counter_buffer.
        kv_lora_rank, qk_rope_head_dim: columns that K and V share, and those that only K has.
        block_tables: [batch, pages] int32.
        seq_lens: [batch], tokens of each request.
        out: the query's shape with kv_lora_rank columns, written in place; None: allocated.
        bmm1_scale: multiplies the scores; bmm2_scale: the output. Numbers, or fp32 tensors of one entry.
        sinks: [heads] fp32, natural-log units, or a list of one such tensor.
        backend: "auto" ("xqa", "trtllm-gen", "cute-dsl": the same).
        lse, return_lse: [rows of all requests, heads] fp32; `lse` may be [batch, rows, heads].
        cum_seq_lens_q: [batch + 1] int32 on the device, where each request's rows begin.
        return_lse_base: "base2" (None: the same) or "basee".

    The other arguments belong to sparse attention, context parallelism or FlashInfer's kernels and are refused if they
    differ from their defaults.
    """
    refuse(
        sparse_mla_top_k=unless(sparse_mla_top_k, 0),
        sparse_mla_top_k_lens=sparse_mla_top_k_lens,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        use_fp16_softmax=use_fp16_softmax,
        enable_dcp=enable_dcp,
        cp_world=unless(cp_world, 1),
        cp_rank=unless(cp_rank, 0),
        causal_seqlens_kv_global=causal_seqlens_kv_global,
    )
    check_tables(uses_shared_paged_kv_idx, backend, _BACKENDS)
    _check_query(query, kv_lora_rank, qk_rope_head_dim, is_ragged=cum_seq_lens_q is not None)
    tables = Tables(as_int32(seq_lens, "seq_lens"), as_int32(block_tables, "block_tables"))
    rows, q_len = query, 0
    if cum_seq_lens_q is not None:
        tables = tables._replace(q_indptr=as_int32(cum_seq_lens_q, "cum_seq_lens_q"), max_rows=len(query))
    elif (batch := tables.seq_lens.numel()) != query.shape[0]:
        raise RunError(f"query is for {query.shape[0]} requests but seq_lens has {batch}: pass equally many.")
    else:
        rows, q_len = query.flatten(0, 1), query.shape[1]
    call = LatentCall(
        *(rows, _cache(kv_cache), kv_lora_rank, tables, q_len),
        out_dtype=out_dtype_of(out, None, query),
        workspace=workspace_buffer,
    )
    sm_scale, q_scale = scale_of(bmm1_scale, "bmm1_scale")
    v_number, v_scale = scale_of(bmm2_scale, "bmm2_scale")
    scales = (q_scale, None, v_scale if v_number == 1 else v_number)
    attention, values = call.planned(sm_scale)
    shape = (*query.shape[:-1], kv_lora_rank)
    if out is None:  # rows of no request are not written
        make = torch.empty if cum_seq_lens_q is None else torch.zeros
        out = make(shape, dtype=attention.out_dtype, device=query.device)
    elif out.shape != shape:
        raise RunError(f"out has shape {tuple(out.shape)}: pass {shape}.")
    to = _rows(lse, "lse", query)
    if lse is None and return_lse is True and cum_seq_lens_q is not None:
        to = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    run = attention.run_of("base2" if return_lse_base is None else return_lse_base)
    found = run(
        *(rows, call.cache, _rows(out, "out", query), to, return_lse, values),
        *(NO_SCALES if scales == NO_SCALES else scales, _sinks(sinks), enable_pdl),
    )
    return (out, found[1] if lse is None else lse) if return_lse else out


def trtllm_prefill_with_kv_cache_mla(*args: Any, **kwargs: Any) -> Any:
    """trtllm_batch_decode_with_kv_cache_mla by another name, as in FlashInfer."""
    return trtllm_batch_decode_with_kv_cache_mla(*args, **kwargs)


def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """trtllm_batch_decode_with_kv_cache_mla without the arguments of other kernels."""
    found: torch.Tensor = trtllm_batch_decode_with_kv_cache_mla(
        *(query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens),
        *(max_seq_len, 0, out, bmm1_scale, bmm2_scale, sinks, None, enable_pdl),
    )
    return found


def _check_query(query: Any, ckv: Any, kpe: Any, *, is_ragged: bool) -> None:
    query = checks.tensor(query, "query", RunError)
    if query.dim() != (3 if is_ragged else 4):
        raise RunError(
            f"query has shape {tuple(query.shape)}: pass [batch, rows, heads, columns], or "
            "[rows of all requests, heads, columns] with cum_seq_lens_q."
        )
    columns = checks.whole("kv_lora_rank", ckv, 1, error=RunError)
    columns += checks.whole("qk_rope_head_dim", kpe, 0, error=RunError)
    if query.shape[-1] != columns:
        raise RunError(
            f"query has {query.shape[-1]} columns but kv_lora_rank + qk_rope_head_dim is {columns}: pass equal sizes."
        )


def _cache(kv_cache: Any) -> torch.Tensor:
    cache = checks.tensor(kv_cache, "kv_cache", RunError)
    if cache.dim() == 4 and cache.shape[1] == 1:
        return cache.squeeze(1)
    if cache.dim() != 3:
        raise RunError(f"kv_cache has shape {tuple(cache.shape)}: pass [pages, page_size, columns of a latent row].")
    return cache


def _sinks(sinks: Any) -> Any:
    return sinks[0] if sinks.__class__ is list and len(sinks) == 1 else sinks
