"""Attention of many packed rows over latent rows (MLA) on Hopper, by pairs of CTAs: each loads half of the columns. It
takes what boxes do not bring: single rows (small pages, lists), and rows in fp8."""

from __future__ import annotations

import dataclasses

from . import latent_wide_sm90, wgmma_source
from .ahead import ONE_TOKEN, latent_rows, listed_rows
from .kernel import ANY_BYTES
from .latent_decode_sm90 import loader, traits
from .latent_wide_sm90 import ROWS, many_rows, packed_rows
from .spec import KernelSpec
from .tile import Tile
from .work import Work

_TOKENS = 64  # of a block
_MOST_STAGES = 8  # the header uses as many as fit


def _most_cache_bytes(spec: KernelSpec) -> int:
    """Converting warps keep a row's place as 32 bits, in units of 16 bytes (convert.h)."""
    return ANY_BYTES if spec.kv_dtype is spec.q_dtype else 1 << 36


def _tile(work: Work) -> Tile:
    """Up to 64 rows: both warpgroups have all of them and take blocks in turn. More: each has 64."""
    row_tiles = 1 if packed_rows(work) <= ROWS else 2
    return Tile(row_tiles * ROWS, _TOKENS, warps_q=4, warps_kv=2, stages=_MOST_STAGES, ctas=2)


def _no_boxes(work: Work) -> str | None:
    return "boxes bring the rows: latent_wide_sm90 takes them" if loader(work.options) == "boxes" else None


def _columns_of_product(spec: KernelSpec) -> int:
    """All value columns of a CTA, or half of them where rows are converted: a launch with converting warps has too few
    registers for the larger product."""
    return spec.head_dim_vo // (4 if spec.kv_dtype.is_fp8 else 2)


def _value_columns(work: Work) -> str | None:
    """Each CTA's value columns are two parts of whole panels: head_dim_ckv 256 or 512."""
    columns = work.options.head_dim_vo
    return None if columns in (256, 512) else f"head_dim_ckv {columns} is neither 256 nor 512"


KERNEL = dataclasses.replace(
    latent_wide_sm90.KERNEL,
    name="latent_columns_sm90",
    header="flashpage/kernels/latent_columns_sm90/kernel.h",
    cpp="LatentColumnsSm90<Traits>",
    accepts=(many_rows, _no_boxes, _value_columns, *latent_wide_sm90.OPTIONS),
    loader=loader,
    tile=_tile,
    most_cache_bytes=_most_cache_bytes,
    sources=lambda spec: wgmma_source.render_parts(spec, _columns_of_product(spec)),
    traits=traits,
    attributes=lambda spec: "__cluster_dims__(2, 1, 1) ",
    context_rows=lambda options, card: [],
    context_tile=lambda spec, contexts: None,
    ahead=(*latent_rows(64, 128, page_size=ONE_TOKEN), *listed_rows(64, 128)),
)
