"""Attention of many packed rows over latent rows (MLA) on Hopper: 128 in a pair of CTAs that load tokens for each
other."""

from __future__ import annotations

from . import latent_formats, wgmma_source
from .ahead import latent_rows
from .kernel import HALF, AttentionKernel, capability, dtypes
from .latent_decode_sm90 import only_latent_rows, plain, same_type, traits
from .tensor_maps import boxes_or_rows
from .tile import MERGE_ITEM_ROWS, Cost, Tile
from .work import Work

ROWS = 64  # packed rows of a product
_TOKENS = 64  # of a block
_STAGES = 2  # blocks in shared memory
_REACHED = 0.68  # the fraction of the card's 16-bit throughput that products reach


def _tile(work: Work) -> Tile:
    return Tile(ROWS, _TOKENS, 4, 2, _STAGES).paired()


def packed_rows(work: Work) -> int:
    """Packed rows of a request. In the batch-invariant mode those of the work are a guess, which is too high for
    decode."""
    rows, group = work.packed_rows, work.options.group_size
    return min(rows, group) if work.options.is_batch_invariant else rows


def _many_rows(work: Work) -> str | None:
    rows = packed_rows(work)
    return None if rows > ROWS else f"{rows} packed rows are few, it takes {ROWS + 1} or more"


def _boxes(work: Work) -> str | None:
    if work.options.latent_format != latent_formats.PLAIN:
        return "it converts no rows in fp8"
    return None if boxes_or_rows(work.options) == "boxes" else f"pages of {work.options.page_size} tokens have no boxes"


def _columns(work: Work) -> str | None:
    options = work.options
    tail = options.head_dim_qk - options.head_dim_vo
    found = []
    if options.head_dim_vo not in (256, 512):
        found.append(f"head_dim_ckv {options.head_dim_vo} is neither 256 nor 512")
    if tail not in (0, 64):
        found.append(f"head_dim_kpe {tail} is neither 0 nor 64")
    return "; ".join(found) or None


def _cost(work: Work, tile: Tile) -> Cost:
    card = work.card
    flops = 2 * tile.tile_q // tile.ctas * work.columns  # of a CTA
    return Cost(
        heads_on_axis=False,
        ns_per_token=max(
            flops / (card.sm_flops_per_ns * _REACHED), work.options.token_bytes / card.sm_bytes_per_ns / tile.ctas
        ),
        ns_per_unit=2500.0,
        ns_per_piece=3000.0,
        min_piece_tokens=128,
        merge_rows=MERGE_ITEM_ROWS,
        ns_per_merge=4000.0,
    )


# What each kernel over blocks of 64 tokens accepts, whatever the number of rows.
OPTIONS = (capability(90, 90), only_latent_rows, *dtypes(q=HALF, out=HALF), same_type, _columns, plain)

KERNEL = AttentionKernel(
    name="latent_wide_sm90",
    header="flashpage/kernels/latent_wide_sm90/kernel.h",
    cpp="LatentWideSm90<Traits>",
    parameters=(("AttentionParams", "params"), ("VariantArgs", "args"), ("KvMaps", "maps")),
    archs=(90,),
    accepts=(_many_rows, _boxes, *OPTIONS),
    tile=_tile,
    cost=_cost,
    loader=boxes_or_rows,
    row_alignment=16,
    sources=wgmma_source.render_halves,
    traits=traits,
    ahead=latent_rows(128),
    attributes=lambda spec: "__cluster_dims__(2, 1, 1) ",
)
