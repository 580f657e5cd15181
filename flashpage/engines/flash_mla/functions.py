"""flash_mla_with_kvcache of FlashMLA.

Lengths are planned on the device, once for all calls that pass one FlashMLASchedMeta and the same block table; a call
waits for nothing and may be captured in a graph. torch.compile sees one operator (traced.py).
"""

from __future__ import annotations

from typing import Any

import torch

from ...base import checks
from ...base.errors import CapabilityError, RunError, named
from ...wrappers.function_plans import Tables, key_of_step
from ...wrappers.latent_functions import LatentCall
from ...wrappers.operators import is_traced
from . import scaled_rows, sparse, traced
from .metadata import FlashMLASchedMeta, check_given, take

NAMES = {"seq_lens": "cache_seqlens", "block_tables": "block_table", "head_dim_ckv": "head_dim_v"}
NAMES |= {"num_heads": "heads of q", "head_dim_kpe": "head_dim of q less head_dim_v", "q_data_type": "dtype of q"}
NAMES |= sparse.names_of_cache("k_cache") | {"extra_kv_cache": "extra_k_cache"}
NAMES |= {"sm_scale": "softmax_scale", "k_scale": "descale_k", "v_scale": "descale_k"}

_NO_SPARSE = "it belongs to sparse attention: pass indices too, or leave it None"


