"""The general tensor-core kernel for every card since Ampere, by mma.sync and cp.async.

Warps share the tokens if rows are few, and the rows if they are many; with 99 KiB of shared memory and wide keys two
groups of warps share the rows, and have every other tile of tokens each.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from ..base.dtypes import DType
from . import latent_formats
from .ahead import BF16, E4M3, FP16, HEAD_DIMS, RAGGED, Ahead, more
from .devices import H200, Device
from .kernel import (
    FP8,
    HALF,
    NARROW,
    AttentionKernel,
    attention_traits,
    capability,
    dtypes,
    head_dims,
    latent_options,
    latent_trait,
    no_rope_over_hadamard_keys,
    tanh_trait,
)
from .spec import KernelSpec
from .tile import FEW_MERGE_ITEM_ROWS, MERGE_ITEM_ROWS, Cost, Tile
from .work import InnerLoop, Work

# The least shared memory of a CTA in bytes: an A100 has 163 KiB, Hopper and later cards of data centres 227, others 99.
# An SM has 1 KiB more.
LARGE, _LARGEST = 160 << 10, 224 << 10


@dataclasses.dataclass(frozen=True)
class _Row:
    """A tile for many rows, and its cost on an H200. The first row that fits the work is taken. Tiles are the largest
    of the measured ones that do not spill (docs/tried.md). Their sizes in shared memory are tested on the cubins
    (tests/kernels/test_shared_memory.py)."""

    tile: Tile
    ns: tuple[float, float, float]  # nanoseconds of a token in a unit, of a unit, of a piece
    why: str
    widest: int = 512  # largest head dim
    values: int = 512  # largest head dim of values
    columns: int = 0  # needs more columns of K and V together than this
    rows: int = 0  # needs more packed rows than this
    is_light: bool = False  # needs work without fp8, masks and RoPE
    is_plain: bool = False  # also needs work that computes nothing on scores
    fp8: bool | None = None  # of K and V; None: either
    rotates: bool | None = None  # RoPE in the kernel; None: either
    shared: int = 0  # least shared memory of a CTA
    newest: int = 999  # largest compute capability, times ten: ptxas allocates registers otherwise for later ones

    def takes(self, work: Work) -> bool:
        is_light = work.loop in (InnerLoop.PLAIN, InnerLoop.TRANSFORM) and not work.options.kv_dtype.is_fp8
        return (
            work.widest <= self.widest
            and work.options.head_dim_vo <= self.values
            and work.columns > self.columns
            and work.packed_rows > self.rows
            and (is_light or not self.is_light)
            and (work.loop is InnerLoop.PLAIN or not self.is_plain)
            and self.fp8 in (None, work.options.kv_dtype.is_fp8)
            and self.rotates in (None, work.rotates)
            and work.card.shared_bytes >= self.shared
            and work.card.sm <= self.newest
        )


# Keys of 129 to 192 columns next to values of at most 128.
_WIDE_KEYS = functools.partial(_Row, widest=192, values=128, rows=64, is_light=True)

# Two CTAs an SM hide each other's softmax, copies and unit ends. An SM of an A100 or of a card with 99 KiB has room for
# two if they have one stage or fewer tokens. No row was timed on such a card: rows with figures of their own were timed
# on an H200 under that card's limits.
_MANY = (
    _Row(
        *(Tile(128, 48, 4, 1, 1, 3), (41.0, 5e3, 10e3), "narrow rows: three CTAs an SM", 64),
        rows=64,
        is_light=True,
        is_plain=True,
    ),
    _Row(Tile(128, 64, 4, 1, 1, 2), (30.0, 5e3, 10e3), "a transform takes registers", 64, rows=64, is_light=True),
    _Row(
        *(Tile(128, 64, 4, 1, 1, 2), (45.0, 7e3, 20e3), "one stage, two CTAs an SM", 128),
        rows=64,
        is_light=True,
        is_plain=True,
        shared=LARGE,
    ),
    _Row(Tile(128, 48, 4, 1, 2, 2), (47.0, 6e3, 20e3), "a transform", 128, rows=64, is_light=True, shared=_LARGEST),
    _Row(Tile(128, 48, 4, 1, 1, 2), (50.0, 6e3, 20e3), "A100, a transform", 128, rows=64, is_light=True, shared=LARGE),
    _Row(Tile(128, 48, 4, 1, 1, 2), (46.0, 7e3, 20e3), "99 KiB", 96, rows=64, is_light=True),
    _Row(
        Tile(128, 32, 4, 1, 1, 2), (46.0, 7e3, 20e3), "99 KiB: as many rows as fit twice", 128, rows=64, is_light=True
    ),
    _Row(Tile(64, 64, 4, 1, 2, 2), (32.0, 4e3, 8e3), "few rows, or registers taken", 128, shared=_LARGEST),
    _Row(Tile(64, 64, 4, 1, 2, 2), (32.0, 4e3, 8e3), "A100, fp8", 128, fp8=True, shared=LARGE),
    _Row(Tile(64, 64, 4, 1, 2, 2), (32.0, 4e3, 8e3), "A100, narrow rows", 64, rotates=False, shared=LARGE),
    _Row(Tile(64, 48, 4, 1, 2, 2), (32.0, 4e3, 8e3), "A100", 128, rotates=False, shared=LARGE),
    _Row(Tile(64, 48, 4, 1, 1, 2), (32.0, 4e3, 8e3), "A100 with rotated keys", 128, shared=LARGE),
    _Row(Tile(64, 64, 4, 1, 2, 2), (32.0, 4e3, 8e3), "99 KiB, narrow rows of fp8", 64, fp8=True, rotates=False),
    _Row(Tile(64, 48, 4, 1, 2, 2), (32.0, 4e3, 8e3), "99 KiB, narrow rows", 64, rotates=False),
    _Row(Tile(64, 64, 4, 1, 1, 2), (32.0, 4e3, 8e3), "99 KiB, fp8", 128, fp8=True, rotates=False),
    _Row(Tile(64, 48, 4, 1, 1, 2), (32.0, 4e3, 8e3), "99 KiB", 128, rotates=False),
    _Row(Tile(64, 32, 4, 1, 1, 2), (32.0, 4e3, 8e3), "99 KiB with rotated keys", 128),
    _WIDE_KEYS(Tile(128, 64, 4, 1, 1, 2), (55.0, 6.5e3, 20e3), "wide keys", is_plain=True, shared=_LARGEST, newest=90),
    _WIDE_KEYS(Tile(128, 48, 4, 1, 1, 2), (59.0, 6.5e3, 20e3), "A100, Blackwell", is_plain=True, shared=LARGE),
    _WIDE_KEYS(Tile(128, 48, 4, 1, 1, 2), (59.0, 6.5e3, 20e3), "a transform", shared=LARGE, newest=90),
    _WIDE_KEYS(Tile(64, 64, 4, 1, 1, 2), (55.0, 5e3, 10e3), "a transform on Blackwell", shared=LARGE),
    _WIDE_KEYS(Tile(128, 64, 4, 2, 1, 1), (32.0, 5.5e3, 10e3), "99 KiB: two groups share Q"),
    _Row(Tile(64, 64, 4, 1, 1, 2), (55.0, 5e3, 10e3), "two CTAs an SM", 256, is_light=True, shared=_LARGEST),
    _Row(Tile(128, 64, 8, 1, 1, 1), (60.0, 4e3, 8e3), "eight warps", 256, rows=64, is_light=True, shared=LARGE),
    _Row(
        *(Tile(128, 32, 8, 1, 1, 1), (77.0, 4e3, 8e3), "99 KiB: eight warps (measured: 256 and 256)", 256),
        rows=64,
        is_light=True,
        columns=384,
    ),
    _Row(Tile(64, 32, 4, 1, 1, 2), (60.0, 4e3, 8e3), "fp8 keys come 32 tokens at a time", 256, fp8=True),
    _Row(Tile(64, 48, 4, 1, 1, 2), (60.0, 4e3, 8e3), "registers of 48 tokens", 256, shared=_LARGEST),
    _Row(Tile(64, 32, 4, 1, 1, 2), (60.0, 4e3, 8e3), "A100: two CTAs an SM; 99 KiB: one", 256),
    _Row(Tile(32, 32, 2, 1, 2, 1), (8.0, 800.0, 3e3), "fp8 keys come 32 tokens at a time", fp8=True, shared=LARGE),
    _Row(Tile(32, 16, 2, 1, 2, 1), (8.0, 800.0, 3e3), "two stages", fp8=False, shared=LARGE),
    _Row(Tile(32, 32, 2, 1, 1, 1), (8.0, 800.0, 3e3), "99 KiB: one stage", fp8=True),
    _Row(Tile(32, 16, 2, 1, 1, 1), (8.0, 800.0, 3e3), "99 KiB: one stage"),
)


def _takes_few_rows(work: Work) -> bool:
    """Whether the tile is one of few rows, whose warps share the tokens (Tile.has_few_rows). If rows of K and V are
    wide, the ring of two warps may be too large for the card, above all next to rotated keys, which have 16 bits."""
    is_few = work.packed_rows <= 16 or (work.packed_rows <= 32 and work.widest <= 128)
    is_large, is_fp8 = work.card.shared_bytes >= LARGE, work.options.kv_dtype.is_fp8
    if work.rotates and is_fp8 and work.packed_rows > 16 and work.options.head_dim_qk < work.options.head_dim_vo:
        return False  # accumulators of 32 rows next to rotated keys spill where values are the wider ones
    if _is_tight(work) and is_fp8:
        return is_few and work.widest <= (256 if is_large else 128)
    return is_few and (is_large or work.widest <= 256)


def _is_tight(work: Work) -> bool:
    return work.rotates and (work.card.shared_bytes < _LARGEST or work.widest > 256)


def _row(work: Work) -> _Row:
    return next(row for row in _MANY if row.takes(work))


def _tile(work: Work) -> Tile:
    if work.options.is_latent:
        return _latent_tile(work)
    if work.options.has_formats:
        return _formats_tile(work)
    return _few_rows_tile(work) if _takes_few_rows(work) else _row(work).tile


def _latent_tile(work: Work) -> Tile:
    """Two tiles of whole rows next to Q. A warp's registers hold values of 16 rows and 256 columns, so up to four warps
    share the value columns of the same rows, and the products of their scores (tile/product/score_parts.h)."""
    options, card = work.options, work.card
    panels, is_large = options.head_dim_vo // 64, card.shared_bytes >= LARGE  # a warp has whole panels of 64 columns
    warps_v = 2 if panels % 2 == 0 else 1
    if work.packed_rows <= 16:
        # Rows that are converted are also kept as they are stored. Next to both, 99 KiB do not hold the terms of four
        # warps, and next to DeepSeek V3.2's rows, which hold scales too, only half a tile and the terms of two.
        can_share_four = panels % 4 == 0 and (is_large or options.latent_format == latent_formats.PLAIN)
        is_half = not is_large and options.latent_format == latent_formats.DEEPSEEK_V32
        return Tile(16, 16 if is_half else 32, 1, 1, 2, warps_v=4 if can_share_four else warps_v)
    if work.packed_rows > 32 and is_large:
        return Tile(64, 32, 4, 1, 2, warps_v=warps_v)
    # With two CTAs an SM, one computes while the other waits for a tile, or for terms.
    rows, tokens, stages = 32, 16, 2
    other_bytes = 5 << 10  # terms of two pairs of warps (2 KiB), padding of rows, offsets and slots
    bytes_a_cta = (rows + stages * tokens) * 2 * options.head_dim_qk + other_bytes
    ctas_per_sm = 2 if bytes_a_cta <= _half_of_sm(card) else 1
    return Tile(rows, tokens, 2, 1, stages, ctas_per_sm, warps_v=warps_v)


def _formats_tile(work: Work) -> Tile:
    """Rows in formats are loaded as they are stored, and converted to one 16-bit tile of K or V. Loads of one stage are
    small, so more warps than stages hide their latency."""
    options, card = work.options, work.card
    is_large, widest = card.shared_bytes >= LARGE, max(work.widest, 64)
    if _takes_few_rows(work):
        rows = 16 if work.packed_rows <= 16 else 32
        is_tight = widest > 64 and (not is_large or (rows == 32 and card.shared_bytes < _LARGEST))
        is_alone = widest > 128 or (is_tight and rows == 32 and not is_large)  # two CTAs do not fit an SM
        warps = 2 if widest > (256 if is_large else 128) or (is_tight and not is_alone) else 4
        limit = card.shared_bytes if is_alone else _half_of_sm(card)
        ring_bytes = 8 * 16 * warps * sum((options.head_dim_qk, min(options.head_dim_vo, 256)))  # of 16-bit elements
        return Tile(rows, 16 * warps, 1, warps, 4, 1 if is_alone else 2, ring_bytes=ring_bytes, shared_limit=limit)
    # Other transforms than a soft cap alone spill 40 to 60 bytes.
    is_light = work.loop is InnerLoop.PLAIN or (
        work.loop is InnerLoop.TRANSFORM and "\n" not in work.variant.logit and not work.variant.tensors
    )
    if widest <= 128 and work.packed_rows > 64 and is_light:
        tokens = 32 if not is_large or work.loop is not InnerLoop.PLAIN else 48  # 64 spill 8 to 36 bytes
        if is_large or options.token_bytes <= 160:  # K and V of 4 bits: two CTAs fit an SM with 100 KiB
            return Tile(128, tokens, 4, 1, 1, 2)
    if widest <= 256:
        tokens = 64 if widest <= (128 if is_large else 64) else 32
        return Tile(64, tokens, 4, 1, 1, 2 if is_large or widest <= 128 else 1)
    return Tile(32, 16, 2, 1, 1, 1)


def few_rows_tile(
    token_bytes: int, tile_q: int, is_fp8: bool, widest: int, card: Device, is_tight: bool = False
) -> Tile:
    """A tile whose warps alternate on the tokens, each with its own ring: 8 KiB a stage, at most 96 KiB a CTA and two
    CTAs an SM. `token_bytes`: of K and V that a warp loads at a time. `is_tight`: rotated keys need space next to the
    ring."""
    is_large = card.shared_bytes >= LARGE
    if not is_tight and (tile := _two_ctas_tile(token_bytes, tile_q, is_fp8, card)) is not None:
        return tile
    is_short = token_bytes * 32 <= 8192 and (widest <= 64 or is_large or not is_tight)
    tokens = 32 if is_short or is_fp8 else 16  # one ldmatrix takes 32 fp8 tokens
    stage_bytes = token_bytes * tokens  # of a warp
    has_room = stage_bytes * 8 <= (131072 if is_large else 73728)  # for two stages of four warps
    if is_tight:
        has_room = stage_bytes <= 8192 and (is_large or not is_fp8)
        # If keys are much wider than values, rotated keys take more space than the ring's stages indicate.
        has_room = has_room and (widest <= 192 or (is_large and not is_fp8))
    warps = 4 if has_room else 2
    ctas_per_sm = 2 if is_large and 2 * warps * tokens * token_bytes <= 98304 and widest <= 256 else 1
    ring_bytes = 98304 if is_large else 73728
    limit = card.shared_bytes if is_tight or not is_large else 0  # otherwise any ring of this size fits
    return Tile(tile_q, tokens * warps, 1, warps, 4, ctas_per_sm, ring_bytes=ring_bytes, shared_limit=limit)


def _half_of_sm(card: Device) -> int:
    """Bytes of shared memory of each of two CTAs an SM. The system takes 1 KiB for a CTA."""
    return card.sm_shared_bytes // 2 - (1 << 10)


def _two_ctas_tile(token_bytes: int, tile_q: int, is_fp8: bool, card: Device) -> Tile | None:
    """The tile with the most warps of which two CTAs fit an SM with less shared memory than Hopper's, two stages each:
    a unit's copies start when it does, so one CTA loads while the other ends a unit. None: Hopper, or none fits."""
    limit = _half_of_sm(card)
    for warps, tokens in itertools.product((4, 2), (32,) if is_fp8 else (32, 16)):
        stage_bytes = token_bytes * tokens  # of a warp; rows are padded, and Q takes the rest
        if card.shared_bytes < _LARGEST and stage_bytes <= 8192 and 2 * warps * stage_bytes <= 0.8 * limit:
            return Tile(tile_q, tokens * warps, 1, warps, 4, 2, ring_bytes=limit, shared_limit=limit)
    return None


