"""Many rows on Hopper: two warpgroups of 64 rows compute (three if rows are short), one warpgroup loads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from .. import native
from ..base.dtypes import DType
from ..variants.source import soft_cap
from ..variants.spec import VariantSpec
from . import prefill_tokens, wgmma_source
from .ahead import BF16, E4M3, FP16, HEAD_DIMS, ONE_TOKEN, RAGGED, Ahead, more
from .context_classes import ANY_ROWS, ContextClass, Padding, context_row
from .devices import Device
from .kernel import (
    COLUMNS,
    FP8,
    HALF,
    NARROW,
    AttentionKernel,
    attention_traits,
    capability,
    dtypes,
    head_dims,
    no_kv_formats,
    no_latent_rows,
    no_rope_over_fp8,
    tanh_trait,
)
from .options import Options
from .prefill_tokens import CONVERTED, STORED, TRANSPOSED, rotated_tokens, shape_of, tokens_of, whole_columns
from .spec import KernelSpec
from .tensor_maps import boxes_or_rows
from .tile import MERGE_ITEM_ROWS, Cost, Tile
from .work import InnerLoop, Work, inner_loop


@dataclasses.dataclass(frozen=True)
class _ShortTile:
    """The tokens of a tile for rows that see few, of one pair of head dims (docs/tried.md)."""

    tokens: int
    most_seen: float  # tokens that a row sees, on average; 0: only windows take the tile
    most_in_window: int  # tokens that the rows of a unit see if there is a window; 0: no limit by windows
    most_of_few: float = 0.0  # as most_seen, if packed rows make at most two units for each SM


# The shorter tiles of wide heads leave room for Q of two units, so that a unit starts while the one before ends.
_SHORT_TILES = {
    (128, 128): _ShortTile(128, 320, 0, most_of_few=640),
    (192, 128): _ShortTile(96, 1024, 1152),
    (256, 256): _ShortTile(48, 0, 600),
}
PAIRS_NOTE = "two CTAs of a cluster read K and V together, each with half of the rows; they count as one CTA below"
SHORT_NOTE = "rows see few tokens: tiles of fewer tokens"
FEW_NOTE = "rows are few: one warpgroup computes, and an SM has two CTAs"


def _tile(work: Work) -> Tile:
    """Stages fill the shared memory: at most three if loading warps convert or transpose, because K and V are there
    twice; one more stage of K than of V if they rotate."""
    options, loader = work.options, _loader(work.options)
    shape = shape_of(work, loader)
    if loader in _OF_FP8:
        return _two_groups(tokens_of(TRANSPOSED, work, shape), 4 if loader == COLUMNS else 3)
    if loader == "converted":
        return _two_groups(tokens_of(CONVERTED, work, shape), 3)
    tokens = tokens_of(STORED, work, shape)
    if work.rotates:
        return _two_groups(rotated_tokens(options.head_dim_qk, loader, tokens), 3 if work.widest <= 64 else 2)
    # Tall tiles: three warpgroups, 192 rows, keep the special-function unit busier.
    is_light = {"light", "whole"} <= shape.facts and "function" not in shape.facts
    is_capped = _only_caps(work.variant) and options.q_dtype is not DType.FLOAT16 and is_light
    fits_capped = work.widest <= 128 and is_capped and loader == "boxes" and not options.has_mask
    fits_narrow = work.widest <= 96 and "light" in shape.facts and "heavy function" not in shape.facts
    usual_is_tall = (fits_narrow or fits_capped) and _has_whole_groups(options)
    other_is_tall = not usual_is_tall and _other_may_be_tall(options) and "light" in shape.facts
    is_other = work.problem.contexts is ContextClass.OTHER_HEIGHT
    if other_is_tall if is_other else usual_is_tall:
        if work.widest <= 64:
            return Tile(192, 96, 12, 1, 4)
        return Tile(192, 64 if "bits by rows" in shape.facts else 80, 12, 1, 3)
    return _two_groups(tokens, 2)


def _only_caps(variant: VariantSpec) -> bool:
    """Whether scores are computed on by a soft cap alone: another stage before it takes registers, too."""
    return bool(soft_cap(variant)) and "\n" not in variant.logit


def _two_groups(tokens: int, stages: int) -> Tile:
    return Tile(128, tokens, 8, 1, stages)


_OF_FP8 = ("transposed", COLUMNS)  # loaders of kernels whose factors are e4m3

# The fraction of the card's 16-bit throughput that products reach: 690 of 989 TFLOP/s on an H200. Of V by columns:
# so that plans predict the times measured next to those of `transposed`, without the launch ahead (docs/tried.md).
_REACHED = {"transposed": 0.9909, COLUMNS: 1.061}
_REACHED_16_BIT, _REACHED_ROTATING = 0.71752, 0.46127
# Cost of a unit in addition to its tokens and to the hidden tokens of its last tile: ns a column, fitted to the times
# at which CTAs end (docs/tried.md).
_NS_OF_UNIT = {"rows": 17.0, "converted": 20.0, "transposed": 8.0, COLUMNS: 8.0}
_CAP_COLUMNS = 100.0  # a soft cap takes as long as the products of so many columns


def _cost(work: Work, tile: Tile) -> Cost:
    loader, card = _loader(work.options), work.card
    reached = _REACHED.get(loader, _REACHED_ROTATING if work.rotates else _REACHED_16_BIT)
    products_ns = work.columns * tile.tile_q * 2 / (card.sm_flops_per_ns * reached)
    ns_per_unit = work.columns * _NS_OF_UNIT.get(loader, 13.5)
    if work.rotates:
        ns_per_unit += 4.0 * work.options.head_dim_qk  # for Q
    return Cost(
        heads_on_axis=True,
        ns_per_token=products_ns + (_CAP_COLUMNS / work.columns * products_ns if soft_cap(work.variant) else 0.0),
        ns_per_unit=ns_per_unit,
        ns_per_piece=2500.0,
        min_piece_tokens=256,
        merge_rows=MERGE_ITEM_ROWS,
        # Requests that wait for memory need few SMs: 128 requests of one row and 8,192 tokens take as long on 96 of an
        # H200's 132 SMs as on all. By this a prefill of 4,096 rows in the same batch gets 36 SMs (with 1.0: 29).
        few_rows_cost=min(1.0, 1.389 * card.full_speed_share),
        # If units are cut, a launch takes 8 to 16 us more than its costliest CTA, otherwise 5 us more.
        ns_per_merge=10_000.0,
    )


def _loader(options: Options) -> str:
    if not options.kv_dtype.is_fp8:
        return boxes_or_rows(options)
    dims = (options.head_dim_qk, options.head_dim_vo)
    is_e4m3 = options.q_dtype is options.kv_dtype is DType.FLOAT8_E4M3
    is_whole = all(dim % 32 == 0 for dim in dims) and boxes_or_rows(options) == "boxes"
    if is_e4m3 and is_whole and not options.has_mask:
        return COLUMNS if options.has_value_columns else "transposed"
    return "converted"


def visits_tiles(options: Options) -> bool:
    """Whether the kernel skips tiles of a mask that no row sees, which another kernel finds before."""
    return prefill_tokens.visits_tiles(options, _loader(options))


# Tokens that a row sees x group size. CTAs in pairs read K and V once for both, which takes 2 to 5% less time (more for
# fp8: docs/tried.md), but they compute on 64 / group_size more hidden tokens a unit if masks are causal.
_LONG_CONTEXT, _LONG_FP8_CONTEXT = 3200, 1600
_WIDEST_OF_PAIRS = 192
# Half of a request's last pair may be unused. So pairs may compute so many times as much as single CTAs, and more where
# a row sees so many tokens (docs/tried.md).
_MOST_OF_PAIRS = 1.04
_MANY_TOKENS, _MOST_OF_MANY_TOKENS = 2048, 1.1
_FEW_ROWS_OF_SM = 2 * 128  # packed rows that make two units for each SM
# Tokens that a row sees if packed rows make at most one unit for each half of an SM: 10 to 20% less time
# (docs/tried.md). Longer units are cut anyway, and two warpgroups in one CTA compute faster than two CTAs.
_ROWS_OF_HALVES = 64  # packed rows of each of two CTAs on an SM: those of one warpgroup
_CONTEXT_OF_FEWEST, _FEWEST_ROWS_OF_SM = 1200, 2 * _ROWS_OF_HALVES
_CONTEXT_OF_HALVES = 160  # tokens that a row sees with which two CTAs on an SM are faster, however many rows there are
_WIDEST_OF_HALVES = 192  # accumulators of wider heads take more than half of an SM's registers
# Tokens that a row sees from which units of wide heads are full, if whole rows of a group would leave out so many
# packed rows of a tile (docs/tried.md).
_CONTEXT_OF_FULL_UNITS, _ROWS_LEFT_OUT = 8192, 5
# When tiles of another height replace the usual ones: the least tokens that a row sees, and the most that they compute
# next to usual tiles (docs/tried.md). Tiles of 128 rows replace tall ones of 192 that are hardly full. Tall ones
# replace usual tiles, or pairs of them (256 rows), if a request has a tile less then: K and V are read once less, too.
_SHORTER = ((512, Padding(128, 192, 0.92)),)
_TALLER = ((512, Padding(192, 128, 0.8)), (8192, Padding(192, 256, 0.8)))
# The group size from which tall tiles pay under short windows, unless they are much emptier: they make fewer units, and
# a unit starts and ends in the time of some 280 tokens, but those of short appends compute half as much again. The
# smaller the group is, the more tokens the rows of a unit span.
_GROUP_OF_WINDOWS, _TALL_OF_WINDOWS = 4, Padding(192, 128, 1.1)


def _context_rows(options: Options, card: Device) -> list[native.ContextRow]:
    if options.is_latent:
        return []
    is_fp8, group = options.q_dtype.is_fp8 and options.kv_dtype.is_fp8, options.group_size
    least_tokens = (_LONG_FP8_CONTEXT if is_fp8 else _LONG_CONTEXT) / group
    has_short_window = 0 <= options.window_left < least_tokens - 1
    prefill_rows = math.nextafter(64 / group, math.inf)  # of a request, at least; fewer are decode
    rows = []
    if _has_tiles_of_few(options):
        few = _FEWEST_ROWS_OF_SM * card.sms // options.num_q_heads
        rows.append(context_row(ContextClass.FEW, few, prefill_rows, most_tokens=_CONTEXT_OF_FEWEST))
        rows.append(context_row(ContextClass.FEW, ANY_ROWS, prefill_rows, most_tokens=_CONTEXT_OF_HALVES))
    short_rows = _short_rows(options, card, prefill_rows)
    are_wide = max(options.head_dim_qk, options.head_dim_vo) > 128
    if are_wide:  # their short tiles gain more than pairs
        rows += short_rows
    usual_tile = 192 if _usual_may_be_tall(options) else 128
    if has_short_window and group >= _GROUP_OF_WINDOWS and _other_may_be_tall(options):
        two_windows = 2.0 * (options.window_left + 1)  # from there on most rows see the whole window
        tall = ContextClass.OTHER_HEIGHT, ANY_ROWS, prefill_rows
        rows.append(context_row(*tall, least_tokens=two_windows, padding=_TALL_OF_WINDOWS))
    if options.window_left < 0:
        others = _SHORTER if usual_tile > 128 else _TALLER if _other_may_be_tall(options) else ()
        rows += [
            context_row(ContextClass.OTHER_HEIGHT, ANY_ROWS, prefill_rows, least_tokens=least, padding=other)
            for least, other in others
        ]
    if max(options.head_dim_qk, options.head_dim_vo) > _WIDEST_OF_PAIRS:
        if 128 - whole_rows(128, group) >= _ROWS_LEFT_OUT and options.window_left < 0:
            rows.append(context_row(ContextClass.LONG, ANY_ROWS, prefill_rows, least_tokens=_CONTEXT_OF_FULL_UNITS))
    elif not has_short_window and _has_pairs(options.kv_source, usual_tile, options.head_dim_vo):
        many_tokens = max(least_tokens, _MANY_TOKENS)
        for least, most in ((least_tokens, _MOST_OF_PAIRS), (many_tokens, _MOST_OF_MANY_TOKENS)):
            pairs = Padding(2 * usual_tile, usual_tile, most)
            rows.append(context_row(ContextClass.LONG, ANY_ROWS, prefill_rows, least_tokens=least, padding=pairs))
    return rows if are_wide else rows + short_rows


def _short_rows(options: Options, card: Device, prefill_rows: float) -> list[native.ContextRow]:
    """The batches that take the head dims' short tile, in kernels that load boxes and only scale scores. Others have
    none, so that no kernel is prepared twice, and pairs are not left out."""
    short, variant = _SHORT_TILES.get((options.head_dim_qk, options.head_dim_vo)), options.variant
    on_scores = options.has_soft_cap or (variant is not None and bool(variant.score_mod or variant.logit))
    is_plain = not (on_scores or options.has_mask or options.position_encoding != "NONE")
    if short is None or not is_plain or _loader(options) != "boxes":
        return []
    row = functools.partial(context_row, ContextClass.SHORT, least_rows_of_request=prefill_rows)
    in_unit = options.window_left + 1 + 128 / options.group_size  # tokens that the rows of a unit see, if causal
    if options.causal and options.window_left >= 0 and in_unit <= short.most_in_window:
        return [row(ANY_ROWS)]
    rows_of_two_units = int(_FEW_ROWS_OF_SM * card.sms / options.num_q_heads)
    limits = ((rows_of_two_units, short.most_of_few), (ANY_ROWS, short.most_seen))
    return [row(most_rows, most_tokens=most) for most_rows, most in limits if most]


def _has_whole_groups(options: Options) -> bool:
    """Whether tall tiles hold whole groups of heads if those of two warpgroups do, so that boxes bring Q."""
    return 192 % options.group_size == 0 or 128 % options.group_size != 0


def _usual_may_be_tall(options: Options) -> bool:
    """Whether the usual tile may be tall. A variant of the user's may have a soft cap, which is not known here."""
    widest, rotates = max(options.head_dim_qk, options.head_dim_vo), options.position_encoding == "ROPE_LLAMA"
    has_more = options.has_mask or options.position_encoding == "ALIBI" or options.variant is not None
    is_capped = options.has_soft_cap and options.q_dtype is not DType.FLOAT16 and not has_more
    is_whole = options.head_dim_qk % 64 == options.head_dim_vo % 64 == 0
    is_known = widest <= 96 or (widest <= 128 and is_capped and is_whole and _loader(options) == "boxes")
    return is_known and not rotates and not options.kv_dtype.is_fp8 and _has_whole_groups(options)


