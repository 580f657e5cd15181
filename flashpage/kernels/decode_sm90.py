"""Few packed rows of each request on Hopper and Blackwell 10.x (decode, speculative verify, short appends), bound by
memory bandwidth: one CTA an SM, four warps that load, eight or twelve that compute, and a ring that keeps enough bytes
in flight.

It was never run on Blackwell. Cards of 12.x, whose CTAs have 99 KiB of shared memory, get attention_sm80: with a ring
of that size this kernel was slower on an H200 (docs/tried.md).
"""

from __future__ import annotations

import dataclasses
import itertools

from . import kv_formats, prefill_sm90
from .ahead import BF16, BYTES, E4M3, FP16, HEAD_DIMS, ONE_TOKEN, RAGGED, Ahead, more
from .devices import H200
from .kernel import (
    FP8,
    HALF,
    NARROW,
    AttentionKernel,
    ability,
    attention_traits,
    dtypes,
    head_dims,
    no_latent_rows,
)
from .options import Options
from .spec import KernelSpec
from .tensor_maps import LINE_BYTES, NARROW_LINE_BYTES, boxes_or_rows
from .tile import MERGE_ITEM_ROWS, ClusterCost, Cost, Tile
from .work import InnerLoop, Work

MOST_PACKED_ROWS = 64
_REACHED = 0.6  # of the card's 16-bit throughput, by mma.sync
_LOADING_WARPS = 4  # DecodeWarps::loading of the header
_MOST_STAGES = 64  # the header uses as many as fit the ring
_FORMAT_ROWS_STAGES = 16  # with more, page numbers of a round take too many registers
RING_BYTES = 128 << 10  # decode_ring_bytes of the header; tests/kernels/test_shared_memory.py compares them


def _loader(options: Options) -> str:
    """Boxes where pages have them. The copy engine requests each line of 128 bytes that a row touches. Rows that do not
    fill their lines touch more of them and arrive earlier one by one (docs/tried.md). In fp8 that holds for rows
    shorter than a line, as conversion takes longer than loading for others; in 16 bits for several KV heads, whose rows
    follow each other in a line. Formats were not measured."""
    found = boxes_or_rows(options)
    if options.has_formats or not any(size > NARROW_LINE_BYTES and size % LINE_BYTES for size in options.row_bytes):
        return found
    is_fast = max(options.row_bytes) < LINE_BYTES if options.kv_dtype.is_fp8 else options.num_kv_heads > 1
    return "rows" if is_fast else found