@named(NAMES)
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few rows of each request over latent rows in pages.

    Args:
        q: [batch, rows, heads, head_dim], any number of heads; of float8_e4m3fn over such a cache, too: it is converted
            to bf16, in which outputs are then.
        k_cache: [pages, page_size, 1, head_dim], pages of any size; its first head_dim_v columns are V. Rows are of q's
            type or, with descale_k, of float8_e4m3fn, which need is_fp8_kvcache=True or None. With
            `indices` also DeepSeek's fp8 rows, [pages, page_size, 1, 656 or 584] bytes.
        block_table: [batch, pages] int32; with `indices` accepted and not used, as in FlashMLA.
        cache_seqlens: [batch] int32, tokens of each request, the rows' own included; with `indices` as block_table.
        head_dim_v: columns of V and of the output.
        tile_scheduler_metadata: of get_mla_metadata, one for each step.
        num_splits: None.
        softmax_scale: multiplies the scores; None: head_dim ** -0.5.
        causal: row r of a request sees tokens up to tokens - rows + r; False with `indices`.
        is_fp8_kvcache: with `indices` accepted and not used, as k_cache says it; without, None or what k_cache has.
        indices: [batch, rows, topk] int32, the tokens that a row reads: page * page_size + token of the page; -1: none.
        attn_sink: with `indices`: [heads] fp32: the output is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
        extra_k_cache, extra_indices_in_kvcache: with `indices`: another cache and its lists, which join the softmax.
        topk_length, extra_topk_length: with `indices`: [batch] int32, entries of each list that are used; None: all.
        enable_batch_invariant: no request is cut, so that results do not depend on the rest of the batch.
        use_legacy: accepted and not used, as one function reads all formats.
        kv_format: with `indices` and rows of bytes: "V32" (656) or "V4" (584), which k_cache must have; None: as its
            rows say.
        descale_q, descale_k: without `indices`, [1] fp32: what the elements of float8_e4m3fn are multiplied by.

    Returns:
        The output [batch, rows, heads, head_dim_v], and the LSE [batch, heads, rows] fp32, a natural logarithm. A row
        that sees no token has out = 0 and an LSE of -inf.
    """
    q = _four(q, "q", "[batch, rows, heads, head_dim]")
    if is_traced():
        check_given(tile_scheduler_metadata, num_splits)
        return traced.call(
            *(q, k_cache, block_table, cache_seqlens, head_dim_v, traced.handle_of(tile_scheduler_metadata)),
            *(softmax_scale, causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache),
            *(topk_length, extra_topk_length, enable_batch_invariant, use_legacy, kv_format),
            descale_q=descale_q,
            descale_k=descale_k,
        )
    cache = _cache(k_cache, "k_cache")
    batch, rows, heads = q.shape[:3]
    causal, is_packed = checks.flag("causal", causal, RunError), cache.element_size() == 1
    is_fp8 = is_packed if is_fp8_kvcache is None else checks.flag("is_fp8_kvcache", is_fp8_kvcache, RunError)
    uncut = checks.flag("enable_batch_invariant", enable_batch_invariant, RunError)
    checks.flag("use_legacy", use_legacy, RunError)
    sparse.check_format(kv_format, None if indices is None else cache)
    topk, extra_topk = (_last(given) for given in (indices, extra_indices_in_kvcache))
    extra_page = extra_k_cache.shape[1] if isinstance(extra_k_cache, torch.Tensor) and extra_k_cache.dim() > 1 else None
    config = FlashMLASchedMeta.Config(
        *(batch, rows, heads, cache.shape[1], 1, causal, is_fp8, topk, extra_page, extra_topk, uncut)
    )
    take(tile_scheduler_metadata, num_splits, config)
    if rows == 0:
        raise RunError("q has 0 rows a request: pass at least one.")
    scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.real("softmax_scale", softmax_scale, error=RunError)
    if indices is not None:
        for name, value in (("descale_q", descale_q), ("descale_k", descale_k)):
            if value is not None:
                raise CapabilityError(
                    f"{name}={checks.shown(value)} is not supported with indices: pass None, as rows of bytes hold "
                    "their scales."
                )
        if causal:
            raise RunError("causal=True with indices: the lists say what a row sees, pass False.")
        lists = [sparse.lists_of(cache, indices, topk_length, (batch, rows), ("k_cache", "indices", "topk_length"))]
        if extra_k_cache is not None or extra_indices_in_kvcache is not None:
            names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
            extra = _cache(extra_k_cache, "extra_k_cache")
            lists.append(sparse.lists_of(extra, extra_indices_in_kvcache, extra_topk_length, (batch, rows), names))
        elif extra_topk_length is not None:
            raise RunError("extra_topk_length without extra_k_cache: pass the cache and its lists, or None.")
        chosen = sparse.SparseCall(q.flatten(0, 1), head_dim_v, scale, tile_scheduler_metadata.key, uncut=uncut)
        found = _unflattened(*sparse.attend(chosen, lists, attn_sink), batch, rows)
        tile_scheduler_metadata.first_used(config)
        return found
    _refuse_sparse(
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    if is_packed and (cache.dtype != torch.float8_e4m3fn or cache.shape[2] != q.shape[3]):
        raise RunError(
            f"k_cache has rows of {cache.shape[2]} {cache.dtype}, which are read with indices alone: pass indices, or "
            f"rows of {q.shape[3]} float8_e4m3fn with descale_k, or rows of q's type."
        )
    query, scales = scaled_rows.with_scales(q.flatten(0, 1), cache, is_fp8, descale_q, descale_k)
    lengths = checks.tensor(cache_seqlens, "cache_seqlens", RunError)
    tables = checks.tensor(block_table, "block_table", RunError)
    if lengths.numel() != batch:
        raise RunError(f"q is for {batch} requests but cache_seqlens has {lengths.numel()}: pass equally many.")
    call = LatentCall(
        *(query, cache, head_dim_v, Tables(lengths, tables), rows, causal), uncut=uncut, has_scales=is_fp8
    )
    attention, values = call.planned(scale, key_of_step(tile_scheduler_metadata.key, lengths, tables))
    out, lse = attention.run_of("basee")(call.query, call.cache, None, None, True, values, scales)
    tile_scheduler_metadata.first_used(config)
    return _unflattened(out, lse, batch, rows)


traced.define(flash_mla_with_kvcache)


def _unflattened(out: torch.Tensor, lse: torch.Tensor, batch: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return out.unflatten(0, (batch, rows)), lse.unflatten(0, (batch, rows)).transpose(1, 2).contiguous()


def _cache(tensor: Any, name: str) -> torch.Tensor:
    """A cache without its dimension of heads."""
    cache = _four(tensor, name, "[pages, page_size, 1, head_dim]")
    if cache.shape[2] != 1:
        raise CapabilityError(f"{name} has {cache.shape[2]} heads: latent rows have one, which all query heads read.")
    return cache.squeeze(2)


def _last(indices: Any) -> int | None:
    return indices.shape[-1] if isinstance(indices, torch.Tensor) and indices.dim() else None


def _refuse_sparse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise CapabilityError(f"{name}={checks.shown(value)} is not supported: {_NO_SPARSE}.")


def _four(tensor: Any, name: str, shape: str) -> torch.Tensor:
    found: torch.Tensor = checks.tensor(tensor, name, RunError)
    if found.dim() != 4:
        raise RunError(f"{name} has shape {tuple(found.shape)}: pass {shape}.")
    return found
