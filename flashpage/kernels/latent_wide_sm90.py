"""Attention of many packed rows over latent rows (MLA) on Hopper: 64 in a CTA or, if boxes bring the rows, 128 in a
pair."""

from __future__ import annotations

import dataclasses
import math

from .. import native
from . import latent_formats, wgmma_source
from .ahead import ONE_TOKEN, latent_rows, rows_of_two_caches
from .context_classes import ANY_ROWS, ContextClass, context_row
from .devices import Device
from .kernel import HALF, LATENT_OUT, AttentionKernel, capability, dtypes
from .latent_decode_sm90 import KERNEL as NARROW
from .latent_decode_sm90 import only_latent_rows, plain, same_type, traits
from .options import Options
from .spec import KernelSpec
from .tensor_maps import boxes_or_rows
from .tile import MERGE_ITEM_ROWS, Cost, Tile
from .work import Problem, Work

ROWS = 64  # packed rows of a product
_ROWS_OF_PAIR = 2 * ROWS
_PRODUCTS = ("KeyProduct", "HeldKeyProduct", "ValueProduct")
LEAST_PACKED_ROWS = 33  # fewer are computed transposed (latent_decode_sm90)
# The clusters of one request read more slowly than their costs say: on an H200 both kernels take as long at 6,500
# tokens of 128 heads, 4,200 of 64 and 3,200 of 40, and by the costs alone at 15,700.
_SLOWER_CLUSTERS = 2.6
_LARGEST_CLUSTER = 16  # CTAs of latent_decode_sm90 that share a unit
_TOKENS = 64  # of a block
_STAGES = 2  # blocks in shared memory; the header has its own numbers
_REACHED = 0.68  # the fraction of the card's 16-bit throughput that products reach
_REACHED_CONVERTING = 0.5  # over rows that are converted; not measured yet
_CONVERTED = "deepseek_v4"
_MOST_TILES = 8  # of a request, computed side by side; more were not tried
SIDE_BY_SIDE_NOTE = "tile: two pairs of CTAs compute a request's row tiles side by side, so that the L2 serves one"


