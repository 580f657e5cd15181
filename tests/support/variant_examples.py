"""The documentation's variants over small captured tensors, and a callable for every traced operation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from flashpage.variants import alibi_slopes

HEADS, TOKENS, BATCH = 6, 48, 3
_generator = torch.Generator().manual_seed(3)

BIAS = torch.randn(HEADS, TOKENS, TOKENS, generator=_generator)
DOCUMENT = torch.sort(torch.randint(0, 4, (BATCH, TOKENS), generator=_generator))[0]
PREFIX = torch.tensor([7, 0, 30], dtype=torch.int32)
SLOPES = alibi_slopes(HEADS)
START = torch.tensor([0, 5, 11])  # start of each request in FLAT
FLAT = torch.randn(TOKENS + 16, generator=_generator)
CAP = 20.0
WINDOW = 9


@dataclasses.dataclass(frozen=True)
class Example:
    """A callable of either kind; `tolerance` is relative to 1 + |score|."""

    name: str
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    tolerance: float = 3e-6
    elementwise: Callable[..., Any] | None = None  # score_mod for whole tensors, if it differs


def tensor_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + BIAS[h, q_idx, kv_idx]


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


def computed_alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / HEADS))


def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return CAP * torch.tanh(score / CAP)


def document_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx]


def prefix_lm_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx) | (kv_idx < PREFIX[b])


def causal_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx <= WINDOW


def _branch_on_captured(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if WINDOW > 4 and WINDOW * 2 < 100:  # WINDOW is captured: Python evaluates the branch
        score = score * math.sqrt(CAP)
    for i in range(WINDOW // 4):
        score = score + i * h
    return score


def _reuse(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    for _ in range(30):  # 2^30 terms if each use were written out
        score = (score + score) * 0.5
    return score


def _torch_functions(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.add(torch.mul(score, 2.0), torch.sub(kv_idx, q_idx, alpha=3), alpha=2) + torch.div(score, 3.0)


def _constants(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(kv_idx > 3, b.new_ones((), dtype=torch.bool), torch.zeros_like(q_idx, dtype=torch.bool))


def _scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, factor: float = 0.5, *, shift: int = 2) -> Any:
    return score * factor + shift


def _rows(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(TOKENS) * 5 % 13 - 6).to(dtype)


def _load(dtype: torch.dtype) -> Callable[..., Any]:
    row = _rows(dtype)
    return lambda s, b, h, q, k: s + row[k] * 2 + row[q].float()


FLAGS = torch.arange(TOKENS) % 3 == 0
STRIDED = torch.randn(TOKENS, HEADS, 2, generator=_generator).permute(1, 2, 0)[:, 1]  # [HEADS, TOKENS], with gaps
FOUR = torch.randn(BATCH, HEADS, 4, 5, generator=_generator)
SMALL_HALVES = (torch.randn(TOKENS, generator=_generator) * 1e-5).half()  # fp16 subnormals are among them
HUGE_HALVES = torch.tensor([float("inf"), -float("inf"), 65504.0, -0.0] * (TOKENS // 4)).half()
PERIODS, LEAST = torch.tensor([0, 3, -1], dtype=torch.int32), torch.full((BATCH,), -(2**31), dtype=torch.int32)
ZERO_DIM, ZERO_DIM_COUNT = torch.tensor(1.75), torch.tensor(3)


def _divided(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Divides integers, also by 0 and -2^31 by -1 where the result is not used."""
    period, least = PERIODS[b], LEAST[b] + kv_idx * 0
    by_request = q_idx // period + q_idx % period + LEAST[b] // period + LEAST[b] % period
    by_token = kv_idx // period + kv_idx % period + least // period + least % period
    return torch.where(period > 0, score + (by_request + by_token), score)