def _other_may_be_tall(options: Options) -> bool:
    """Whether tall tiles may replace usual ones of two warpgroups. They take 1.1 times as long for a row; with the
    loader of single rows they would spill."""
    widest = max(options.head_dim_qk, options.head_dim_vo)
    is_plain = not (options.has_mask or options.needs_variant or options.position_encoding == "ROPE_LLAMA")
    fits = 96 < widest <= 128 and _loader(options) == "boxes" and not options.kv_dtype.is_fp8
    return fits and is_plain and _has_whole_groups(options)


def _has_tiles_of_few(options: Options) -> bool:
    is_plain = not (options.has_mask or options.needs_variant or options.position_encoding != "NONE")
    is_narrow = max(options.head_dim_qk, options.head_dim_vo) <= _WIDEST_OF_HALVES
    has_whole_rows = options.group_size <= _ROWS_OF_HALVES  # a unit has only whole rows of the group
    return is_plain and not options.kv_dtype.is_fp8 and is_narrow and has_whole_rows


def _context_tile(spec: KernelSpec, contexts: ContextClass) -> tuple[Tile, str] | None:
    assert spec.tile is not None
    widest = max(spec.head_dim_qk, spec.head_dim_vo)
    loop = inner_loop(spec.mask_source, spec.position_encoding, spec.variant)
    is_plain = loop is InnerLoop.PLAIN and spec.loader == "boxes"
    if contexts is ContextClass.FEW and is_plain and spec.mask_source == "implicit" and widest <= _WIDEST_OF_HALVES:
        return _few_rows_tile(spec), FEW_NOTE
    if contexts is ContextClass.LONG and _may_pair(spec, loop, widest):
        return spec.tile.paired(), PAIRS_NOTE
    short = _SHORT_TILES.get((spec.head_dim_qk, spec.head_dim_vo))
    if contexts is ContextClass.SHORT and is_plain and short:
        return dataclasses.replace(spec.tile, tile_kv=short.tokens), SHORT_NOTE
    return None


