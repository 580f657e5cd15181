"""flash_attn_varlen_func and flash_attn_with_kvcache of flash-attn 2.8, for inference.

With a block table, lengths are planned on the device; a call then waits for nothing and may be captured in a graph.
Without one the lengths come to the host, once for all calls that get the same tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from ...base import checks
from ...base.errors import CapabilityError, RunError, named
from ...plan.lengths import Lengths, Names
from ...plan.page_indices import NO_PAGES
from ...run.checks import NO_SCALES
from ...wrappers.function_plans import FunctionPlan, Tables, key_of, plan_of
from ...wrappers.plan_arguments import DecodeArguments, PrefillArguments
from .cache import Rotation, append
from .scores import Scores, refuse_training

_NAMES = Names("cu_seqlens_q", "cu_seqlens_k", "last_page_len", "seq_lens")


_SIZES = {"head_dim_qk": "head_dim of q", "head_dim": "head_dim of q", "q_data_type": "dtype of q"}
_OF_VARLEN = _SIZES | {"head_dim_vo": "head_dim of v", "kv_data_type": "dtype of k"}
_OF_CACHE = _SIZES | {"head_dim_vo": "head_dim of v_cache", "kv_data_type": "dtype of k_cache"}
_OF_CACHE |= {
    inner: f"{side}_cache"
    for i, side in enumerate("kv")
    for inner in (side, f"paged_kv_cache's {side}", f"paged_kv_cache[{i}]")
}


@named(_OF_VARLEN)
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of requests whose rows stand one after the other.

    Args:
        q: [total_q, heads, head_dim].
        k, v: [total_k, kv_heads, head_dim], or [pages, page_size, kv_heads, head_dim] with `block_table`.
        cu_seqlens_q, cu_seqlens_k: [batch + 1] int32, where each request's rows and tokens begin.
        max_seqlen_q, max_seqlen_k, deterministic: accepted and not used.
        dropout_p: 0.
        softmax_scale: multiplies the scores; None: head_dim ** -0.5.
        causal: row r of a request sees tokens up to tokens - rows + r.
        window_size: tokens visible left and right of that one; -1: all. (left, 0) is causal.
        softcap: scores become cap * tanh(score / cap); 0: no cap.
        alibi_slopes: [heads] or [batch, heads] fp32; the bias is -slope * distance.
        return_attn_probs: also return the LSE [heads, total_q], a natural logarithm, and None for the probabilities. A
            row that sees no token has out = 0 and an LSE of -inf.
        block_table: [batch, pages] int32.
    """
    refuse_training(dropout_p, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return_attn_probs = checks.flag("return_attn_probs", return_attn_probs, RunError)
    _check_rows(q, "q", 3, "[total_q, heads, head_dim]")
    scores = Scores(softmax_scale, causal, window_size, softcap, alibi_slopes).arguments(
        cu_seqlens_q.numel() - 1, q.shape[1], has_one_row=False
    )
    _check_rows(k, "k", 3 if block_table is None else 4, "[total_k, kv_heads, head_dim], pages with block_table")
    _check_rows(v, "v", k.dim(), "the dimensions of k")
    sizes = _sizes(q, k, v, scores)
    if block_table is None:
        plan = plan_of(q.device, "NHD", PrefillArguments("ragged", **sizes), _NAMES)
        attention = plan.on_host(
            key_of(cu_seqlens_q, cu_seqlens_k), lambda: (Lengths(cu_seqlens_q, cu_seqlens_k), NO_PAGES)
        )
    else:
        plan = plan_of(q.device, "NHD", PrefillArguments("paged", page_size=k.shape[1], **sizes))
        seq_lens = _entries(cu_seqlens_k, "cu_seqlens_k", cu_seqlens_q.numel()).diff()
        attention = plan.on_device(Tables(seq_lens, _rows(block_table), cu_seqlens_q, q.shape[0]))
    out = lse = None
    if block_table is not None:  # rows of no request are not written
        out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=plan.options.out_dtype.torch)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32) if return_attn_probs else None
    values = plan.values._replace(sm_scale=softmax_scale)
    run = attention.run_of("basee")
    result = run(q, (k, v), out, lse, return_attn_probs, values, NO_SCALES)
    return (result[0], result[1].T.contiguous(), None) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, into which new keys and values are written before.

    Args:
        q: [batch, rows, heads, head_dim].
        k_cache, v_cache: [batch_of_cache, tokens, kv_heads, head_dim], or [pages, page_size, kv_heads, head_dim] with
            `block_table`; pages of any size.
        k, v: [batch, new, kv_heads, head_dim], written from cache_seqlens on; None: the cache has all tokens.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]; k is rotated at its positions, and q too if `causal` or a
            window is given, otherwise all of q's rows at cache_seqlens. Only with k and v.
        cache_seqlens: a number, or [batch] int32: tokens in the cache before the new ones; None: all that fit.
        cache_batch_idx: [batch] int32, the row of the cache of each request; None: 0, 1, 2, ...
        cache_leftpad: refused.
        num_splits: 1: requests are not cut; every other number: as the plan balances.
        return_softmax_lse: also return the LSE [batch, heads, rows], a natural logarithm.

    The other arguments are those of flash_attn_varlen_func.
    """
    if cache_leftpad is not None:
        raise CapabilityError(
            "cache_leftpad is not supported: begin each request's tokens at 0, or pass a block_table without the "
            "padding."
        )
    new = {name: tensor for name, tensor in (("k", k), ("v", v)) if tensor is not None}
    refuse_training(0, q=q, k_cache=k_cache, v_cache=v_cache, **new)
    return_softmax_lse = checks.flag("return_softmax_lse", return_softmax_lse, RunError)
    checks.flag("rotary_interleaved", rotary_interleaved, RunError)
    checks.whole("num_splits", num_splits, -(2**31), error=RunError)
    _check_rows(q, "q", 4, "[batch, rows, heads, head_dim]")
    _check_rows(k_cache, "k_cache", 4, "[batch, tokens, kv_heads, head_dim], or pages with block_table")
    _check_rows(v_cache, "v_cache", 4, "the dimensions of k_cache")
    batch, rows = q.shape[:2]
    tables = _tables(k_cache, block_table, cache_batch_idx, batch)
    seq_lens = _seq_lens(cache_seqlens, batch, k_cache, tables)
    options = Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    with named(_OF_CACHE):  # before the new tokens are written
        plan, begins = _plan(q, (k_cache, v_cache), options, num_splits)
    rotation = Rotation.of(rotary_cos, rotary_sin, rotary_interleaved)
    if k is not None and v is not None:
        _check_rows(k, "k", 4, "[batch, new, kv_heads, head_dim]")
        _check_rows(v, "v", 4, "[batch, new, kv_heads, head_dim]")
        positions = seq_lens.unsqueeze(1) + torch.arange(k.shape[1], dtype=torch.int32, device=q.device)
        if rotation is not None:
            rotation.check(q.shape[3], k_cache.shape[1] * tables.shape[1])
            is_local = causal or tuple(window_size) != (-1, -1)
            first = seq_lens.unsqueeze(1)
            own = first + torch.arange(rows, dtype=torch.int32, device=q.device) if is_local else first
            q, k = rotation(q, own), rotation(k, positions)
        append(k, v, (k_cache, v_cache), tables, positions)
        seq_lens = seq_lens + k.shape[1]
    elif k is not None or v is not None or rotation is not None:
        raise RunError("k and v belong together, and rotary_cos needs them: pass both of them, or none.")
    with named(_OF_CACHE):
        attention = plan.on_device(Tables(seq_lens, tables, begins, 0 if begins is None else batch * rows))
        values = plan.values._replace(sm_scale=softmax_scale)
        run = attention.run_of("basee")
        result = run(q.flatten(0, 1), (k_cache, v_cache), None, None, return_softmax_lse, values, NO_SCALES)
    if not return_softmax_lse:
        return result.unflatten(0, (batch, rows))
    out, lse = (tensor.unflatten(0, (batch, rows)) for tensor in result)
    return out, lse.transpose(1, 2).contiguous()


def _plan(
    q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], options: Scores, num_splits: int
) -> tuple[FunctionPlan, torch.Tensor | None]:
    """The plan for equally many rows of each request, and where they begin, unless the plan's options say it."""
    batch, rows = q.shape[:2]
    scores = options.arguments(batch, q.shape[2], has_one_row=rows == 1)
    is_causal = scores.pop("causal", True)
    sizes = _sizes(q, *cache, scores) | {"page_size": cache[0].shape[1], "disable_split_kv": num_splits == 1}
    if is_causal and q.shape[3] == cache[1].shape[3]:
        sizes["head_dim"] = sizes.pop("head_dim_qk")
        del sizes["head_dim_vo"]
        return plan_of(q.device, "NHD", DecodeArguments(q_len_per_req=rows, **sizes)), None
    begins = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * rows
    return plan_of(q.device, "NHD", PrefillArguments("paged", causal=is_causal, **sizes)), begins


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: dict[str, Any]) -> dict[str, Any]:
    heads = {"num_qo_heads": q.shape[-2], "num_kv_heads": k.shape[-2]}
    dims = {"head_dim_qk": q.shape[-1], "head_dim_vo": v.shape[-1]}
    return heads | dims | {"q_data_type": q.dtype, "kv_data_type": k.dtype} | scores