def _tile(work: Work) -> Tile:
    """A warp has 16 rows and up to 256 value columns. Warps that compute on the same tokens share a slot
    (docs/tried.md)."""
    options, loop = work.options, work.loop
    if loop is InnerLoop.LOADING and _loader(options) == "rows":
        loop = InnerLoop.HEAVY  # single rows arrive too slowly in slots of 16 tokens
    # Accumulators of more columns (already of 256, if fp8 is widened or scores are computed on) take too many
    # registers.
    has_more = options.kv_dtype.size == 1 or loop is not InnerLoop.PLAIN
    if work.packed_rows <= 16 and not _slots_fit(work):
        has_more = True  # four teams need fewer slots than eight
    if work.packed_rows > 32 and options.head_dim_qk > 480:
        has_more = True  # two warps exchange half as much next to the widest Q
    warps_v = 4 if options.head_dim_vo > 256 else 2 if options.head_dim_vo > 128 and has_more else 1
    if _swaps(work):
        return Tile(8, 32, 1, _swapped_teams(options), _MOST_STAGES, 1, 1)
    tile_q = next(rows for rows in (16, 32, 64) if work.packed_rows <= rows or rows * warps_v == 128)
    warps_q = tile_q // 16
    tile_kv = _slot_tokens(work)
    if loop is InnerLoop.LOADING:
        tile_kv = 16  # the loads of more tokens, all in flight at once, take too many registers
    stages = _FORMAT_ROWS_STAGES if options.has_formats and _loader(options) == "rows" else _MOST_STAGES
    return Tile(tile_q, tile_kv, warps_q, 8 // (warps_q * warps_v), stages, 1, warps_v)


def _swaps(work: Work) -> bool:
    """Whether products have swapped factors (tile/product/swapped.h): units of at most eight packed rows, with K and V
    of four bits, or both of eight bits without scales and of 64 to 128 columns. Eight bits with scales of tokens were
    not timed. Shorter rows, and rows that copies of 16 bytes do not divide, spill registers."""
    options = work.options
    k, v = options.formats
    is_known = k.bits == v.bits and (k.bits == 4 or (k.bits == 8 and k.is_plain and v.is_plain))
    has_dims = all(64 <= dim <= 128 and dim % 16 == 0 for dim in (options.head_dim_qk, options.head_dim_vo))
    is_plain = work.loop is InnerLoop.PLAIN and work.mask_source == "implicit"
    return is_known and has_dims and is_plain and work.packed_rows <= 8


def _swapped_teams(options: Options) -> int:
    """Teams of one warp, of which twelve find room, as their accumulators are half as large. Eight, which share the
    issue slots with fewer others, are faster where rows fill a line of 128 bytes, and where boxes bring columns that
    share a scale in groups (docs/tried.md)."""
    has_groups = all(0 < side.scale_columns < kv_formats.WHOLE_ROW for side in options.formats)
    fills_lines = max(options.row_bytes) == LINE_BYTES
    return 8 if fills_lines or (has_groups and _loader(options) == "boxes") else 12


def _has_slots(work: Work) -> str | None:
    """Refuses work whose slots do not fit: each loading warp needs one, and each of eight teams of warps. For the
    widest rows eight slots exceed the ring's 128 KiB."""
    options = work.options
    dims = f"head_dim_qk {options.head_dim_qk} with head_dim_vo {options.head_dim_vo}"
    if not _slots_fit(work, _LOADING_WARPS):
        return f"{dims} over kv_format {options.k_format}, {options.v_format} needs more shared memory than a CTA has"
    if work.packed_rows > 16 or options.head_dim_vo > 128 or _slots_fit(work):
        return None
    return f"{dims} needs more shared memory for at most 16 packed rows than a CTA has"


# Its products read these: bits, scale_columns and scale_size of a format with scales, and whether it has zero points.
_LAYOUTS = {
    (8, kv_formats.WHOLE_ROW, 4, False): "8 bits with an fp32 scale a token",
    (4, kv_formats.WHOLE_ROW, 4, True): "4 bits with an fp32 scale and a zero point a token",
    (4, 16, 1, False): "4 bits with a scale of one byte for 16 columns",
}


def _formats(work: Work) -> str | None:
    """Refuses what is not written for K and V in formats: rows of 4 bits come in chunks of 32 columns, and Q must be in
    registers, in the order of their numbers (tile/product/four_bits.h)."""
    options = work.options
    if not options.has_formats:
        return None
    over = f"over kv_format {options.k_format}, {options.v_format}"
    if work.rotates:
        return f"it has no in-kernel RoPE (pos_encoding_mode ROPE_LLAMA) {over}"
    if work.loop is InnerLoop.LOADING:
        return f"it has no variant that loads for each token {over}"
    for name, side, dim in zip(
        ("head_dim_qk", "head_dim_vo"), options.formats, (options.head_dim_qk, options.head_dim_vo), strict=True
    ):
        layout = (side.bits, side.scale_columns, side.scale_size, side.has_zero)
        if not side.is_plain and layout not in _LAYOUTS:
            return f"it reads {', '.join(_LAYOUTS.values())}, and kv_format {side.name} is none of these"
        if side.bits == 4 and dim not in (64, 128):
            return f"{name} {dim} is neither 64 nor 128, which rows of {side.name} must have"
        if side.bits > 8 and side.name != options.q_dtype.widened.value:
            return f"kv_format {side.name} is not the type of q, {options.q_dtype.value}"
    return None


def _wide_rows(work: Work) -> str | None:
    """Leaves wide heads of more than 32 packed rows to prefill_sm90, where it takes them: its products take half of
    the time (docs/tried.md)."""
    options = work.options
    if work.packed_rows <= 32 or options.head_dim_vo <= 128 or options.kv_dtype.size == 1 or options.has_formats:
        return None
    if prefill_sm90.KERNEL.refusals(work):
        return None
    return f"{work.packed_rows} packed rows with head_dim_vo {options.head_dim_vo} are faster with prefill_sm90"


def _short_ring(work: Work) -> str | None:
    """Leaves Blackwell 12.x to attention_sm80, which was faster than this kernel with a ring that fits
    (docs/tried.md)."""
    card = work.card
    if card.shared_bytes >= H200.shared_bytes or "bulk copies" not in card.abilities:
        return None
    return f"with {card.shared_bytes >> 10} KiB of shared memory a CTA its ring is short, and attention_sm80 is faster"


def _slots_fit(work: Work, slots: int = 8) -> bool:
    return slots * _slot_tokens(work) * _token_bytes(work) <= RING_BYTES


def _slot_tokens(work: Work) -> int:
    return 16 if _token_bytes(work) > 512 and work.options.kv_dtype.size > 1 else 32


def _token_bytes(work: Work) -> int:
    """Bytes of a token's rows of K and V in shared memory, in whole lines of 128."""
    return sum(-(-row // LINE_BYTES) * LINE_BYTES for row in work.options.row_bytes)


def _cost(work: Work, tile: Tile) -> Cost:
    loading, computing = _loading_ns(work), max(_conversion_ns(work), _products_ns(work, tile))
    ns_per_token = max(loading, computing)
    return Cost(
        heads_on_axis=False,
        ns_per_token=ns_per_token,
        reading_share=loading / ns_per_token,
        ns_per_unit=_ns_per_unit(work, tile),
        # Units of 16 to 128 tokens, next to CTAs that read long ones (an H200): 2.0 us at head dimension 64, 2.6 at
        # 128, 3.8 at 256.
        least_ns_of_unit=1400.0 + 9.5 * work.options.head_dim_vo,
        ns_per_piece=1000.0,
        min_piece_tokens=128,
        merge_rows=MERGE_ITEM_ROWS,
        # Fitted on an H200: in addition to the time for its bytes, a launch takes 7.4 us if nothing is cut, 9.2 if
        # clusters merge, and 11.5 if it merges through partials.
        ns_per_merge=3100.0,
        cluster=ClusterCost(
            piece_tokens=32,
            ns_per_unit=500.0 if _is_16_bit(work) else 1000.0,
            ns_per_cluster_merge=1800.0,
            full_speed_share=work.card.full_speed_share_of(loading, computing),
        ),
    )


def _ns_per_unit(work: Work, tile: Tile) -> float:
    """A unit's time in addition to that of its tokens: fitted on an H200 to lognormal and other uneven lengths, from 1
    to 512 requests, with heads of 64, 128 and 256; of more rows to 560 and 832 short units of 64. Memory is the limit
    of 16-bit caches, so CTAs that wait do not lose it."""
    if _is_16_bit(work):
        return 1500.0 + 52.0 * max(0, tile.tile_q - 16)
    has_zero = any(side.has_zero for side in work.options.formats)
    return 2200.0 + (5.0 if has_zero else 3.0) * work.columns


def _is_16_bit(work: Work) -> bool:
    return not work.options.has_formats and work.options.kv_dtype.size > 1


def _loading_ns(work: Work) -> float:
    return work.options.token_bytes / work.card.sm_bytes_per_ns


def _products_ns(work: Work, tile: Tile) -> float:
    """The time in which an SM computes the products of a token. Teams of warps take slots in turn and wait for their
    own products; teams of more rows are fewer: fitted on an H200 to 64 packed rows, which take 15.5 ns at heads of 128,
    and 50 at 256, where slots have half of the tokens. Slower tensor cores take longer."""
    waiting = work.columns * tile.tile_q * (0.00095 if work.options.head_dim_vo <= 128 else 0.00153)
    return max(waiting, work.columns * tile.tile_q * 2 / (work.card.sm_flops_per_ns * _REACHED))


def _conversion_ns(work: Work) -> float:
    """The time in which an SM converts a token of four bits, where that is longer than to load it: fitted on an H200 to
    64 x 4k with heads of 64 and 128."""
    has_four_bits = work.options.has_formats and any(side.bits == 4 for side in work.options.formats)
    return 2.9 + 0.0133 * work.columns if has_four_bits else 0.0


def _line_bytes(spec: KernelSpec) -> int:
    """Rows of at most 64 bytes have lines of 64, so that the ring holds twice as many."""
    k, v = spec.formats
    row_bytes = max(k.row_bytes(spec.head_dim_qk), v.row_bytes(spec.head_dim_vo))
    may_be_narrow = spec.has_formats or (spec.loader == "boxes" and spec.position_encoding == "none")
    is_narrow = may_be_narrow and row_bytes <= NARROW_LINE_BYTES
    return NARROW_LINE_BYTES if is_narrow else LINE_BYTES


def _on_eight(spec: KernelSpec) -> KernelSpec:
    """Boxes start on 16 bytes."""
    if spec.loader == "rows" or spec.tile is None:
        return spec
    return dataclasses.replace(spec, loader="rows", tile=dataclasses.replace(spec.tile, stages=_FORMAT_ROWS_STAGES))


def _traits(spec: KernelSpec) -> tuple[str, ...]:
    layout = "narrow" if _line_bytes(spec) == NARROW_LINE_BYTES else "swizzled"
    return attention_traits(spec, spec.q_dtype.widened, spec.kv_dtype, layout)


_AHEAD = (
    *(Ahead(t, t, (d, d), rows) for t, d, rows in itertools.product((BF16, FP16), HEAD_DIMS, (16, 32, 64))),
    *(Ahead(t, t, (d, d), 16, ONE_TOKEN) for t, d in itertools.product((BF16, FP16), HEAD_DIMS)),
    *more(
        *(Ahead(BF16, E4M3, (d, d), rows) for d, rows in itertools.product(HEAD_DIMS, (16, 32, 64))),
        *(Ahead(q, E4M3, (d, d), 8) for q, d in ((BF16, 64), (BF16, 128), (FP16, 128))),
        Ahead(BF16, E4M3, (128, 128), 8, ONE_TOKEN),
        *(Ahead(BF16, BF16, (128, 128), rows, has_soft_cap=True) for rows in (16, 32, 64)),
        Ahead(BF16, BF16, (256, 256), 16, has_soft_cap=True),
        Ahead(BF16, BF16, (128, 128), 64, has_mask=True),
        *(Ahead(BF16, BF16, (128, 128), rows, rotates=True) for rows in (16, 32, 64)),
        *(Ahead(BF16, BF16, (d, d), 16) for d in (80, 96, 512)),
        *(Ahead(BF16, BF16, (d, d), 16, kv_heads=1) for d in (80, 96)),
        Ahead(BF16, BF16, (512, 512), 64),
        *(Ahead(BF16, BF16, (192, 128), rows) for rows in (16, 64)),
        *(
            Ahead(BF16, kv, (d, d), rows, ONE_TOKEN)
            for kv, (d, rows) in itertools.product((BF16, E4M3), ((128, 16), (128, 64), (256, 16)))
        ),
        *(Ahead(BF16, BYTES, (d, d), 8, kv_format="nvfp4") for d in (64, 128)),
        Ahead(BF16, BYTES, (128, 128), 16, kv_format="nvfp4"),
        Ahead(BF16, BYTES, (128, 128), 8, ONE_TOKEN, kv_format="nvfp4"),
        Ahead(BF16, BYTES, (128, 128), 8, kv_format="int4_token"),
        *(Ahead(BF16, BYTES, (128, 128), 16, kv_format=name) for name in ("e4m3_token", "int8_token")),
        *(Ahead(BF16, BF16, (d, 128), 64, RAGGED) for d in (128, 192)),
        Ahead(BF16, BF16, (128, 128), 16, RAGGED),
    ),
)

KERNEL = AttentionKernel(
    name="decode_sm90",
    header="flashpage/kernels/decode_sm90/kernel.h",
    cpp="DecodeSm90<Traits>",
    parameters=(("AttentionParams", "params"), ("VariantArgs", "args"), ("KvMaps", "maps")),
    archs=(90, 100, 103),
    most_packed_rows=MOST_PACKED_ROWS,
    accepts=(
        ability("bulk copies"),
        _short_ring,
        no_latent_rows,
        _formats,
        *dtypes(q=HALF + FP8, out=NARROW),
        head_dims(16, 512, 8),
        _has_slots,
        _wide_rows,
    ),
    tile=_tile,
    cost=_cost,
    loader=_loader,
    row_alignment=16,
    on_eight=_on_eight,
    scale_alignment=16,
    merges_in_launch=True,
    line_bytes=_line_bytes,
    runs_beside=True,
    traits=_traits,
    ahead=_AHEAD,
)
