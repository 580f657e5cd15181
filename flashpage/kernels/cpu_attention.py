"""Attention on the CPU, for few and many rows and every option (include/flashpage/cpu/)."""

from __future__ import annotations

import itertools

from ..base.dtypes import DType
from .ahead import BF16, FP16, RAGGED, Ahead
from .kernel import (
    FLOAT,
    FP8,
    AttentionKernel,
    dtypes,
    format_traits,
    latent_options,
    latent_trait,
    no_rope_over_hadamard_keys,
    types,
)
from .spec import KernelSpec
from .tile import Cost, Tile
from .work import Work


def _tile(work: Work) -> Tile:
    """One tile for few and many rows, because rows that do not exist cost nothing. 96 rows reuse a packed tile of K and
    V often enough (within 3% of 192), and a thread's memory stays in 1 MB of L2."""
    return Tile(96, 128 if work.widest <= 256 else 64, 1, 1, 1)


def _cost(work: Work, tile: Tile) -> Cost:
    """Costs on a Zen 4 core with bf16: 3 ns for each row and token, and reading, converting and packing the token."""
    rows = min(work.packed_rows, tile.tile_q)
    return Cost(
        heads_on_axis=True,
        ns_per_token=(40.0 + 3.0 * rows) * work.columns / 256,
        ns_per_unit=300.0 + 60.0 * rows,
        ns_per_piece=500.0 + 150.0 * rows,
        min_piece_tokens=256,
        merge_rows=64,
    )


def _head_dims(work: Work) -> str | None:
    """Sizes of rows; max_head_dim of include/flashpage/cpu/kv_tile.h bounds them."""
    options, found = work.options, []
    sizes = [("head_dim_qk", options.head_dim_qk, 16, 512), ("head_dim_vo", options.head_dim_vo, 16, 512)]
    if options.is_latent:
        sizes = [("head_dim_ckv", options.head_dim_vo, 16, 512), ("head_dim_kpe", options.tail_columns, 0, 64)]
    for name, dim, least, most in sizes:
        if not least <= dim <= most or dim % 8:
            found.append(f"{name} {dim} is not a multiple of 8 from {least} to {most}")
    return "; ".join(found) or None


def _traits(spec: KernelSpec) -> tuple[str, ...]:
    assert spec.tile is not None
    return (
        *types(StoredQuery=spec.q_dtype, StoredCache=spec.kv_dtype, Out=spec.out_dtype),
        "using Variant = ::Variant;",
        f"static constexpr int head_dim_qk = {spec.head_dim_qk}, head_dim_vo = {spec.head_dim_vo};",
        f"static constexpr int tile_q = {spec.tile.tile_q}, tile_kv = {spec.tile.tile_kv};",
        f"static constexpr flashpage::KvSource kv_source = flashpage::KvSource::{spec.kv_source};",
        latent_trait(spec),
        f"static constexpr flashpage::MaskSource mask_source = flashpage::MaskSource::{spec.mask_source};",
        "static constexpr flashpage::PositionEncoding position_encoding =",
        f"    flashpage::PositionEncoding::{spec.position_encoding};",
        f"static constexpr bool trace = {str(spec.trace).lower()};",
        *format_traits(spec),
    )


# Kernels for a machine with neither a GPU nor a compiler.
_AHEAD = tuple(
    Ahead(dtype, dtype, (dim, dim), 1, page_size)
    for dtype, dim, page_size in itertools.product((DType.FLOAT32, BF16, FP16), (64, 128), (16, RAGGED))
)

KERNEL = AttentionKernel(
    name="cpu_attention",
    header="flashpage/cpu/attention.h",
    cpp="flashpage::cpu::attention<Traits>",
    parameters=(("AttentionParams", "params"), ("VariantArgs", "args")),
    accepts=(
        *dtypes(q=FLOAT + FP8, out=(*FLOAT, DType.FLOAT8_E4M3)),
        _head_dims,
        latent_options,
        no_rope_over_hadamard_keys,
    ),
    tile=_tile,
    cost=_cost,
    traits=_traits,
    ahead=_AHEAD,
)