def _divided_where_used(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    period, least = PERIODS.clamp(min=1)[b], LEAST[b]
    sums = [x // period + x % period for x in (q_idx, kv_idx, least, least)]
    return torch.where(PERIODS[b] > 0, score + sum(sums), score)


DOCUMENTED = [
    Example("tensor_bias", tensor_bias),
    Example("alibi", alibi),
    Example("computed_alibi", computed_alibi),
    Example("soft_cap", soft_cap),
    Example("document_mask", mask_mod=document_mask),
    Example("prefix_lm_mask", mask_mod=prefix_lm_mask),
    Example("both", soft_cap, document_mask),
    Example("flat_bias", lambda s, b, h, q, k: s + FLAT[START[b] + k]),
    Example("combined_masks", mask_mod=and_masks(causal_mask, or_masks(window_mask, document_mask))),
]

OPERATIONS = [
    Example("identity", lambda s, b, h, q, k: s),
    Example("constant", lambda s, b, h, q, k: 1.5),
    Example("add_sub_mul", lambda s, b, h, q, k: 2 + s * 3.5 - (k - q) * 2 - (1 - s)),
    Example("negate_abs", lambda s, b, h, q, k: -s + abs(s) + (q - k).abs() + torch.abs(s) + abs(-k) + +h),
    Example("div", lambda s, b, h, q, k: s / 7 + k / 3 + 1 / (k + 1) + k / (s * s + 1.0)),
    Example("floor_div_int", lambda s, b, h, q, k: s + (k - q) // 5 + (q - k) // -3 + 7 // (k + 1)),
    Example("mod_int", lambda s, b, h, q, k: s + (k - q) % 5 + (q - k) % -3 + 100 % (k + 1)),
    Example("division_by_zero", _divided, elementwise=_divided_where_used),
    Example("floor_div_mod_float", lambda s, b, h, q, k: s // 3.0 + s % 3.0 - (-s) % 2.5, tolerance=1e-5),
    Example(
        "powers",
        lambda s, b, h, q, k: s**2 + s**3 / 50 + k**2 + (1.0 + k) ** -2 + (s * s + 1.0) ** 0.5 + s**0,
        tolerance=3e-5,
    ),
    Example("power_of_constant", lambda s, b, h, q, k: 2.0 ** (-0.5 * h) + torch.pow(1.5, s / 10)),
    Example(
        "comparisons", mask_mod=lambda b, h, q, k: (k < q) ^ (k <= 5) ^ (k > 2 * q) ^ (k >= 9) ^ (k == 11) ^ (q != 4)
    ),
    Example("float_comparison", lambda s, b, h, q, k: torch.where(s < 0.5, s, 2) + torch.where(k > s, 1.0, 0.0)),
    Example("logic", mask_mod=lambda b, h, q, k: ~((k < q) & (h > 2)) | ((k == q) ^ (b == 1))),
    Example(
        "logic_named",
        mask_mod=lambda b, h, q, k: torch.logical_or(torch.logical_not(k < q), torch.logical_and(h, b == 1)),
    ),
    Example("bits", mask_mod=lambda b, h, q, k: (((k & 6) | (q << 1)) ^ ~h) >> 1 & 1),
    Example(
        "bool_arithmetic",
        lambda s, b, h, q, k: s * (k < q) + (k > 3) * 2 + ((k > 3) + (q > 3)) + (k > 5) * (q > 9),
    ),
    Example("bool_equality", mask_mod=lambda b, h, q, k: (k < 5) == (q < 5)),
    Example("where", lambda s, b, h, q, k: torch.where(k > q, -1e4, torch.where(h == 2, s, k))),
    Example("where_infinity", lambda s, b, h, q, k: torch.where(q - k > 4, -float("inf"), s)),
    Example(
        "exp_log",
        lambda s, b, h, q, k: torch.exp(-s.abs()) + torch.log(s * s + 1) + (k + 1).log() + torch.exp(s / 8),
        tolerance=5e-6,
    ),
    Example("exp2_log2", lambda s, b, h, q, k: torch.exp2(s / 16) + torch.log2(1.0 + k), tolerance=5e-6),
    Example(
        "tanh_sigmoid",
        lambda s, b, h, q, k: torch.tanh(s) + torch.sigmoid(s) + torch.tanh(s * 1e-3) * 1e3 + k.sigmoid(),
    ),
    Example("sqrt_rsqrt", lambda s, b, h, q, k: torch.sqrt(s.abs()) + torch.rsqrt(k + 1.0) + torch.sqrt(k)),
    Example("floor_ceil", lambda s, b, h, q, k: torch.floor(s) - torch.ceil(s) * 2 + torch.floor(k)),
    Example(
        "min_max",
        lambda s, b, h, q, k: torch.minimum(s, s * 2) + torch.maximum(k, q) + torch.maximum(s, k) + torch.minimum(h, b),
    ),
    Example("clamp", lambda s, b, h, q, k: s.clamp(-3, 5) + torch.clamp(k, max=9) + s.clamp(min=0.5) + torch.relu(s)),
    Example("square_reciprocal", lambda s, b, h, q, k: torch.square(k) + torch.reciprocal(k + 2.0) + torch.neg(s)),
    Example(
        "conversions",
        lambda s, b, h, q, k: s.to(torch.int32) + k.float() / 3 + (s > 0).to(s.dtype) + s.int() + (k % 2).bool(),
    ),
    Example("functions_by_name", _torch_functions),
    Example(
        "comparisons_by_name",
        mask_mod=lambda b, h, q, k: torch.ge(k, 2) & torch.lt(k, q) | torch.eq(k, h) & torch.ne(b, 1),
    ),
    Example("constants", mask_mod=_constants),
    Example("mask_of_integer", lambda s, b, h, q, k: s, lambda b, h, q, k: k % 4),
    Example("branch_on_captured", _branch_on_captured, tolerance=1e-5),
    Example("reuse", _reuse),
    Example("defaults", _scaled),
    Example("partial", functools.partial(_scaled, factor=3.0, shift=-4)),
    Example("load_float32", _load(torch.float32)),
    Example("load_float16", _load(torch.float16)),
    Example("load_bfloat16", _load(torch.bfloat16)),
    Example("load_int8", _load(torch.int8)),
    Example("load_int16", _load(torch.int16)),
    Example("load_int32", _load(torch.int32)),
    Example("load_int64", _load(torch.int64)),
    Example(
        "load_bool",
        lambda s, b, h, q, k: torch.where(FLAGS[k], s, s * 2) + FLAGS[q],
        lambda b, h, q, k: FLAGS[k] & ~FLAGS[q],
    ),
    Example("load_half_subnormal", lambda s, b, h, q, k: SMALL_HALVES[k].float() * 1e5 + s),
    Example("load_half_infinity", lambda s, b, h, q, k: torch.maximum(HUGE_HALVES[k], s)),
    Example("load_strided", lambda s, b, h, q, k: s * STRIDED[h, k]),
    Example("load_rank_4", lambda s, b, h, q, k: s + FOUR[b, h, q % 4, k % 5]),
    Example(
        "load_row_by_row",
        lambda s, b, h, q, k: s + FOUR[b][h][q % 4, k % 5],
        elementwise=lambda s, b, h, q, k: s + FOUR[b, h, q % 4, k % 5],
    ),
    Example("load_constant_index", lambda s, b, h, q, k: s + FOUR[1, h, -1, k % 5] + FOUR[b, 2, k % 4, 0]),
    Example("load_captured_index", lambda s, b, h, q, k: s + BIAS[h, WINDOW, k]),
    Example("load_nested", lambda s, b, h, q, k: s + FLAT[START[b] + DOCUMENT[b, k]]),
    Example("zero_dim", lambda s, b, h, q, k: s * ZERO_DIM + ZERO_DIM_COUNT + SLOPES[2]),
    Example("computed_tensor", lambda s, b, h, q, k: s + (SLOPES * 2)[h] + BIAS.transpose(1, 2)[h, q, k]),
]


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Counts up, of any shape."""
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)
