"""Attention over keys and values in transformers' own caches: padded, [batch, heads, tokens, dim]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...plan.lengths import Lengths
from . import plans
from .call import Layer
from .masks import Rows, all_rows, bits, token_rows


class _Batch(NamedTuple):
    queries: Rows
    keys: Rows


def attend(layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of a padded batch, [batch, q_length, num_q_heads, head_dim_vo]."""
    mask, (batch, _, q_length, _), kv_length = layer.mask, query.shape, key.shape[2]
    planned = plans.shared(query.device, ("ragged", layer.call, layer.window_left), is_paged=False)
    identity = (mask, batch, q_length, kv_length)
    if planned.is_for(layer, identity):
        rows = planned.batch
    else:
        rows = _rows(layer, query, kv_length)
        lengths = Lengths(indptr(rows.queries.lengths), indptr(rows.keys.lengths))
        planned.plan(layer, lengths, mask=bits(mask, batch, q_length, kv_length))
        planned.planned_for(layer, identity, rows)
    q = rows.queries.pack(query).contiguous()
    out = planned.run(layer, q, (rows.keys.pack(key), rows.keys.pack(value)))
    return rows.queries.unpack(out, q_length)


def _rows(layer: Layer, query: torch.Tensor, kv_length: int) -> _Batch:
    """The rows to compute. Without a causal mask, padding rows are queries like all others."""
    batch, _, q_length, _ = query.shape
    if layer.mask is None or layer.call.has_mask:
        return _Batch(all_rows(batch, q_length), all_rows(batch, kv_length))
    is_token = layer.mask[:, -kv_length:].bool().cpu()
    keys = token_rows(is_token, query.device)
    is_query = layer.call.is_causal and keys.is_token is not None
    queries = token_rows(is_token[:, -q_length:], query.device) if is_query else all_rows(batch, q_length)
    return _Batch(queries, keys)


def packed(
    layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Attention of requests joined in one row without padding, which begin at `ends`: [1, tokens, heads, dim_vo]."""
    planned = plans.shared(query.device, ("packed", layer.call, layer.window_left), is_paged=False)
    identity = joined_identity(ends)
    if planned.is_for(layer, identity):
        q_rows, kv_rows = planned.batch
    else:
        q_indptr, kv_indptr = joined_to_host(*ends)
        planned.plan(layer, Lengths(q_indptr, kv_indptr))
        q_rows, kv_rows = planned.planned_for(layer, identity, (int(q_indptr[-1]), int(kv_indptr[-1])))
    q, k, v = (t[0].transpose(0, 1)[:rows] for t, rows in ((query, q_rows), (key, kv_rows), (value, kv_rows)))
    out = planned.run(layer, q.contiguous(), (k, v))
    return padded_to(out, query.shape[2])


def padded_to(rows: torch.Tensor, length: int) -> torch.Tensor:
    """[1, length, heads, dim]: the given rows, then zeros."""
    if rows.shape[0] < length:
        rows = torch.cat([rows, rows.new_zeros(length - rows.shape[0], *rows.shape[1:])])
    return rows.unsqueeze(0)


def indptr(lengths: torch.Tensor) -> torch.Tensor:
    """[0, lengths[0], lengths[0] + lengths[1], ...], [batch + 1] int32 on the host."""
    ends = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(lengths, 0, out=ends[1:])
    return ends


def joined_identity(ends: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
    """The identity of a plan for requests that begin at `ends`: with their numbers on the CPU, because arrays that
    share a tensor's memory are written without torch."""
    return (*ends, *(tensor.tolist() for tensor in ends if tensor.is_cpu))


def joined_to_host(q_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies both to the host at once."""
    q_ends, kv_ends = torch.stack([q_indptr.int(), kv_indptr.int()]).cpu()
    return q_ends, kv_ends
