"""Attention over latent rows (MLA) in fp8 on Hopper: scores of e4m3, and values that are converted on their way to
registers."""

from __future__ import annotations

import dataclasses

from ..base.dtypes import DType
from . import latent_formats, latent_wide_sm90, wgmma_source
from .ahead import fp8_rows, more
from .kernel import AttentionKernel
from .latent_decode_sm90 import traits
from .latent_wide_sm90 import ROWS, packed_rows
from .options import Options
from .tensor_maps import boxes_or_rows
from .tile import Cost, Tile
from .work import Work

_TOKENS = 64  # of a block
_MOST_STAGES = 6  # the header uses as many as fit
_REACHED = 0.45  # the fraction of the card's 16-bit throughput that products reach: 64 heads 128 x 2,048 on an H200
_READ = {16: 0.8, 32: 0.63}  # of packed rows: the fraction of the bandwidth, 128 x 8k and 128 x 4k in boxes on an H200
# Rows in e4m3, with an fp32 scale for 128 columns or one for all.
FORMATS = (latent_formats.SCALED, latent_formats.DEEPSEEK_V32)
_ROWS = (16, 32, ROWS)  # packed rows of a unit
_PRODUCTS = ("KeyProduct", "TailProduct", "ValueProduct")


def _tile(work: Work) -> Tile:
    rows = next((rows for rows in _ROWS if packed_rows(work) <= rows), ROWS)
    return Tile(rows, _TOKENS, warps_q=4, warps_kv=1, stages=_MOST_STAGES, warps_v=2)


def _cost(work: Work, tile: Tile) -> Cost:
    cost, loading = latent_wide_sm90.cost(work, tile, _REACHED), work.options.token_bytes / work.card.sm_bytes_per_ns
    return dataclasses.replace(cost, ns_per_token=max(cost.ns_per_token, loading / _READ.get(tile.tile_q, 1.0)))


def _loader(options: Options) -> str:
    """Boxes for rows of two tensors. A row that holds its scales has them between its value columns and its tail, and
    is copied."""
    return boxes_or_rows(options) if options.latent_format == latent_formats.SCALED else "rows"


def has_fp32_scales(work: Work) -> str | None:
    name = work.options.latent_format
    return None if name in FORMATS else f"its rows are of {' or '.join(FORMATS)}, not {name}"


def _queries(work: Work) -> str | None:
    """Two terms in e4m3 have the eight significant bits of bf16, and not the eleven of fp16."""
    is_bf16 = work.options.q_dtype is DType.BFLOAT16
    return None if is_bf16 else "it takes queries in bf16, which are sums of two e4m3"


KERNEL = AttentionKernel(
    name="latent_e4m3_sm90",
    header="flashpage/kernels/latent_e4m3_sm90/kernel.h",
    cpp="LatentE4m3Sm90<Traits>",
    parameters=latent_wide_sm90.KERNEL.parameters,
    archs=(90,),
    accepts=(has_fp32_scales, _queries, *latent_wide_sm90.SHARED_RULES),
    tile=_tile,
    cost=_cost,
    loader=_loader,
    row_alignment=16,
    query_boxes=lambda spec: True,
    sources=wgmma_source.render_e4m3,
    traits=lambda spec: traits(spec, _PRODUCTS),
    ahead=more(*(fp8_rows("deepseek_v32", rows, "selected") for rows in _ROWS)),
)