def _check_rows(tensor: Any, name: str, dims: int, shape: str) -> None:
    if checks.tensor(tensor, name, RunError).dim() != dims:
        raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass {shape}.")


def _rows(table: Any) -> torch.Tensor:
    """The table with contiguous rows."""
    table = checks.tensor(table, "block_table", RunError)
    return table if table.dim() != 2 or table.shape[1] <= 1 or table.stride(1) == 1 else table.contiguous()


def _tables(k_cache: torch.Tensor, block_table: Any, cache_batch_idx: torch.Tensor | None, batch: int) -> torch.Tensor:
    """Page numbers of each request; a cache without a table is one page for each of its rows."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise RunError("cache_batch_idx and block_table each say where a request's tokens are: pass one of them.")
        return _rows(block_table)
    if cache_batch_idx is not None:
        rows = _entries(cache_batch_idx, "cache_batch_idx", batch)
        return rows.clamp(-1, k_cache.shape[0]).int().unsqueeze(1)  # int64 may not fit; rows outside are refused later
    if batch > k_cache.shape[0]:
        raise RunError(f"q has {batch} requests but k_cache {k_cache.shape[0]} rows: pass cache_batch_idx.")
    return torch.arange(batch, dtype=torch.int32, device=k_cache.device).unsqueeze(1)


def _seq_lens(given: Any, batch: int, k_cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Tokens of each request in the cache."""
    if given is None:
        given = k_cache.shape[1] * tables.shape[-1]
    if not isinstance(given, torch.Tensor):
        given = checks.whole("cache_seqlens", given, 0, error=RunError)
        return torch.full((batch,), given, dtype=torch.int32, device=k_cache.device)
    return _entries(given, "cache_seqlens", batch).contiguous()


def _entries(given: Any, name: str, count: int) -> torch.Tensor:
    """Numbers of requests: int32 or int64, of one dimension."""
    numbers = checks.tensor(given, name, RunError)
    if numbers.shape != (count,) or numbers.dtype not in (torch.int32, torch.int64):
        found = f"{name} has shape {tuple(numbers.shape)} and dtype {numbers.dtype}"
        raise RunError(f"{found}, but q and its lengths need int32 of ({count},).")
    return numbers
