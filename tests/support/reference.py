"""The one reference of the test table: attention and state merging in fp64, in plain torch on the CPU.

It shares no code with the package and knows nothing of pages, tiles or plans. It takes dense rows of one request, and
returns the exact result and the two sums from which tests/support/tolerance.py computes a kernel's allowed error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that change a score or an output: everything but lengths and rows."""

    sm_scale: float
    causal: bool = False  # right-aligned: the last row sees the last token
    window_left: int = -1  # tokens visible left of the row's own; -1: all
    chunk: int = 0  # tokens: a row sees only those of its own chunk; 0: no chunks
    soft_cap: float = 0.0  # 0: none
    alibi_slopes: torch.Tensor | None = None  # [num_q_heads]
    rope: tuple[float, float] | None = None  # (scale, theta)
    sinks: torch.Tensor | None = None  # [num_q_heads], natural-log units
    q_scale: torch.Tensor | float = 1.0  # one value, [num_q_heads] or [requests, num_q_heads]
    k_scale: torch.Tensor | float = 1.0  # as q_scale, for num_kv_heads
    v_scale: torch.Tensor | float = 1.0  # one value or [num_kv_heads]
    score_mod: Callable[..., torch.Tensor] | None = None  # (score, b, h, q_idx, kv_idx), after ALiBi and soft cap
    mask_mod: Callable[..., torch.Tensor] | None = None  # (b, h, q_idx, kv_idx)


@dataclasses.dataclass(frozen=True)
class State:
    """The result of one request, fp64."""

    out: torch.Tensor  # [rows, num_q_heads, head_dim_vo]
    lse: torch.Tensor  # [rows, num_q_heads], base 2
    magnitude: torch.Tensor  # sum of p |v|, shaped like out: the effect of one relative error of every p
    spread: torch.Tensor  # square root of the sum of (p v)^2, shaped like out: the effect of independent errors of p


def attention(
    q: torch.Tensor,  # [rows, num_q_heads, head_dim_qk]
    k: torch.Tensor,  # [tokens, num_kv_heads, head_dim_qk]
    v: torch.Tensor,  # [tokens, num_kv_heads, head_dim_vo]
    options: Options,
    *,
    request: int = 0,
    custom_mask: torch.Tensor | None = None,  # [rows, tokens] bool, True: visible
) -> State:
    """Attention of one request. A row that sees no token has out = 0, and an lse of -inf or of its sink."""
    rows, num_q_heads, _ = q.shape
    tokens, num_kv_heads, _ = k.shape
    q_idx = torch.arange(rows).reshape(rows, 1) + tokens - rows
    kv_idx = torch.arange(tokens).reshape(1, tokens)
    q, k, v = q.double(), k.double(), v.double() * _scale_of(options.v_scale, request)
    if options.rope is not None:
        q, k = rotate(q, q_idx.flatten(), *options.rope), rotate(k, kv_idx.flatten(), *options.rope)
    q, k = q * _scale_of(options.q_scale, request), k * _scale_of(options.k_scale, request)
    groups = q.reshape(rows, num_kv_heads, num_q_heads // num_kv_heads, q.shape[2])
    scores = torch.einsum("rhgd,thd->hgrt", groups, k).reshape(num_q_heads, rows, tokens) * options.sm_scale
    visible = torch.ones(num_q_heads, rows, tokens, dtype=torch.bool)
    for head in range(num_q_heads):
        scores[head] = transform_scores(scores[head], options, request, head, q_idx, kv_idx)
        if options.mask_mod is not None:
            visible[head] = options.mask_mod(request, head, q_idx, kv_idx)
    visible &= visible_tokens(options, q_idx, kv_idx)
    if custom_mask is not None:
        visible &= custom_mask.bool()
    return _softmax(scores.masked_fill(~visible, -math.inf), v, options.sinks)


def transform_scores(
    score: torch.Tensor, options: Options, request: int, head: int, q_idx: torch.Tensor, kv_idx: torch.Tensor
) -> torch.Tensor:
    """Applies ALiBi, then the soft cap, then the user's score_mod, to one head's scores in natural-log units."""
    if options.alibi_slopes is not None:
        score = score + options.alibi_slopes[head].double() * (kv_idx - q_idx)
    if options.soft_cap:
        score = options.soft_cap * torch.tanh(score / options.soft_cap)
    if options.score_mod is not None:
        score = options.score_mod(score, request, head, q_idx, kv_idx)
    return score


def visible_tokens(options: Options, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """Visibility by causal, window and chunk, [rows, tokens]."""
    visible = torch.ones_like(q_idx + kv_idx, dtype=torch.bool)
    if options.causal:
        visible &= kv_idx <= q_idx
    if options.window_left >= 0:
        visible &= kv_idx >= q_idx - options.window_left
    if options.chunk:
        visible &= kv_idx // options.chunk == q_idx.clamp(min=0) // options.chunk
    return visible


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges states over disjoint tokens: out [rows, heads, dim], lse [rows, heads] base 2; -inf does not count."""
    lse = torch.stack([s.double() for s in lses])
    total = torch.logsumexp(lse / LOG2_E, 0) * LOG2_E
    weights = torch.exp2(lse - total).nan_to_num(0.0).unsqueeze(-1)
    stacked = torch.stack([o.double() for o in outs])
    return (torch.where(weights > 0, stacked, 0.0) * weights).sum(0), total


def rotate(x: torch.Tensor, positions: torch.Tensor, scale: float, theta: float) -> torch.Tensor:
    """LLaMA's rotary embedding, pairs (i, i + d / 2): x [rows, heads, d], positions [rows]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions.double() / scale).reshape(-1, 1, 1) * frequency
    first, second = x[..., :half], x[..., half:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """ALiBi's geometric slopes; heads past the largest power of two interleave the finer series."""
    base = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / base) for i in range(base)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / base) for i in range(num_heads - base)]
    return torch.tensor(slopes, dtype=torch.float64)


def _softmax(scores: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> State:
    """Softmax and values: scores [heads, rows, tokens] with -inf where masked; v [tokens, kv heads, dim]."""
    logits = scores
    if sinks is not None:
        sink = sinks.double().reshape(-1, 1, 1).expand(scores.shape[0], scores.shape[1], 1)
        logits = torch.cat([scores, sink], -1)
    lse = torch.logsumexp(logits, -1)  # [heads, rows]; -inf if nothing is visible
    p = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))

    def times(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        heads, rows, tokens = weights.shape
        num_kv_heads, dim = values.shape[1:]
        groups = weights.reshape(num_kv_heads, heads // num_kv_heads, rows, tokens)
        return torch.einsum("hgrt,thd->rhgd", groups, values).reshape(rows, heads, dim)

    return State(times(p, v), lse.T * LOG2_E, times(p, v.abs()), times(p * p, v * v).sqrt())


def _scale_of(scale: torch.Tensor | float, request: int) -> torch.Tensor | float:
    """Broadcasts over [rows, heads, head_dim]."""
    if not isinstance(scale, torch.Tensor):
        return scale
    return (scale[request] if scale.dim() == 2 else scale).double().reshape(1, -1, 1)
