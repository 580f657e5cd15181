"""The allowed error of a kernel against the fp64 reference, derived from the roundings of the numerical contract.

Inputs are compared as stored, so they carry no error. These roundings remain.

* Weights p enter the second product as 16-bit numbers if q is 16-bit (unit roundoff u: 2^-8 for bf16, 2^-11 for
  fp16, which also stands for fp8), and the output is rounded to its type; u is the larger of the two. So an element is
  off by at most u * sum(p |v|) + u * |out|. The errors of the weights are independent, so the norm of one row of one
  head is off by about u / sqrt(3) times the norm of sqrt(sum((p v)^2) + out^2); if one weight dominates it reaches u
  times that.
* A score is a sum of head_dim products in fp32, then scaled, capped or shifted. Its absolute error s moves its weight
  by the factor 1 +- s, and the lse by at most s.
* On cards, prefill with bf16 or e4m3 weights takes the card's tanh for a soft cap (approximates_tanh): a capped score
  is then off by 2^-11 of itself.
* RoPE rounds rotated q and k to q's type (fp8: to fp16). Each rounding is off by about 0.4 u, so a score by 0.6 u times
  the root of the sum of (q k)^2, which is the spread of scores in the mean. Five standard deviations are allowed, of
  rows where that sum is four of its own above its mean; positions times frequencies are fp32 angles.
* Latent rows in fp8 with scales that are no powers of two are rounded to q's type, as keys and as values (but see
  has_e4m3_scores), and so may be rows of K and V in formats with scales of tokens. Rotated queries are rounded to q's
  type.

Some cards multiply fp8 queries with fp8 keys, and probabilities as fp8 with fp8 values (has_fp8_products). Then:

* u of the weights is e4m3's 2^-4; those below 2^-13 of the row's largest are subnormal, off by at most 2^-17 of it.
* Tensor cores keep 13 bits below the largest of a sum's terms and cut off the rest. That is u = 2^-13 for a score's
  sum; sums of values are cut once for each 32 tokens, always towards zero, so it adds up.

Hopper multiplies queries in bf16, as two terms in e4m3, with latent rows in e4m3 (has_e4m3_scores). The sum of the
terms is exact, but for elements below 2^-9 of the largest. Each 32 products cut off the sum of a score in the same way,
so it is off by up to head_dim / 32 times 2^-13 of the scores' spread.

An fp32 output next to 16-bit weights is off by the weights' errors alone. If it was rounded to 16 bits on its way, the
sum of both errors may still be within these limits: has_16_bits sees that by the bits themselves.

Outputs of e4m3 are compared after the division by their scale, and the other errors grow by it. Rounding them is off by
2^-4 of the output, or 2^-10 if it is subnormal; u of the weights is q's.

fp32 has u = 2^-24 and the same formulas. Each limit is the formula's value times a slack named below.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from cases.case import Case
from planner_batches import typical_rows
from reference import LOG2_E, State

from flashpage.kernels import latent_e4m3_sm90, latent_formats
from flashpage.kernels.devices import Device

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FP32 = 2.0**-24
E4M3, E4M3_SUBNORMAL, FP8_SUMS = 2.0**-4, 2.0**-10, 2.0**-13
TANH = 2.0**-11  # tanh.approx, relative
ROW_SLACK = 1.25  # a row whose dominant weights all fall just above a power of two
SUM_SLACK = 4.0  # fp32 sums of n terms err by about sqrt(n) units; four standard deviations


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on |error| for each quantity that is compared."""

    row: torch.Tensor  # norm over head_dim, [rows, num_q_heads]
    element: torch.Tensor  # [rows, num_q_heads, head_dim_vo]
    lse: torch.Tensor  # [rows, num_q_heads], base-2 units


def has_fp8_products(case: Case, card: Device) -> bool:
    """Whether a card multiplies in fp8: e4m3, more rows than decode takes; prefill_sm90 (kernels/prefill_sm90.py)
    only what it loads by boxes."""
    if "fp8 mma" not in card.abilities or (card.widens_fp8 and not card.has_wgmma):
        return False
    is_e4m3 = case.q_dtype == case.kv_type == "float8_e4m3fn"
    is_whole = not card.has_wgmma or case.entry not in ("decode", "paged", "sink") or case.page_size % 8 == 0
    has_dims = all(dim % 32 == 0 and dim <= 256 for dim in (case.head_dim, case.value_dim))
    return is_e4m3 and is_whole and has_dims and _is_prefill(case) and not case.mask and case.position != "ROPE_LLAMA"


def approximates_tanh(case: Case, card: Device) -> bool:
    """Whether a kernel that is limited by arithmetic may compute a soft cap with tanh.approx: its weights are not fp16.
    attention_sm80 has such a loop for more than 16 rows, prefill_sm90 for more than decode_sm90 takes."""
    is_bf16 = case.q_dtype == "bfloat16" and case.kv_type != "float32"  # narrower K and V may be widened before
    takes_it = bool(case.soft_cap) and card.sm > 0 and _is_prefill(case, 16)
    return takes_it and (is_bf16 or has_fp8_products(case, card))


def has_e4m3_scores(case: Case, card: Device) -> bool:
    """Whether latent_e4m3_sm90 takes a case."""
    has_format = bool(case.row_format) and (case.packed_format or latent_formats.SCALED) in latent_e4m3_sm90.FORMATS
    has_dims = case.value_dim in (256, 512) and case.head_dim - case.value_dim in (0, 64)
    return card.has_wgmma and has_format and has_dims and case.q_dtype == "bfloat16"