def _few_rows_tile(spec: KernelSpec) -> Tile:
    """The tile for few rows: there are fewer rows than SMs times a usual tile, and a unit computes no longer than it
    waits at its start and end. Of two CTAs of one warpgroup, one computes while the other waits."""
    columns = sum(-(-dim // 64) * 64 for dim in (spec.head_dim_qk, spec.head_dim_vo))
    return Tile(_ROWS_OF_HALVES, 64 if columns <= 320 else 48, 4, 1, 2, ctas_per_sm=2)


def _may_pair(spec: KernelSpec, loop: InnerLoop, widest: int) -> bool:
    """Whether pairs of CTAs may share K and V. Tiles of masks are visited by single CTAs, and other effects of variants
    have not been tried with pairs. Wide heads, and narrow ones of 16 bits, gain nothing (docs/tried.md)."""
    is_light = spec.mask_source == "implicit" and loop in (InnerLoop.PLAIN, InnerLoop.TRANSFORM)
    gains = spec.loader in _OF_FP8 or (spec.loader == "boxes" and widest > 64)
    has_pairs = _has_pairs(spec.kv_source, spec.rows, spec.head_dim_vo)
    return is_light and gains and has_pairs and widest <= _WIDEST_OF_PAIRS


def _has_pairs(kv_source: str, rows: int, head_dim_vo: int) -> bool:
    """Three warpgroups of wide heads leave the loading warps too few registers for pages of pairs."""
    return kv_source == "ragged" or rows <= 128 or head_dim_vo <= 96


def whole_rows(packed_rows: int, group_size: int) -> int:
    """The rows of a tile that make whole rows of the group; all rows if that would leave out more than a tenth. Without
    boxes, Q and output take a sixth of a prefill's time (docs/tried.md)."""
    rest = packed_rows % group_size
    return packed_rows if rest * 10 > packed_rows else packed_rows - rest


def _whole_chunks(work: Work) -> str | None:
    """Refuses rows of fp8 that do not leave in pieces of 16 bytes."""
    options = work.options
    if options.head_dim_vo * options.out_dtype.size % 16 == 0:
        return None
    return f"head_dim_vo {options.head_dim_vo} is not a multiple of 16, which rows of {options.out_dtype.value} must be"


def _unit_rows(spec: KernelSpec, group_size: int, contexts: ContextClass) -> int:
    """The packed rows of a unit: whole rows of the group, if Q and output can then be loaded and stored by boxes."""
    is_full = contexts is ContextClass.LONG and max(spec.head_dim_qk, spec.head_dim_vo) > _WIDEST_OF_PAIRS
    if is_full or spec.loader == "converted" or spec.mask_source != "implicit":
        return spec.rows
    return whole_rows(spec.rows // spec.ctas, group_size) * spec.ctas


def _traits(spec: KernelSpec) -> tuple[str, ...]:
    product = wgmma_source.product_dtype(spec)
    return (
        *attention_traits(spec, product, product, "swizzled"),
        *tanh_trait(spec, product),
        *(f"using {name} = flashpage::{name};" for name in ("KeyProduct", "ShortKeyProduct", "ValueProduct")),
    )


_BOTH = (16, RAGGED)
_AHEAD = (
    *(Ahead(t, t, (d, d), 128) for t, d in itertools.product((BF16, FP16), HEAD_DIMS)),
    *(Ahead(BF16, BF16, dims, 128, RAGGED) for dims in ((64, 64), (128, 128), (256, 256), (192, 128))),
    Ahead(FP16, FP16, (128, 128), 128, RAGGED),
    *(Ahead(t, t, (128, 128), 128, contexts=ContextClass.LONG) for t in (BF16, FP16)),
    *(Ahead(BF16, BF16, (d, 128), 128, RAGGED, contexts=ContextClass.LONG) for d in (128, 192)),
    *(
        Ahead(BF16, BF16, (128, 128), 128, size, contexts=contexts)
        for size, contexts in itertools.product(_BOTH, (ContextClass.SHORT, ContextClass.FEW))
    ),
    Ahead(BF16, BF16, (192, 128), 128, RAGGED, contexts=ContextClass.SHORT),
    Ahead(BF16, BF16, (128, 128), 128, ONE_TOKEN),
    *more(
        *(Ahead(BF16, E4M3, (d, d), 128) for d in HEAD_DIMS),
        *(Ahead(BF16, BF16, (d, d), 128, has_soft_cap=True) for d in (128, 256)),
        Ahead(BF16, BF16, (128, 128), 128, has_mask=True),
        Ahead(BF16, BF16, (128, 128), 128, rotates=True),
        *(Ahead(BF16, BF16, (d, d), 128) for d in (80, 96)),
        Ahead(BF16, BF16, (128, 128), 128, contexts=ContextClass.OTHER_HEIGHT),
        *(
            Ahead(E4M3, E4M3, (128, 128), 128, size, contexts=contexts, has_value_columns=has_columns)
            for size, contexts, has_columns in itertools.product(
                _BOTH, (ContextClass.USUAL, ContextClass.LONG), (False, True)
            )
        ),
    ),
)

KERNEL = AttentionKernel(
    name="prefill_sm90",
    header="flashpage/kernels/prefill_sm90/kernel.h",
    cpp="PrefillSm90<Traits>",
    parameters=(
        ("AttentionParams", "params"),
        ("VariantArgs", "args"),
        ("KvMaps", "maps"),
        ("MaskTilesParams", "mask_tiles"),
    ),
    archs=(90,),
    accepts=(
        capability(90, 90),
        no_latent_rows,
        no_kv_formats,
        no_rope_over_fp8,
        *dtypes(q=HALF + FP8, out=NARROW),
        head_dims(16, 256, 8),
        _whole_chunks,
        whole_columns,
    ),
    tile=_tile,
    cost=_cost,
    loader=_loader,
    context_rows=_context_rows,
    context_tile=_context_tile,
    visits_mask_tiles=visits_tiles,
    row_alignment=16,
    unit_rows=_unit_rows,
    row_boxes=True,
    gathers_rows=True,
    runs_beside=True,
    traits=_traits,
    ahead=_AHEAD,
    sources=wgmma_source.render,
    attributes=lambda spec: "__cluster_dims__(2, 1, 1) " if spec.ctas == 2 else "",
)
