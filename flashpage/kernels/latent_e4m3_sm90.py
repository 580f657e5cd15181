"""Attention of many packed rows over latent rows (MLA) in fp8 on Hopper: scores of e4m3, and values that are converted
on their way to registers."""

from __future__ import annotations

import dataclasses

from ..base.dtypes import DType
from . import latent_formats, latent_wide_sm90, wgmma_source
from .ahead import fp8_rows, more
from .latent_decode_sm90 import traits
from .latent_wide_sm90 import ROWS, many_rows
from .tile import Tile
from .work import Work

_TOKENS = 64  # of a block
_MOST_STAGES = 6  # the header uses as many as fit
_REACHED = 0.45  # the fraction of the card's 16-bit throughput that products reach
FORMATS = (latent_formats.SCALED, "deepseek_v32")  # e4m3 with scales of 128 columns, a panel in shared memory, or one
_PRODUCTS = ("KeyProduct", "TailProduct", "ValueProduct")


def _tile(work: Work) -> Tile:
    return Tile(ROWS, _TOKENS, warps_q=4, warps_kv=1, stages=_MOST_STAGES, warps_v=2)


def _formats(work: Work) -> str | None:
    name = work.options.latent_format
    return None if name in FORMATS else f"its rows are of {' or '.join(FORMATS)}, not {name}"


def _queries(work: Work) -> str | None:
    """Two terms in e4m3 have the eight significant bits of bf16, and not the eleven of fp16."""
    is_bf16 = work.options.q_dtype is DType.BFLOAT16
    return None if is_bf16 else "it takes queries in bf16, which are sums of two e4m3"


KERNEL = dataclasses.replace(
    latent_wide_sm90.KERNEL,
    name="latent_e4m3_sm90",
    header="flashpage/kernels/latent_e4m3_sm90/kernel.h",
    cpp="LatentE4m3Sm90<Traits>",
    accepts=(many_rows, _formats, _queries, *latent_wide_sm90.SHARED_RULES),
    tile=_tile,
    cost=lambda work, tile: latent_wide_sm90.cost(work, tile, _REACHED),
    loader=lambda options: "rows",
    sources=wgmma_source.render_e4m3,
    traits=lambda spec: traits(spec, _PRODUCTS),
    context_rows=lambda options, card: [],  # those of latent_wide_sm90 are rows of q's type
    ahead=more(fp8_rows("deepseek_v32", ROWS, "selected")),
)
