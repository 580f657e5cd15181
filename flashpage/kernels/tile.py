"""The one tile table: shapes go into a kernel's Traits and to the planner, the latter with their measured costs."""

from __future__ import annotations

import dataclasses
import enum

from ..base.dtypes import DType

WALK_TEAMS, WALK_RUNS = 0, 1  # csrc/flashpage.h, fp_walk


SHORT_TILE_TOKENS = 128  # of prefill on Hopper, where rows see few: less is computed that nobody sees


@dataclasses.dataclass(frozen=True)
class Tile:
    """The shape of one kernel's work: rendered into Traits, part of the spec's identity."""

    tile_q: int  # packed rows of a unit
    tile_kv: int  # tokens of an inner step
    warps_q: int  # warps side by side along the rows
    warps_kv: int  # warps side by side along the tokens
    stages: int  # KV tiles in flight
    ctas_per_sm: int = 1  # CUDA: what registers are bounded for
    warps_v: int = 1  # warps side by side along the value columns
    ctas: int = 1  # of a cluster: each has its part of the rows, and they read the tokens once

    def paired(self) -> Tile:
        """For two CTAs that have as many rows each."""
        return dataclasses.replace(self, tile_q=2 * self.tile_q, ctas=2)

    def shortened(self) -> Tile:
        """For short contexts."""
        return dataclasses.replace(self, tile_kv=SHORT_TILE_TOKENS)


class InnerLoop(enum.Enum):
    """What a kernel does between the two products, by the registers that it takes from accumulators."""

    PLAIN = "scales scores"
    TRANSFORM = "computes on scores (soft cap)"
    HEAVY = "rotates or masks (RoPE, a custom mask, a variant's mask)"
    LOADING = "computes on scores with what it loads for each token (a variant with tensors)"


class MaskUse(enum.Enum):
    """What prefill on Hopper does for a mask beside causal and window."""

    NONE = "there is none"
    BITS = "looks at a custom mask's bits"
    ASKED = "asks a variant's function, in few tiles"
    ASKED_MUCH = "asks one for each head, or one that loads much"


