"""Kernels that use vLLM's cache blocks in place: decode, the merge of its partials, and writing, with RoPE or without.

Their headers are include/flashpage/kernels/blocks/NAME.h.
"""

from __future__ import annotations

import dataclasses

from ..base.dtypes import DType
from .attention_sm80 import LARGE, few_rows_tile
from .devices import Device
from .kernel import Kernel, attention_traits, types
from .spec import KernelSpec
from .tile import Tile


def decode_spec(q_dtype: DType, kv_dtype: DType, head_dim: int, group: int, card: Device) -> KernelSpec:
    tile = _decode_tile(head_dim, kv_dtype, group, card)
    return KernelSpec(DECODE.name, q_dtype, kv_dtype, q_dtype, head_dim, head_dim, tile=tile)


def merge_spec(out_dtype: DType) -> KernelSpec:
    return KernelSpec(MERGE.name, out_dtype=out_dtype)


def write_spec(source: DType, stored: DType, layout: str) -> KernelSpec:
    """`layout`: a name of Loader (include/flashpage/common/types.h)."""
    return KernelSpec(WRITE.name, q_dtype=source, kv_dtype=stored, loader=layout)


def rotate_write_spec(source: DType, stored: DType) -> KernelSpec:
    return KernelSpec(ROTATE_WRITE.name, q_dtype=source, kv_dtype=stored)


def _decode_tile(head_dim: int, kv_dtype: DType, group: int, card: Device) -> Tile:
    """The tile of decode, whose rows are a group's query heads."""
    tile_q = 32 if group > 16 and head_dim <= (64 if kv_dtype.is_fp8 else 128) else 16  # larger tiles spill
    columns = head_dim if tile_q == 16 else -(-head_dim // 16) * 16  # rows are padded; next to 16 of Q there is room
    token_bytes = 2 * columns * kv_dtype.size
    tile = few_rows_tile(token_bytes, tile_q, kv_dtype.is_fp8, head_dim, card)
    if card.shared_bytes < LARGE and tile.ctas_per_sm == 2:
        return tile
    if tile_q > 16:
        tile = dataclasses.replace(tile, stages=2)
    elif 128 < token_bytes <= 256 and not kv_dtype.is_fp8:
        tile = Tile(16, 64, 1, 4, 3, ctas_per_sm=4, ring_bytes=tile.ring_bytes)
    elif head_dim <= 128:  # steps mostly wait, and more warps hide that better than more stages
        tile = dataclasses.replace(tile, ctas_per_sm=3, ring_bytes=65536)
    return dataclasses.replace(tile, shared_limit=card.shared_bytes)


def _decode_traits(spec: KernelSpec) -> tuple[str, ...]:
    return attention_traits(spec, spec.q_dtype, spec.kv_dtype, "pieces")


def _merge_traits(spec: KernelSpec) -> tuple[str, ...]:
    return types(Out=spec.out_dtype)


def _write_traits(spec: KernelSpec) -> tuple[str, ...]:
    layout = f"static constexpr Loader loader = Loader::{spec.loader};"
    return (*types(StoredQuery=spec.q_dtype, StoredCache=spec.kv_dtype), layout)


def _rotate_write_traits(spec: KernelSpec) -> tuple[str, ...]:
    return types(StoredQuery=spec.q_dtype, StoredCache=spec.kv_dtype)


DECODE = Kernel(
    name="block_decode_sm80",
    header="flashpage/kernels/blocks/decode.h",
    cpp="BlockDecode<Traits>",
    parameters=(("BlockAttentionParams", "params"),),
    has_variant=True,
    traits=_decode_traits,
)
MERGE = Kernel(
    name="block_merge",
    header="flashpage/kernels/blocks/merge.h",
    cpp="BlockMerge<Traits>",
    parameters=(("BlockAttentionParams", "params"),),
    traits=_merge_traits,
)
WRITE = Kernel(
    name="block_write",
    header="flashpage/kernels/blocks/write.h",
    cpp="BlockWrite<Traits>",
    parameters=(("BlockWriteParams", "params"),),
    traits=_write_traits,
)
ROTATE_WRITE = Kernel(
    name="block_rotate_write",
    header="flashpage/kernels/blocks/rotate_write.h",
    cpp="RotateWrite<Traits>",
    parameters=(("RotateWriteParams", "params"),),
    traits=_rotate_write_traits,
)
KERNELS = (DECODE, MERGE, WRITE, ROTATE_WRITE)