def _tile(work: Work) -> Tile:
    """Units of one CTA, or of a pair for more rows. CTAs that load single rows are not paired: each would load all."""
    single, options = Tile(ROWS, _TOKENS, warps_q=4, warps_kv=1, stages=_STAGES, warps_v=2), work.options
    if packed_rows(work) <= ROWS or (_loader(options) == "rows" and not _converts(options)):
        return single
    tile = single.paired()
    tiles, wide = -(-options.uniform_q_len * options.group_size // tile.tile_q), _side_by_side(tile)
    is_even = 0 < tiles <= _MOST_TILES and tiles % 2 == 0 and not _converts(options)
    return wide if is_even and wide.ctas <= work.card.sms else tile


def _side_by_side(tile: Tile) -> Tile:
    """The tile of two pairs, each with its own rows of a unit. They are no cluster."""
    return dataclasses.replace(tile, tile_q=4 * ROWS, ctas=4)


def _context_rows(options: Options, card: Device) -> list[native.ContextRow]:
    """Short requests of at most a pair's rows in all; and requests with an even number of tiles of pairs: an odd one
    would leave a pair idle."""
    if options.kv_source != "latent" or options.latent_format != latent_formats.PLAIN:
        return []
    rows = [
        context_row(ContextClass.TINY, _ROWS_OF_PAIR // options.group_size, 0, most_tokens=_most_tokens(options, card))
    ]
    if _loader(options) == "rows":
        return rows
    for tiles in range(_MOST_TILES, 0, -1):  # batches of more row tiles a request than `tiles`
        contexts = ContextClass.EQUAL if tiles % 2 else ContextClass.USUAL
        least = math.nextafter(tiles * _ROWS_OF_PAIR / options.group_size, math.inf)
        rows.append(context_row(contexts, ANY_ROWS, least, has_equal_rows=contexts is ContextClass.EQUAL))
    return rows


def _most_tokens(options: Options, card: Device) -> float:
    """Tokens up to which a pair's rows end earlier in latent_decode_sm90, by the costs of both kernels: it reads tokens
    once for each of its units, by a cluster each, which merges in the launch."""
    work = Work(Problem(options, _ROWS_OF_PAIR), card)
    narrow_tile = NARROW.tile(work)
    own, narrow, units = cost(work, _tile(work)), NARROW.cost(work, narrow_tile), _ROWS_OF_PAIR // narrow_tile.tile_q
    own_ns = own.ns_per_unit + own.ns_per_piece + own.ns_per_merge
    narrow_ns = narrow.cluster.ns_per_unit + narrow.cluster.ns_per_cluster_merge
    share_of_cta = max(units / card.sms, narrow.cluster.full_speed_share / _LARGEST_CLUSTER)
    slower = narrow.ns_per_token * share_of_cta - own.ns_per_token * 2 / card.sms
    return (own_ns - narrow_ns) / slower / _SLOWER_CLUSTERS if slower > 0.0 else 0.0


def _context_tile(spec: KernelSpec, contexts: ContextClass) -> tuple[Tile, str] | None:
    assert spec.tile is not None
    is_equal = contexts is ContextClass.EQUAL and spec.loader == "boxes"
    return (_side_by_side(spec.tile), SIDE_BY_SIDE_NOTE) if is_equal else None


def packed_rows(work: Work) -> int:
    """Packed rows of a request. In the batch-invariant mode those of the work are a guess, which is too high for
    decode."""
    rows, group = work.packed_rows, work.options.group_size
    return min(rows, group) if work.options.is_batch_invariant else rows


def many_rows(work: Work) -> str | None:
    rows = packed_rows(work)
    few = rows < LEAST_PACKED_ROWS
    return f"{rows} packed rows are few, it takes {LEAST_PACKED_ROWS} or more" if few else None


def _not_tiny(work: Work) -> str | None:
    is_tiny = work.problem.contexts is ContextClass.TINY
    return "the batch has few rows and is short, so that it ends earlier in units of few rows" if is_tiny else None


def _converts(options: Options) -> bool:
    """Whether loading warps convert rows (convert.h)."""
    return options.latent_format == _CONVERTED


def _loader(options: Options) -> str:
    return "rows" if _converts(options) else boxes_or_rows(options)


def _formats(work: Work) -> str | None:
    is_read = work.options.latent_format in (latent_formats.PLAIN, _CONVERTED)
    return None if is_read else f"of rows in fp8 it converts {_CONVERTED} alone"


def _sources(spec: KernelSpec) -> str:
    # A launch with four warpgroups has too few registers for a product of half of the value columns.
    return f"{wgmma_source.render_parts(spec, spec.head_dim_vo // 4)}\n\n{wgmma_source.render_held_keys(spec)}"


def _value_columns(work: Work) -> str | None:
    """Value columns are four quarters of whole panels of 64 columns. Models have 256 and 512."""
    columns = work.options.head_dim_vo
    return None if columns in (256, 512) else f"head_dim_ckv {columns} is neither 256 nor 512"


def _tail_columns(work: Work) -> str | None:
    columns = work.options.tail_columns
    return None if columns in (0, 64) else f"head_dim_kpe {columns} is neither 0 nor 64"


def cost(work: Work, tile: Tile, reached: float = _REACHED) -> Cost:
    card = work.card
    flops = 2 * tile.tile_q // tile.ctas * work.columns  # of a CTA
    return Cost(
        heads_on_axis=False,
        ns_per_token=max(
            flops / (card.sm_flops_per_ns * reached), work.options.token_bytes / card.sm_bytes_per_ns / tile.ctas
        ),
        ns_per_unit=6500.0,
        ns_per_piece=3000.0,
        min_piece_tokens=128,
        merge_rows=MERGE_ITEM_ROWS,
        ns_per_merge=4000.0,
    )


def _cost(work: Work, tile: Tile) -> Cost:
    return cost(work, tile, _REACHED_CONVERTING if _converts(work.options) else _REACHED)


# Rules that latent_wide_sm90, latent_e4m3_sm90 and latent_columns_sm90 share.
SHARED_RULES = (
    _value_columns,
    capability(90, 90),
    only_latent_rows,
    *dtypes(q=HALF, out=LATENT_OUT),
    same_type,
    _tail_columns,
    plain,
)

KERNEL = AttentionKernel(
    name="latent_wide_sm90",
    header="flashpage/kernels/latent_wide_sm90/kernel.h",
    cpp="LatentWideSm90<Traits>",
    parameters=(("AttentionParams", "params"), ("VariantArgs", "args"), ("KvMaps", "maps")),
    archs=(90,),
    accepts=(many_rows, _formats, _not_tiny, *SHARED_RULES),
    tile=_tile,
    cost=_cost,
    loader=_loader,
    context_rows=_context_rows,
    context_tile=_context_tile,
    row_alignment=16,
    query_boxes=lambda spec: spec.latent_format != _CONVERTED,
    sources=_sources,
    traits=lambda spec: traits(spec, _PRODUCTS),
    ahead=(
        *latent_rows(64, 128),
        *latent_rows(64, page_size=ONE_TOKEN),
        *latent_rows(64, kv_source="selected"),
        *rows_of_two_caches(64, 128),
    ),
    attributes=lambda spec: "__cluster_dims__(2, 1, 1) " if spec.ctas > 1 else "",
)