def _token_bytes(work: Work) -> int:
    options = work.options
    if options.has_formats:
        return options.token_bytes
    return (options.head_dim_qk + min(options.head_dim_vo, 256)) * options.kv_dtype.size


def _one_stage_tile(work: Work) -> Tile:
    """A tile whose warps have one stage each: keys and values are copied as soon as the last ones were read, so half of
    the memory is always in flight. With two stages half of it is empty while a warp waits, for half as many warps.
    Five warps in each of two CTAs spill."""
    values = min(work.options.head_dim_vo, 256)
    warp_bytes = 16 * max(_token_bytes(work), 4 * values)  # of a stage, or of sums that warps exchange
    two_fit = 4 * warp_bytes <= 0.8 * _half_of_sm(work.card)  # rows are padded, and Q takes the rest
    return Tile(16, 64, 1, 4, 1, 2) if two_fit else Tile(16, 80, 1, 5, 1, 1)


def _few_rows_tile(work: Work) -> Tile:
    rows, is_fp8 = 16 if work.packed_rows <= 16 else 32, work.options.kv_dtype.is_fp8
    if rows == 16 and not is_fp8 and not work.rotates and work.widest <= 256:
        return _one_stage_tile(work)
    return few_rows_tile(_token_bytes(work), rows, is_fp8, work.widest, work.card, _is_tight(work))


