"""Attention in fp64 from the arguments of the inner interface: in plain torch, request by request, without tiles."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..base.kv_view import View
from ..kernels.options import Options, RunOptions
from ..plan.session import Planner
from ..run.checks import NO_SCALES, Scales, views_of
from ..variants.variant import alibi_slopes


class Inputs(NamedTuple):
    """The arguments of one Attention.run, on the CPU."""

    session: Planner
    values: RunOptions
    kv_layout: str
    q: torch.Tensor
    cache: Any
    scales: Scales = NO_SCALES
    sinks: torch.Tensor | None = None


def why_not(inputs: Inputs) -> str:
    """Why the reference does not know this run; empty if it does."""
    options = inputs.session.options
    if options.is_latent:
        return "rows of latents"
    if options.variant is not None:
        return "a variant of the user's own"
    return "runs of rows (cascades)" if inputs.session.batch.row_runs is not None else ""


def attention(inputs: Inputs) -> torch.Tensor:
    """The exact output, fp64 [rows, num_qo_heads, head_dim_vo]; rows of no request are NaN."""
    session, options = inputs.session, inputs.session.options
    q_indptr, kv_indptr, kv_lens = (numbers.tolist() for numbers in session.batch.numbers(options.page_span))
    k_rows, v_rows = (_rows(view, which, inputs) for which, view in enumerate(_views(inputs)))
    out = torch.full((*inputs.q.shape[:2], options.head_dim_vo), math.nan, dtype=torch.float64)
    first_bit = 0
    for request, tokens in enumerate(kv_lens):
        begin, end = q_indptr[request], q_indptr[request + 1]
        pages = _pages(session, request, kv_indptr, tokens)
        mask = None
        if options.has_mask:
            bits = (end - begin) * tokens
            mask = _unpacked(session.mask.tensor, first_bit, bits).view(end - begin, tokens)
            first_bit += -(-bits // 8) * 8
        k, v = (_tokens(rows, pages, tokens, kv_indptr[request], options) for rows in (k_rows, v_rows))
        out[begin:end] = _attend(inputs, inputs.q[begin:end].double(), k, v, mask)
    most = torch.finfo(options.out_dtype.torch).max
    return out.clamp(-most, most) if options.out_dtype.is_fp8 else out


def _views(inputs: Inputs) -> tuple[View, View]:
    return views_of(inputs.cache, inputs.session.options, inputs.kv_layout)


def _rows(view: View, which: int, inputs: Inputs) -> torch.Tensor:
    """K or V, [pages or tokens, page size, heads, dim]."""
    tensor = inputs.cache[which] if isinstance(inputs.cache, tuple) else inputs.cache
    shape = (view.num_pages, view.page_size, view.num_heads, view.head_dim)
    if not inputs.session.options.is_paged:  # one page
        shape = (view.page_size, view.num_pages, *shape[2:])
    strides = (view.page_stride, view.token_stride, view.head_stride, 1)
    return tensor.as_strided(shape, strides, tensor.storage_offset() + view.offset)


def _pages(session: Planner, request: int, kv_indptr: list[int], tokens: int) -> torch.Tensor | None:
    options = session.options
    if not options.is_paged:
        return None
    count = -(-tokens // options.page_size)
    if session.batch.tables is not None:
        return session.batch.tables.read[request, :count].long()
    begin = kv_indptr[request]
    assert session.indices.tensor is not None
    return session.indices.tensor[begin : begin + count].long()


def _tokens(rows: torch.Tensor, pages: Any, tokens: int, begin: int, options: Options) -> torch.Tensor:
    """A request's K or V, fp64 [tokens, heads, dim]."""
    if pages is None:
        return rows.flatten(0, 1)[begin : begin + tokens].double()
    return rows[pages].flatten(0, 1)[:tokens].double()


def _attend(inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    """One request: q [rows, heads, dim], k and v [tokens, KV heads, dim]."""
    options, values = inputs.session.options, inputs.values
    rows, tokens, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    position = torch.arange(rows).view(-1, 1) + tokens - rows
    token = torch.arange(tokens).view(1, -1)
    if values.pos_encoding_mode == "ROPE_LLAMA":
        scale, theta = values.rope_scale or 1.0, values.rope_theta or 1e4
        q, k = _rotated(q, position.flatten(), scale, theta), _rotated(k, token.flatten(), scale, theta)
    q_scale, k_scale, v_scale, o_scale = (_per_head(scale) for scale in (*inputs.scales, None)[:4])
    q, k, v = q * q_scale, (k * k_scale).repeat_interleave(group, 1), (v * v_scale).repeat_interleave(group, 1)
    sm_scale = options.head_dim_qk**-0.5 if values.sm_scale is None else values.sm_scale
    scores = torch.einsum("rhd,thd->hrt", q, k) * sm_scale
    if values.pos_encoding_mode == "ALIBI":
        slopes = alibi_slopes(q.shape[1]).double()
        scores = scores + slopes.view(-1, 1, 1) * (token - position)
    if values.logits_soft_cap:
        scores = values.logits_soft_cap * torch.tanh(scores / values.logits_soft_cap)
    seen = _visible(options, values, position, token)
    scores = scores.masked_fill(~(seen if mask is None else seen & mask), -math.inf)
    if inputs.sinks is not None:
        sink = inputs.sinks.double().view(-1, 1, 1).expand(-1, rows, 1)
        scores, v = torch.cat([scores, sink], -1), torch.cat([v, v.new_zeros(1, *v.shape[1:])])
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # rows that see no token have out = 0
    return torch.einsum("hrt,thd->rhd", weights, v) / o_scale


def _visible(options: Options, values: RunOptions, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    seen = torch.ones_like(position + token, dtype=torch.bool)
    if values.causal and not options.has_mask:
        seen &= token <= position
    if values.window_left >= 0:
        seen &= token >= position - values.window_left
    if options.chunk:
        seen &= token // options.chunk == position.clamp(min=0) // options.chunk
    return seen


def _rotated(x: torch.Tensor, positions: torch.Tensor, scale: float, theta: float) -> torch.Tensor:
    """LLaMA's rotary embedding of x [rows, heads, dim]: pairs (i, i + dim / 2)."""
    half = x.shape[-1] // 2
    angle = (positions / scale).view(-1, 1, 1) * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x.split(half, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _per_head(scale: Any) -> Any:
    if isinstance(scale, torch.Tensor):
        return scale.double().view(1, -1, 1)
    return 1.0 if scale is None else scale


def _unpacked(packed: Any, first: int, count: int) -> torch.Tensor:
    """`count` bits from bit `first`, which begins a byte."""
    assert packed is not None
    some = packed[first // 8 : first // 8 + -(-count // 8)]
    return (some.view(-1, 1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).bool().view(-1)[:count]
