"""Many rows of e4m3 queries over e4m3 keys and values: attention_sm80's loop with fp8 products (mma.sync m16n8k32), for
Ada and for Blackwell's 12.x."""

from __future__ import annotations

from ..base.dtypes import DType
from .ahead import E4M3, RAGGED, Ahead, more
from .attention_sm80 import many_rows_cost
from .kernel import (
    NARROW,
    AttentionKernel,
    Rule,
    ability,
    attention_traits,
    dtypes,
    head_dims,
    no_kv_formats,
    no_latent_rows,
    no_rope_over_fp8,
    tanh_trait,
)
from .spec import KernelSpec
from .tile import Cost, Tile
from .work import InnerLoop, Work

FEWEST_ROWS = 65  # packed: decode kernels take fewer


def _no_widened_products(work: Work) -> str | None:
    return "this card's mma.sync widens fp8 factors to fp16" if work.card.widens_fp8 else None


def _many_rows(work: Work) -> str | None:
    return None if work.packed_rows >= FEWEST_ROWS else f"it is for {FEWEST_ROWS} or more packed rows"


def _e4m3_alone(work: Work) -> str | None:
    options = work.options
    if options.kv_dtype is options.q_dtype:
        return None
    return f"kv_data_type {options.kv_dtype.value} is not q's {options.q_dtype.value}"


def _no_mask_bits(work: Work) -> str | None:
    return "it has no custom masks" if work.options.has_mask else None


_ACCEPTS: tuple[Rule, ...] = (
    ability("fp8 mma"),
    _no_widened_products,
    _many_rows,
    no_latent_rows,
    no_kv_formats,
    no_rope_over_fp8,
    *dtypes(q=(DType.FLOAT8_E4M3,), out=NARROW),
    _e4m3_alone,
    _no_mask_bits,
    head_dims(32, 256, 32),  # a product has 32 terms
)


def _tile(work: Work) -> Tile:
    """Two CTAs an SM hide each other's softmax and copies, in the 99 KiB of all these cards. A warp has 32 rows if
    registers allow, so that each load of K and V feeds two products; else more tokens. Next to more than 224 columns
    of values, 64 tokens spill."""
    is_plain, values = work.loop is InnerLoop.PLAIN, work.options.head_dim_vo
    if values > 224:
        return Tile(128, 32, 8, 1, 2, 1)
    if values > 128:
        return Tile(128, 64, 8, 1, 1, 1)
    if not is_plain or work.widest > 128:
        return Tile(64, 64, 4, 1, 1, 2)
    if values > 96:
        return Tile(64, 128, 4, 1, 1, 2)
    return Tile(128, 64, 4, 1, 2 if work.widest <= 64 else 1, 2)


def _cost(work: Work, tile: Tile) -> Cost:
    """Products take half of attention_sm80's time, and the exponentials between them all of it."""
    ns_per_token = work.card.compute_ns(work.columns / 256 * tile.tile_q / 128 * 32.0)
    return many_rows_cost(work, ns_per_token, 6e3, 12e3)


def _traits(spec: KernelSpec) -> tuple[str, ...]:
    return (*attention_traits(spec, spec.q_dtype, spec.kv_dtype, "pitched"), *tanh_trait(spec, spec.kv_dtype))


KERNEL = AttentionKernel(
    name="prefill_sm89",
    header="flashpage/kernels/attention_sm80/kernel.h",
    cpp="AttentionSm80<Traits>",
    parameters=(("AttentionParams", "params"), ("VariantArgs", "args")),
    accepts=_ACCEPTS,
    tile=_tile,
    cost=_cost,
    row_alignment=16,
    traits=_traits,
    ahead=more(*(Ahead(E4M3, E4M3, (128, 128), 128, size) for size in (16, RAGGED))),
)