def _cost(work: Work, tile: Tile) -> Cost:
    if work.options.is_latent:
        ns_per_token = work.options.token_bytes / work.card.sm_bytes_per_ns
        return Cost(
            False, max(ns_per_token, work.card.compute_ns(1.2 * tile.tile_q)), 2e3, 2e3, 128, FEW_MERGE_ITEM_ROWS
        )
    if tile.has_few_rows:
        ns_per_token = _token_bytes(work) / work.card.sm_bytes_per_ns * tile.ctas_per_sm
        return Cost(False, ns_per_token, 1500.0, 1500.0, 128, FEW_MERGE_ITEM_ROWS)
    token, unit, piece = _row(work).ns
    return many_rows_cost(work, work.card.compute_ns(token), unit, piece)


def many_rows_cost(work: Work, ns_per_token: float, ns_per_unit: float, ns_per_piece: float) -> Cost:
    """Merging one cut unit for each of an H200's CTAs takes 32 to 48 us there: it reads and writes memory."""
    ns_per_merge = 30e3 * H200.gbps / work.card.gbps
    return Cost(True, ns_per_token, ns_per_unit, ns_per_piece, 128, MERGE_ITEM_ROWS, ns_per_merge=ns_per_merge)


_head_dims = head_dims(16, 512, 8)


