"""Attention of many packed rows over latent rows (MLA) in fp8 on Hopper, by pairs of CTAs: each converts half of the
columns."""

from __future__ import annotations

from . import latent_wide_sm90, wgmma_source
from .kernel import AttentionKernel
from .latent_decode_sm90 import loader, traits
from .latent_e4m3_sm90 import has_fp32_scales
from .latent_wide_sm90 import ROWS, many_rows, packed_rows
from .spec import KernelSpec
from .tile import Tile
from .work import Work

_TOKENS = 64  # of a block
_MOST_STAGES = 8  # the header uses as many as fit
_MOST_CACHE_BYTES = 1 << 36  # converting warps keep a row's place as 32 bits, in units of 16 bytes (convert.h)


def _tile(work: Work) -> Tile:
    """Up to 64 rows: both warpgroups have all of them and take blocks in turn. More: each has 64."""
    row_tiles = 1 if packed_rows(work) <= ROWS else 2
    return Tile(row_tiles * ROWS, _TOKENS, warps_q=4, warps_kv=2, stages=_MOST_STAGES, ctas=2)


def _columns_of_product(spec: KernelSpec) -> int:
    """Half of the value columns of a CTA: a launch with converting warps has too few registers for all."""
    return spec.head_dim_vo // 4


KERNEL = AttentionKernel(
    name="latent_columns_sm90",
    header="flashpage/kernels/latent_columns_sm90/kernel.h",
    cpp="LatentColumnsSm90<Traits>",
    parameters=latent_wide_sm90.KERNEL.parameters,
    archs=(90,),
    accepts=(many_rows, has_fp32_scales, *latent_wide_sm90.SHARED_RULES),
    tile=_tile,
    cost=latent_wide_sm90.cost,
    loader=loader,
    most_cache_bytes=_MOST_CACHE_BYTES,
    row_alignment=16,
    sources=lambda spec: wgmma_source.render_parts(spec, _columns_of_product(spec)),
    traits=traits,
    attributes=lambda spec: "__cluster_dims__(2, 1, 1) ",
)