def _is_prefill(case: Case, few_rows: int = 64) -> bool:
    """Whether there are more packed rows a request than kernels for few rows take."""
    is_invariant, group = case.fixed_split_size and case.entry != "decode", case.num_q_heads // case.num_kv_heads
    if is_invariant:
        return group > 1
    return group * typical_rows(case.q_lens, case.kv_lens, group=group, window_left=case.window_left) > few_rows


def limits(
    case: Case,
    expected: State,
    *,
    fp8_products: bool = False,
    e4m3_scores: bool = False,
    approximate_tanh: bool = False,
) -> Limits:
    """The limits of one request of a case, from the sums that the reference returns."""
    unit = max(_query_unit(case), UNIT.get(case.out_type, 0.0))
    score = score_error(case, fp8_products=fp8_products, e4m3_scores=e4m3_scores, approximate_tanh=approximate_tanh)
    most = max(max(case.kv_lens), 1)
    if fp8_products:
        weight = max(unit, E4M3) + score + FP8_SUMS * math.ceil(most / 32)
    else:
        weight = unit + score + SUM_SLACK * FP32 * math.sqrt(most)
    if case.has_uneven_scales:
        weight += unit  # values are rounded as keys are
    is_half = case.has_fp8_query or "float16" in (case.q_dtype, case.out_type)
    subnormal = 2.0**-17 if fp8_products else 2.0**-24
    smallest = subnormal * math.sqrt(most) / case.out_divisor if is_half else 1e-30  # subnormal weights
    rounding = weight  # of outputs in a row; as for independent errors of weights
    if case.out_type == "float32" and case.q_dtype != "float32":
        rounding = unit = FP32
    if case.has_fp8_output:
        rounding = unit = E4M3
        smallest += E4M3_SUBNORMAL
    spread = (expected.spread.square() + (rounding / weight * expected.out).square()).sum(-1).sqrt()
    row = ROW_SLACK * weight * spread + smallest * math.sqrt(case.value_dim)
    element = 1.05 * weight * expected.magnitude + 1.05 * unit * expected.out.abs() + smallest
    finite = torch.where(expected.lse.isinf(), 0.0, expected.lse.abs())
    lse = LOG2_E * score + SUM_SLACK * FP32 * (math.sqrt(max(case.kv_lens)) + finite)
    return Limits(row, element, lse)


def has_16_bits(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Which rows of an fp32 output [rows, num_q_heads, head_dim_vo], as fp64, were rounded to bf16 or fp16 in a
    sixteenth of their elements or more: of other results, one in 8192 has no more bits than fp16 by chance. Elements
    that are expected next to such a number do not count, as the value of the only token of a row."""
    counts = _from_fp16(expected) > 2.0**-3
    rounded = counts & (_from_fp16(out) == 0)
    return (counts.sum(-1) >= 16) & (16 * rounded.sum(-1) >= counts.sum(-1))


def sees_few_tokens(expected: State) -> torch.Tensor:
    """Which rows are a sum of at most two tokens' values, [rows, num_q_heads]: only there a + b, whose squares have the
    sum c, is the root of c + 2 a b, for all columns."""
    squares, products = expected.spread.square(), expected.magnitude.square()
    difference = (expected.out.square() - squares).abs() - (products - squares)
    return (difference.abs() <= 1e-9 * squares).all(-1)


def _from_fp16(numbers: torch.Tensor) -> torch.Tensor:
    """The distance to the next number of fp16's 11 bits, which bf16's are among, in units of the last one."""
    bits = torch.frexp(numbers).mantissa * 2.0**11
    return (bits - bits.round()).abs()


def score_error(
    case: Case, *, fp8_products: bool = False, e4m3_scores: bool = False, approximate_tanh: bool = False
) -> float:
    """Absolute error of one score in natural-log units; q and k are normal, and q's standard deviation is 1."""
    scale, squares = abs(case.score_scale) * (1.6 if case.scales else 1.0), case.key_squares
    spread = scale * math.sqrt(sum(squares))  # standard deviation of a score
    largest = 6 * spread if not case.soft_cap else min(6 * spread, case.soft_cap)
    sums = FP8_SUMS if fp8_products else FP32
    products = SUM_SLACK * sums * math.sqrt(case.head_dim) * spread + 4 * FP32 * largest
    if e4m3_scores:
        products += FP8_SUMS * case.head_dim / 32 * spread
    transforms = 0.0
    if case.soft_cap:
        transforms += 8 * FP32 * case.soft_cap  # tanh within a few units of its largest value
    if approximate_tanh:
        transforms += TANH * largest
    if case.position == "ALIBI" or case.variant:
        transforms += 8 * FP32 * max(case.kv_lens)  # slope times distance, added to the score
    # Squares of products of two normal numbers have mean 1 and variance 8.
    columns = sum(squares) ** 2 / max(sum(square * square for square in squares), 1e-30)  # that decide the score
    rounded = spread * math.sqrt(1.0 + 4.0 * math.sqrt(8.0 / max(columns, 1.0))) * _query_unit(case)
    if case.has_uneven_scales:
        transforms += 2.0 * rounded
    if "_rotated" in case.kv_format:
        transforms += 3.0 * rounded
    if case.position == "ROPE_LLAMA":
        transforms += 3.0 * rounded + spread * 4 * FP32 * max(*case.kv_lens, *case.q_lens)
    return products + transforms


def _query_unit(case: Case) -> float:
    """The unit roundoff of the type in which queries are computed; fp8 queries are computed in fp16."""
    return UNIT["float16" if case.has_fp8_query else case.q_dtype]