def _columns(work: Work) -> str | None:
    """Sizes of rows. Warps share value columns in panels of 64."""
    options, found = work.options, []
    if not options.is_latent:
        return _head_dims(work)
    vo, tail = options.head_dim_vo, options.tail_columns
    if vo not in range(64, 513, 64) or vo in (320, 448):
        found.append(f"head_dim_ckv {vo} is not a multiple of 64 up to 256, 384 or 512")
    if tail not in range(0, 65, 16):
        found.append(f"head_dim_kpe {tail} is not a multiple of 16 from 0 to 64")
    return "; ".join(found) or None


def _latent_options(work: Work) -> str | None:
    options = work.options
    if not options.is_latent:
        return None
    if options.q_dtype.is_fp8:
        return f"q_data_type {options.q_dtype.value} is not supported over latent rows"
    return latent_options(work)


def _fp32_outputs(work: Work) -> str | None:
    if work.options.out_dtype is DType.FLOAT32 and not work.options.is_latent:
        return "it writes outputs of float32 over latent rows alone"
    return None


def _formats(work: Work) -> str | None:
    """Refuses elements of 16 bits that are not of the products' type."""
    options = work.options
    if not options.has_formats:
        return None
    for side in options.formats:
        if side.bits > 8 and side.name != options.q_dtype.widened.value:
            return f"kv_format {side.name} is not the type of q, {options.q_dtype.value}"
    return None