@dataclasses.dataclass(frozen=True)
class ClusterCost:
    """Of units with CTAs of their own (include/flashpage/plan/own_ctas.h)."""

    piece_tokens: int  # no piece of a cluster's unit shorter
    ns_per_cluster_merge: float  # what merging adds to a launch there
    full_speed_share: float  # of the CTAs: with so many memory is as busy as with all


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the planner needs to balance and cut (csrc/flashpage.h, fp_schedule). Not part of the spec."""

    walk: int
    ns_per_token: float  # one unit, one token
    ns_per_unit: float
    ns_per_piece: float
    min_piece_tokens: int
    max_pieces: int  # of one unit; 0: no limit
    merge_rows: int
    few_rows_cost: float = 1.0  # factor of ns_per_token where a request's packed rows fill at most half a row tile
    ns_per_merge: float = 0.0  # what merging adds to a launch, beyond ns_per_piece; 0: not known, units are cut anyway
    cluster: ClusterCost = ClusterCost(0, 0.0, 1.0)


def cpu_tile(head_dim_qk: int, head_dim_vo: int, packed_rows: int) -> tuple[Tile, Cost]:
    """The CPU backend: one tile for few rows and many, as rows that are not there cost nothing. Only the cost differs.

    96 rows reuse a packed tile of K and V often enough (within 3% of 192), and a thread's memory stays in 1 MB of L2.
    Costs are of a Zen 4 core with bf16: 3 ns a row and token, and reading, converting and packing the token.
    """
    widest = max(head_dim_qk, head_dim_vo)
    tile = Tile(96, 128 if widest <= 256 else 64, 1, 1, 1)
    rows = min(packed_rows, tile.tile_q)
    per_token = (40.0 + 3.0 * rows) * (head_dim_qk + head_dim_vo) / 256
    return tile, Cost(WALK_RUNS, per_token, 300.0 + 60.0 * rows, 500.0 + 150.0 * rows, 256, 0, 64)


def sm80_tile(
    head_dim_qk: int, head_dim_vo: int, kv_dtype: DType, packed_rows: int, loop: InnerLoop = InnerLoop.PLAIN
) -> tuple[Tile, Cost]:
    """The general tensor-core kernel (mma.sync, cp.async); `packed_rows` is the average of a request and KV head.

    The largest tile that does not spill, of those measured in docs/tried.md.
    """
    narrow = loop in (InnerLoop.HEAVY, InnerLoop.LOADING) or kv_dtype.is_fp8
    widest = max(head_dim_qk, head_dim_vo)
    if packed_rows <= 16 or (packed_rows <= 32 and widest <= 128):
        return _few_rows_sm80(head_dim_qk, head_dim_vo, kv_dtype, 16 if packed_rows <= 16 else 32)
    if widest > 256:
        return Tile(32, 32 if kv_dtype.is_fp8 else 16, 2, 1, 2, 1), Cost(
            WALK_RUNS, 8.0, 800.0, 3000.0, 128, 0, _MERGE_ROWS
        )
    if widest > 128:
        if packed_rows > 64 and not narrow:
            return Tile(128, 64, 8, 1, 1, 1), Cost(WALK_RUNS, 60.0, 4000.0, 8000.0, 128, 0, _MERGE_ROWS)
        tile_kv = 32 if kv_dtype.is_fp8 else 48  # fp8 keys come 32 tokens at a time
        return Tile(64, tile_kv, 4, 1, 1, 2), Cost(WALK_RUNS, 60.0, 4000.0, 8000.0, 128, 0, _MERGE_ROWS)
    if packed_rows <= 64 or narrow:
        return Tile(64, 64, 4, 1, 2, 2), Cost(WALK_RUNS, 32.0, 4000.0, 8000.0, 128, 0, _MERGE_ROWS)
    if widest <= 64:
        tile_kv = 96 if loop is InnerLoop.PLAIN else 64
        return Tile(128, tile_kv, 4, 1, 1, 2), Cost(WALK_RUNS, 30.0, 5000.0, 10000.0, 128, 0, _MERGE_ROWS)
    tile_kv = 64 if loop is InnerLoop.PLAIN else 48
    return Tile(128, tile_kv, 4, 1, 2, 2), Cost(WALK_RUNS, 47.0, 6000.0, 20000.0, 128, 0, _MERGE_ROWS)


def sm90_decode_tile(
    head_dim_qk: int,
    head_dim_vo: int,
    kv_dtype: DType,
    packed_rows: int,
    loop: InnerLoop = InnerLoop.PLAIN,
    *,
    rotates: bool = False,
) -> tuple[Tile, Cost]:
    """Few rows on Hopper: one CTA an SM, eight warps that compute and a ring that keeps enough bytes in flight.

    A warp has 16 rows and up to 256 value columns; warps of the same tokens share a slot. What was measured is in
    docs/tried.md.
    """
    # Accumulators of more columns (of 256 already beside widening fp8 or computing on scores) take too many registers.
    has_more = kv_dtype.is_fp8 or loop is not InnerLoop.PLAIN
    warps_v = 4 if head_dim_vo > 256 else 2 if head_dim_vo > 128 and has_more else 1
    tile_q = next(rows for rows in (16, 32, 64) if packed_rows <= rows or rows * warps_v == 128)
    warps_q = tile_q // 16
    shared_token_bytes = sum(-(-dim * kv_dtype.size // 128) * 128 for dim in (head_dim_qk, head_dim_vo))
    tile_kv = 32 if shared_token_bytes <= 512 or kv_dtype.is_fp8 else 16
    if loop is InnerLoop.LOADING:
        tile_kv = 16  # the loads of more tokens on their way at once take too many registers
    teams = 8 // (warps_q * warps_v)
    query_bytes = tile_q * -(-head_dim_qk // 16) * 32
    exchange_bytes = teams * tile_q // 2 * -(-head_dim_vo // 32) * 128
    fixed_bytes = exchange_bytes + query_bytes * (4 if query_bytes <= 4096 else 2 if query_bytes <= 16384 else 1) + 7168
    if rotates:
        fixed_bytes += -(-head_dim_qk // 16) * 640  # tile/rope/rotation.h, TurnTable
    elif tile_q == 16 and head_dim_vo <= 256:
        fixed_bytes += 9232  # tile/merge/cluster_merge.h, ClusterMailbox
    ring_bytes = min(_RING_BYTES, _SHARED_BYTES - fixed_bytes)
    stages = max(1, ring_bytes // (tile_kv * shared_token_bytes) // teams) * teams
    ns_per_token = (head_dim_qk + head_dim_vo) * kv_dtype.size / 34.5  # an SM's share of 4.55 TB/s
    return (
        Tile(tile_q, tile_kv, warps_q, teams, stages, 1, warps_v),
        Cost(WALK_TEAMS, ns_per_token, 500.0, 1000.0, 128, 0, 64, ns_per_merge=3100.0, cluster=_DECODE_CLUSTERS),
    )


def sm90_prefill_tile(
    head_dim_qk: int,
    head_dim_vo: int,
    loop: InnerLoop = InnerLoop.PLAIN,
    *,
    loader: str = "boxes",
    group_size: int = 1,
    mask: MaskUse = MaskUse.NONE,
    rotates: bool = False,
) -> tuple[Tile, Cost]:
    """Many rows on Hopper: warpgroups of 64 rows, two of them, or three where rows are short.

    As many tokens as registers have room for (scores and accumulators of a row side by side) and shared memory for;
    where the loading warps convert K and V, or transpose V, the stored ones are there too. Masks, which are looked at
    in few tiles, leave that room up to 192 columns, but for functions that are asked much. Where loading warps turn
    keys (`rotates`), those have a stage more than values.
    """
    asks_much = mask is MaskUse.ASKED_MUCH
    asks = mask in (MaskUse.ASKED, MaskUse.ASKED_MUCH)
    if asks and max(head_dim_qk, head_dim_vo) > 192 and loop is not InnerLoop.LOADING:
        loop = InnerLoop.HEAVY
    widest, light = max(head_dim_qk, head_dim_vo), loop in (InnerLoop.PLAIN, InnerLoop.TRANSFORM)
    groups, stages, columns_per_ns = 2, 2, 21.0  # 128 rows at 690 TFLOP/s, an SM's share
    # Q comes in boxes where a tile holds whole groups of heads: no taller tile takes that away.
    may_be_taller = 192 % group_size == 0 or 128 % group_size != 0
    if loader == "transposed":
        tile_kv = _sm90_transposing_tokens(widest, loop)
        stages, columns_per_ns = _sm90_transposing_stages(head_dim_qk, head_dim_vo, tile_kv), 29.0
    elif loader == "converted":
        tile_kv = _sm90_converting_tokens(widest, head_dim_vo, loop)
        stages = _sm90_converting_stages(head_dim_qk, head_dim_vo, tile_kv)
    elif rotates:
        if widest > 192 and loop is InnerLoop.TRANSFORM:
            loop = InnerLoop.HEAVY  # loading warps have taken registers of those that compute
        tile_kv = _sm90_turning_tokens(head_dim_qk, loader, _sm90_tokens(head_dim_qk, head_dim_vo, loop, mask))
        stages, columns_per_ns = 3 if widest <= 64 else 2, 13.5
    elif widest <= 96 and light and not asks_much and may_be_taller:
        groups, tile_kv, stages = (3, 96, 4) if widest <= 64 else (3, 80, 3)
    else:
        tile_kv = _sm90_tokens(head_dim_qk, head_dim_vo, loop, mask)
        tile_kv = min(tile_kv, 112) if asks_much and 64 < widest <= 128 else tile_kv
    tile_q = 64 * groups
    ns_per_token = (head_dim_qk + head_dim_vo) * tile_q / (128 * columns_per_ns)
    # Beside a unit's tokens, and with hidden ones of its last tile: fitted to the ends of CTAs (docs/tried.md).
    ns_per_unit = (head_dim_qk + head_dim_vo) * {"rows": 17.0, "converted": 20.0, "transposed": 8.0}.get(loader, 13.5)
    ns_per_unit += 4.0 * head_dim_qk if rotates else 0.0  # Q's turns
    # What waits for memory needs few SMs: 128 requests of one row and 8,192 tokens take as long on 96 of an H200's 132
    # SMs as on all of them. Beside them, a prefill of 4,096 rows gets 36 SMs by this (1.0: 29).
    few_rows_cost = 0.75
    # Where units are cut, a launch takes 8 to 16 us more than its costliest CTA and 5 us for everything else.
    cost = Cost(WALK_RUNS, ns_per_token, ns_per_unit, 2500.0, 256, 0, _MERGE_ROWS, few_rows_cost, 10_000.0)
    return Tile(tile_q, tile_kv, 4 * groups, 1, stages), cost


def sm90_few_rows_tile(head_dim_qk: int, head_dim_vo: int) -> Tile:
    """Of prefill on Hopper where an SM has less than a usual tile's rows. A unit's work is then no longer than what it
    waits for at its start and end, so an SM has two CTAs of one warpgroup: one computes while the other waits."""
    columns = sum(-(-dim // 64) * 64 for dim in (head_dim_qk, head_dim_vo))
    return Tile(64, 64 if columns <= 320 else 48, 4, 1, 2, ctas_per_sm=2)


def whole_rows(packed_rows: int, group_size: int) -> int:
    """As many of a tile's rows as are whole rows of the group; all, where that would leave more than a tenth behind.
    Row by row, Q and output cost a sixth of a prefill's time (docs/tried.md)."""
    behind = packed_rows % group_size
    return packed_rows if behind * 10 > packed_rows else packed_rows - behind


