"""Attention of few packed rows over latent rows (MLA) on Hopper: units of up to 32."""

from __future__ import annotations

from . import latent_formats, wgmma_source
from .ahead import ONE_TOKEN, latent_rows, rows_of_two_caches
from .kernel import HALF, LATENT_OUT, AttentionKernel, attention_traits, capability, dtypes, latent_trait
from .options import Options
from .spec import KernelSpec
from .tensor_maps import boxes_or_rows
from .tile import ClusterCost, Cost, Tile
from .work import InnerLoop, Work

_TOKENS = 64  # of a slot: the rows of a product
_MOST_STAGES = 8  # the header uses as many as fit
_TEAM, _TEAMS = 4, 2  # the warps of a team share a slot's tokens, and the teams its columns


def _tile(work: Work) -> Tile:
    rows = 16 if work.packed_rows <= 16 else 32
    return Tile(rows, _TOKENS, warps_q=1, warps_kv=_TEAM, warps_v=_TEAMS, stages=_MOST_STAGES)


def only_latent_rows(work: Work) -> str | None:
    return None if work.options.is_latent else "it reads latent rows (MLA)"


def _columns(work: Work) -> str | None:
    options, found = work.options, []
    if options.head_dim_vo not in (128, 256, 384, 512):
        found.append(f"head_dim_ckv {options.head_dim_vo} is not a multiple of 128 from 128 to 512")
    if options.tail_columns not in range(0, 65, 16):
        found.append(f"head_dim_kpe {options.tail_columns} is not a multiple of 16 from 0 to 64")
    return "; ".join(found) or None


def plain(work: Work) -> str | None:
    is_plain = work.loop is InnerLoop.PLAIN and work.mask_source == "implicit"
    return None if is_plain else "it has no custom masks, variants, soft caps or rotations"


def _stored(work: Work) -> str | None:
    """Scales of a row are copied in pieces of 8 bytes, so head_dim_ckv has an even number of blocks of 128; a tail has
    whole pieces for all lanes."""
    options = work.options
    if options.latent_format == latent_formats.PLAIN:
        return None
    columns, tail = options.head_dim_vo, options.tail_columns
    if columns in (256, 512) and tail in (0, 64):
        return None
    return f"it converts fp8 rows of 256 or 512 and 0 or 64 columns, not {columns} and {tail}"


def same_type(work: Work) -> str | None:
    """Rows that are not of a format of fp8 have the queries' type."""
    options = work.options
    is_converted = options.latent_format != latent_formats.PLAIN
    if is_converted or options.kv_dtype is options.q_dtype:
        return None
    return f"it reads no latent rows of {options.kv_dtype.value}"


def loader(options: Options) -> str:
    return boxes_or_rows(options) if options.latent_format == latent_formats.PLAIN else "rows"


def _conversion_ns(work: Work, tile: Tile) -> float:
    """The time in which an SM converts a row in fp8, longer than that to load one: fitted on an H200 to 64 x 8k."""
    if work.options.latent_format == latent_formats.PLAIN:
        return 0.0
    return 38.0 if tile.tile_q <= 16 else 55.0


def _cost(work: Work, tile: Tile) -> Cost:
    loading, converting = work.options.token_bytes / work.card.sm_bytes_per_ns, _conversion_ns(work, tile)
    return Cost(
        heads_on_axis=False,
        ns_per_token=max(loading, converting),
        ns_per_unit=5000.0,  # fitted on an H200 to lognormal lengths
        ns_per_piece=1500.0,
        min_piece_tokens=128,
        merge_rows=tile.tile_q,
        ns_per_merge=3100.0,
        cluster=ClusterCost(
            piece_tokens=_TOKENS,
            ns_per_unit=500.0,
            ns_per_cluster_merge=1800.0,
            full_speed_share=work.card.full_speed_share_of(loading, converting),
        ),
    )


def traits(spec: KernelSpec, names: tuple[str, ...] = ("KeyProduct", "ValueProduct")) -> tuple[str, ...]:
    products = (f"using {name} = flashpage::{name};" for name in names)
    # The tiles in shared memory have the queries' type.
    return (*attention_traits(spec, spec.q_dtype, spec.q_dtype, "swizzled"), *products, latent_trait(spec))


KERNEL = AttentionKernel(
    name="latent_decode_sm90",
    header="flashpage/kernels/latent_decode_sm90/kernel.h",
    cpp="LatentDecodeSm90<Traits>",
    parameters=(("AttentionParams", "params"), ("VariantArgs", "args"), ("KvMaps", "maps")),
    archs=(90,),
    accepts=(
        capability(90, 90),
        only_latent_rows,
        *dtypes(q=HALF, out=LATENT_OUT),
        same_type,
        _stored,
        _columns,
        plain,
    ),
    tile=_tile,
    cost=_cost,
    loader=loader,
    row_alignment=16,
    sources=wgmma_source.render_transposed,
    traits=traits,
    ahead=(
        *latent_rows(16, 32),
        *latent_rows(16, 32, page_size=ONE_TOKEN),
        *latent_rows(16, 32, kv_source="selected"),
        *rows_of_two_caches(16, 32),
    ),
)
