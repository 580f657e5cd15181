"""flash_mla_sparse_fwd and flash_attn_varlen_func of FlashMLA, for inference."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...base import checks
from ...base.errors import CapabilityError, RunError, named
from ...wrappers.lse_mode import LN_2
from ..flash_attn import functions as flash_attn
from . import sparse
from .functions import NAMES
from .largest import MaxLogits, Scores

_NAMES = {inner: name for inner, name in NAMES.items() if inner != "sm_scale"} | sparse.names_of_cache("kv")
_NAMES |= {"head_dim_ckv": "d_v", "head_dim_kpe": "head_dim of q less d_v"}


@named(_NAMES)
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    *,
    indexer_topk: int = 0,
) -> tuple[torch.Tensor, MaxLogits | None, torch.Tensor | None]:
    """Prefill in which each row of q lists the tokens that it reads.

    Args:
        q: [rows, heads, head_dim].
        kv: [tokens, 1, head_dim]; its first d_v columns are V.
        indices: [rows, 1, topk] int32, numbers of tokens; others than 0 to tokens - 1 are none.
        sm_scale: multiplies the scores.
        d_v: columns of V and of the output.
        attn_sink: [heads] fp32: the output is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
        topk_length: [rows] int32, entries of each list that are used; None: all.
        use_legacy: accepted and not used, as one function serves both.
        return_log2_lse: whether the LSE is a logarithm to base 2, and max_logits in its units (None: natural); False:
            neither is returned.
        indexer_topk: of later versions; 0.

    Returns:
        The output [rows, heads, d_v]; max_logits [rows, heads] fp32, the largest scores; and the LSE [rows, heads]
        fp32, without the sink. With return_log2_lse=False the last two are None. A row that sees no token has out = 0
        and -inf in both.

        max_logits is computed when it is first used, by torch and for as long as some calls: no kernel writes it.
        Until then it keeps q and kv; if they were written to in between, its use is refused.
    """
    checks.flag("use_legacy", use_legacy, RunError)
    if return_log2_lse is not None:
        return_log2_lse = checks.flag("return_log2_lse", return_log2_lse, RunError)
    if indexer_topk.__class__ is not int or indexer_topk != 0:
        raise CapabilityError(f"indexer_topk={checks.shown(indexer_topk)} is not supported: pass 0.")
    for name, tensor, shape in (("q", q, "[rows, heads, head_dim]"), ("kv", kv, "[tokens, 1, head_dim]")):
        if checks.tensor(tensor, name, RunError).dim() != 3:
            raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass {shape}.")
    if kv.shape[1] != 1 or kv.shape[2] != q.shape[2]:
        raise RunError(
            f"kv has shape {tuple(kv.shape)} but q has {q.shape[2]} columns: pass [tokens, 1, {q.shape[2]}]."
        )
    lists = sparse.lists_of(kv, indices, topk_length, (len(q), 1), ("kv", "indices", "topk_length"))
    lists = lists._replace(indices=torch.where(lists.indices < len(kv), lists.indices.clamp(min=-1), -1))
    call = sparse.SparseCall(q, d_v, checks.real("sm_scale", sm_scale, error=RunError))
    out, lse_2 = call.state(lists)
    lse = lse_2 * LN_2
    out = sparse.with_sink(call, out, lse, attn_sink)
    if return_log2_lse is False:
        return out, None, None
    scores = Scores(q, lists, call.sm_scale, lse_2)
    if return_log2_lse:
        return out, MaxLogits(scores, math.log2(math.e)), lse_2.clone()
    return out, MaxLogits(scores, 1.0), lse


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of expanded prompts, whose rows stand one after the other; without gradients.

    Args:
        q: [rows of all requests, heads, columns of K], such as 192.
        k: [tokens of all requests, kv_heads, columns of K].
        v: [tokens of all requests, kv_heads, columns of V], such as 128.
        cu_seqlens_qo, cu_seqlens_kv: [batch + 1] int32, where each request's rows and tokens begin.
        max_seqlen_qo, max_seqlen_kv, deterministic: accepted and not used, as results always repeat.
        dropout_p: 0.
        softmax_scale: multiplies the scores; None: columns of K ** -0.5.
        causal: row r of a request sees tokens up to tokens - rows + r.
        is_varlen: False: requests are equally long, whatever the entries of cu_seqlens_qo and cu_seqlens_kv say.

    Returns:
        The output [rows, heads, columns of V] and the LSE [rows, heads] fp32, a natural logarithm.
    """
    checks.flag("deterministic", deterministic, RunError)
    if not checks.flag("is_varlen", is_varlen, RunError):
        cu_seqlens_qo = _equal_begins("cu_seqlens_qo", cu_seqlens_qo, "q", q)
        cu_seqlens_kv = _equal_begins("cu_seqlens_kv", cu_seqlens_kv, "k", k)
    with named({"cu_seqlens_q": "cu_seqlens_qo", "cu_seqlens_k": "cu_seqlens_kv"}):
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            *(q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, dropout_p, softmax_scale, causal),
            return_attn_probs=True,
        )
    return out, lse.T


def _equal_begins(name: str, begins: Any, rows_name: str, rows: Any) -> torch.Tensor:
    """Where requests begin that have equally many of these rows."""
    begins, rows = checks.tensor(begins, name, RunError), checks.tensor(rows, rows_name, RunError)
    batch, total = begins.numel() - 1, len(rows) if rows.dim() else 0
    if batch < 1 or total % batch:
        raise RunError(
            f"is_varlen=False but {rows_name} has {total} rows for the {batch} requests of {name}: pass equally many "
            "for each, or is_varlen=True."
        )
    return torch.arange(batch + 1, dtype=torch.int32, device=begins.device) * (total // batch)


def has_legacy() -> bool:
    """Whether calls may pass use_legacy=True: always, as one function serves both."""
    return True