def _sm90_tokens(head_dim_qk: int, head_dim_vo: int, loop: InnerLoop, mask: MaskUse) -> int:
    """Of a tile of two warpgroups."""
    widest, plain, loads = max(head_dim_qk, head_dim_vo), loop is InnerLoop.PLAIN, loop is InnerLoop.LOADING
    light = plain or loop is InnerLoop.TRANSFORM
    # Parts of 64 columns take registers, and so do a mask's bits beside a transform.
    is_whole = head_dim_qk % 64 == head_dim_vo % 64 == 0 and (plain or mask is not MaskUse.BITS)
    if widest <= 128:
        if light:
            if mask in (MaskUse.ASKED, MaskUse.ASKED_MUCH):
                return 128  # a lane has a function's answers for so many (tile/mask/mask.h, MaskBits)
            return 160 if is_whole else 144
        return 96 if loads or widest <= 64 else 80
    if widest <= 192:
        return (112 if light else 80) if head_dim_vo <= 128 else 80 if light else 48
    if loads and mask is not MaskUse.NONE:
        return 32
    return 80 if plain or (light and is_whole) else 64 if light else 48


def _sm90_turning_tokens(head_dim_qk: int, loader: str, most: int) -> int:
    """At most `most`: a lane of the loading warps turns eight rows at a time, or two or four. In shared memory K has a
    third stage, and loaders of rows have tables."""
    if head_dim_qk > 192:
        most = min(most, 32 if loader == "rows" else 64)
    wanted = (128, 96, 64, 32) if head_dim_qk > 128 else (128, 64, 32)
    return next(tokens for tokens in wanted if tokens <= most)