def _traits(spec: KernelSpec) -> tuple[str, ...]:
    query = spec.q_dtype.widened
    if spec.is_latent:  # the tiles in shared memory have the queries' type
        return (*attention_traits(spec, query, query, "pitched"), latent_trait(spec))
    # Rows in formats are converted to 16-bit tiles.
    found = attention_traits(spec, query, query if spec.has_formats else spec.kv_dtype, "pitched")
    assert spec.tile is not None
    weights = query if spec.formats[1].bits == 16 else DType.FLOAT16  # Shape::Probability: fp16 over narrower values
    return found if spec.tile.has_few_rows else (*found, *tanh_trait(spec, weights))


_ROWS = (16, 32, 64, 128)  # one for each class of tiles
_AHEAD = (
    *(Ahead(t, t, (d, d), rows) for t, d, rows in itertools.product((BF16, FP16), HEAD_DIMS, _ROWS)),
    *(Ahead(BF16, BF16, dims, 128, RAGGED) for dims in ((64, 64), (128, 128), (256, 256), (192, 128))),
    Ahead(FP16, FP16, (128, 128), 128, RAGGED),
    *more(
        *(Ahead(BF16, E4M3, (d, d), rows) for d, rows in itertools.product(HEAD_DIMS, _ROWS)),
        Ahead(FP16, E4M3, (128, 128), 16),
        *(Ahead(BF16, BF16, (128, 128), rows, has_soft_cap=True) for rows in _ROWS),
        *(Ahead(BF16, BF16, (256, 256), rows, has_soft_cap=True) for rows in (16, 128)),
        *(Ahead(BF16, BF16, (128, 128), rows, has_mask=True) for rows in (64, 128)),
        *(Ahead(BF16, BF16, (128, 128), rows, rotates=True) for rows in (16, 64)),
        *(Ahead(BF16, BF16, (d, d), rows) for d, rows in itertools.product((80, 96), (16, 128))),
        Ahead(BF16, BF16, (512, 512), 16),
    ),
)

KERNEL = AttentionKernel(
    name="attention_sm80",
    header="flashpage/kernels/attention_sm80/kernel.h",
    cpp="AttentionSm80<Traits>",
    parameters=(("AttentionParams", "params"), ("VariantArgs", "args")),
    accepts=(
        capability(80),
        _formats,
        no_rope_over_hadamard_keys,
        *dtypes(q=HALF + FP8, out=(*NARROW, DType.FLOAT32)),
        _fp32_outputs,
        _columns,
        _latent_options,
    ),
    tile=_tile,
    cost=_cost,
    row_alignment=16,
    on_eight=lambda spec: spec,
    scale_alignment=8,
    traits=_traits,
    ahead=_AHEAD,
)