def _sm90_converting_tokens(widest: int, head_dim_vo: int, loop: InnerLoop) -> int:
    """Multiples of 32 where it is one or the other: all four loading warps then have as much to convert."""
    light = loop in (InnerLoop.PLAIN, InnerLoop.TRANSFORM)
    if widest <= 128:
        return 128 if light else 96 if loop is InnerLoop.HEAVY or widest <= 64 else 64
    if widest <= 192:
        if loop is InnerLoop.PLAIN:
            return 96 if head_dim_vo <= 128 else 64
        return 64 if head_dim_vo <= 128 else 48
    return 64 if loop is InnerLoop.PLAIN else 48


def _sm90_converting_stages(head_dim_qk: int, head_dim_vo: int, tile_kv: int) -> int:
    """Three where there is room beside Q of two units: who converts queries meanwhile converts no keys."""
    query_bytes, value_bytes = (-(-dim // 64) * 128 for dim in (head_dim_qk, head_dim_vo))  # of a row or token
    query_pair = 2 * 128 * max(query_bytes, value_bytes)
    staged_bytes = -(-tile_kv // 32) * 32 * sum(-(-dim // 128) * 128 for dim in (head_dim_qk, head_dim_vo))
    ring_bytes = 3 * tile_kv * (query_bytes + value_bytes)
    return 3 if query_pair + ring_bytes + staged_bytes + 2048 <= _SHARED_BYTES else 2


def _sm90_transposing_tokens(widest: int, loop: InnerLoop) -> int:
    """Multiples of 32: what one product sums over. No more than 128: what a row of V's columns has room for."""
    light = loop in (InnerLoop.PLAIN, InnerLoop.TRANSFORM)
    if widest <= 128:
        return 128 if light else 96 if loop is InnerLoop.HEAVY else 64
    if widest <= 192:
        return 96 if light else 64
    return 64 if light else 32


def _sm90_transposing_stages(head_dim_qk: int, head_dim_vo: int, tile_kv: int) -> int:
    """Of K and of V transposed. Three where there is room beside Q of two units, sums in fp32 and V as it is stored."""
    row_bytes, value_bytes = (-(-dim // 128) * 128 for dim in (head_dim_qk, head_dim_vo))
    fixed_bytes = 2 * 128 * row_bytes + 128 * head_dim_vo * 4 + 2 * tile_kv * value_bytes
    ring_bytes = 3 * (tile_kv * row_bytes + head_dim_vo * 128)
    return 3 if fixed_bytes + ring_bytes + 2048 <= _SHARED_BYTES else 2


def block_decode_tile(head_dim: int, kv_dtype: DType, group: int, shared_bytes: int = 0) -> Tile:
    """Decode over vLLM's blocks (mma.sync, cp.async); a group's query heads are the rows.

    `shared_bytes`: what a CTA can have on the device; 0: as on Hopper.
    """
    tile_q = 32 if group > 16 and head_dim <= (64 if kv_dtype.is_fp8 else 128) else 16  # more takes registers
    tile, _ = _few_rows_sm80(head_dim, head_dim, kv_dtype, tile_q)
    token_bytes = 2 * head_dim * kv_dtype.size
    if tile_q > 16:
        tile = dataclasses.replace(tile, stages=2)
    elif 128 < token_bytes <= 256 and not kv_dtype.is_fp8:
        tile = Tile(16, 64, 1, 4, 3, ctas_per_sm=4)
    elif head_dim <= 128:  # a step's work has much to wait for, so more warps hide more than stages do
        tile = dataclasses.replace(tile, stages=max(2, min(4, 65536 // (tile.tile_kv * token_bytes))), ctas_per_sm=3)
    stages = tile.stages
    warps, tokens = tile.warps_kv, tile.tile_kv // tile.warps_kv
    room = (shared_bytes or _SHARED_BYTES) - 4096
    query_bytes = tile_q * (head_dim + 16) * 2  # of each stage
    while stages * (warps * tokens * (token_bytes + 32 * kv_dtype.size) + query_bytes) > room:
        warps, stages = (warps, stages - 1) if stages > 2 else (warps // 2, stages)
    return dataclasses.replace(tile, stages=stages, warps_kv=warps, tile_kv=tokens * warps)


# Of an H200's CTAs: 64 of 132 read at 4.05 TB/s, 8 at 0.8 (tests/bench/cluster.py: 8.1 and 5 ns for 512 bytes of a CTA,
# whose share of 4.55 TB/s, by which decodes are priced, takes 14.8).
FULL_SPEED_SHARE = 0.54
# Fitted to the same: beyond its bytes a launch takes 7.4 us where nothing is cut, 9.2 where clusters merge, and 11.5
# through partials.
_DECODE_CLUSTERS = ClusterCost(piece_tokens=32, ns_per_cluster_merge=1800.0, full_speed_share=FULL_SPEED_SHARE)
_RING_BYTES = 131072
_SHARED_BYTES = 232448  # of a CTA on Hopper
MERGE_CTA_ROWS = 8  # that a CTA of kernels/merge.h takes at a time, one a warp
_MERGE_ROWS = 64  # of a merge item


def _few_rows_sm80(head_dim_qk: int, head_dim_vo: int, kv_dtype: DType, tile_q: int) -> tuple[Tile, Cost]:
    """Four warps take turns on the tokens, each with its own ring: 8 KiB a stage, 96 KiB a CTA, two CTAs an SM."""
    token_bytes = (head_dim_qk + min(head_dim_vo, 256)) * kv_dtype.size
    tokens = 32 if token_bytes * 32 <= 8192 or kv_dtype.is_fp8 else 16  # one ldmatrix takes 32 fp8 tokens
    warps = 4 if token_bytes * tokens <= 16384 else 2
    stages = max(2, min(4, 98304 // (warps * tokens * token_bytes)))
    ctas_per_sm = 2 if warps * stages * tokens * token_bytes <= 98304 and max(head_dim_qk, head_dim_vo) <= 256 else 1
    ns_per_token = token_bytes / 36.0 * ctas_per_sm  # an SM's share of the memory's 4.7 TB/s is 36 bytes a nanosecond
    return (
        Tile(tile_q, tokens * warps, 1, warps, stages, ctas_per_sm),
        Cost(WALK_TEAMS, ns_per_token, 1500.0, 1500.0, 128, 0, MERGE_CTA_ROWS),
    )
