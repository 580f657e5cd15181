"""Kernels around attention: merging, appending, gathering, rotating, tiles of masks, plans on the card.

Their headers are include/flashpage/kernels/helpers/NAME.h; two kernels share merge.h.
"""

from __future__ import annotations

import dataclasses

from ..base.dtypes import DType
from .kernel import Kernel, format_traits, latent_trait, types
from .spec import KernelSpec
from .tile import MERGE_COLUMNS

MOST_CTAS = 1 << 16  # of a launch whose CTAs go on to further rows
# By the size of an element: kernels that copy bytes have one for all types of that size.
COPIED = {1: DType.FLOAT8_E4M3, 2: DType.FLOAT16, 4: DType.FLOAT32}


def _merge_traits(spec: KernelSpec) -> tuple[str, ...]:
    by_columns = "true" if spec.kernel == "merge_columns" else "false"
    return (*types(Out=spec.out_dtype), f"static constexpr bool by_columns = {by_columns};")


def merge_spec(out_dtype: DType, head_dim_vo: int) -> KernelSpec:
    """The kernel that merges partials of this width: rows of many columns are few, and several warps share a row."""
    return KernelSpec("merge" if head_dim_vo <= MERGE_COLUMNS else "merge_columns", out_dtype=out_dtype)


def _merge_states_traits(spec: KernelSpec) -> tuple[str, ...]:
    return types(StoredQuery=spec.q_dtype)


def _append_traits(spec: KernelSpec) -> tuple[str, ...]:
    return types(StoredCache=spec.kv_dtype)


def _append_latent_traits(spec: KernelSpec) -> tuple[str, ...]:
    return (
        *types(StoredQuery=spec.q_dtype),
        f"static constexpr int head_dim_qk = {spec.head_dim_qk}, head_dim_vo = {spec.head_dim_vo};",
        latent_trait(spec),
    )


def _format_rows_traits(spec: KernelSpec) -> tuple[str, ...]:
    return (
        *types(StoredQuery=spec.q_dtype, StoredCache=spec.kv_dtype),
        f"static constexpr int head_dim_qk = {spec.head_dim_qk}, head_dim_vo = {spec.head_dim_vo};",
        *format_traits(spec),
    )


def _rotate_pages_traits(spec: KernelSpec) -> tuple[str, ...]:
    return (
        *types(StoredQuery=spec.q_dtype),
        f"static constexpr int head_dim_qk = {spec.head_dim_qk}, head_dim_vo = {spec.head_dim_vo};",
    )


def _value_columns_traits(spec: KernelSpec) -> tuple[str, ...]:
    return (*types(StoredCache=spec.kv_dtype), f"static constexpr int head_dim_vo = {spec.head_dim_vo};")


def _mask_tiles_traits(spec: KernelSpec) -> tuple[str, ...]:
    return (
        "using Variant = flashpage::Variant;",
        f"static constexpr MaskSource mask_source = MaskSource::{spec.mask_source};",
        f"static constexpr int tile_kv = {spec.tile.tile_kv if spec.tile else 0};",
    )


def _helper(name: str, cpp: str, parameters: str) -> Kernel:
    return Kernel(name, f"flashpage/kernels/helpers/{name}.h", cpp, ((parameters, "params"),))


MERGE = dataclasses.replace(_helper("merge", "Merge<Traits>", "MergeParams"), traits=_merge_traits)
MERGE_BY_COLUMNS = dataclasses.replace(MERGE, name="merge_columns")
MERGE_STATES = dataclasses.replace(
    _helper("merge_states", "MergeStates<Traits>", "MergeStatesParams"), traits=_merge_states_traits
)
APPEND = dataclasses.replace(_helper("append", "Append<Traits>", "AppendParams"), traits=_append_traits)
APPEND_LATENT = dataclasses.replace(
    _helper("append_latent", "AppendLatent<Traits>", "AppendLatentParams"), traits=_append_latent_traits
)
APPEND_QUANTISED = dataclasses.replace(
    _helper("append_quantised", "AppendQuantised<Traits>", "AppendQuantisedParams"), traits=_format_rows_traits
)
CPU_APPEND_QUANTISED = dataclasses.replace(
    APPEND_QUANTISED,
    name="cpu_append_quantised",
    header="flashpage/cpu/append_quantised.h",
    cpp="flashpage::cpu::append_quantised<Traits>",
)
GATHER_ROWS = _helper("gather_rows", "GatherRows", "GatherRowsParams")
GATHER_SLOTS = _helper("gather_slots", "GatherSlots", "GatherSlotsParams")
WIDEN_PAGES = dataclasses.replace(
    _helper("widen_pages", "WidenPages<Traits>", "WidenPagesParams"), traits=_format_rows_traits
)
ROTATE_PAGES = dataclasses.replace(
    _helper("rotate_pages", "RotatePages<Traits>", "RotatePagesParams"), traits=_rotate_pages_traits
)
VALUE_COLUMNS = dataclasses.replace(
    _helper("value_columns", "ValueColumnsCopy<Traits>", "ValueColumnsParams"), traits=_value_columns_traits
)
PLAN = _helper("plan", "PlanOnDevice", "plan::TablePlan")
MASK_TILES = dataclasses.replace(
    _helper("mask_tiles", "MaskTiles<Traits>", "MaskTilesParams"),
    parameters=(("MaskTilesParams", "params"), ("VariantArgs", "args")),
    has_variant=True,
    traits=_mask_tiles_traits,
)

KERNELS = (
    *(MERGE, MERGE_BY_COLUMNS, MERGE_STATES, APPEND, APPEND_LATENT, APPEND_QUANTISED, CPU_APPEND_QUANTISED),
    *(GATHER_ROWS, GATHER_SLOTS, WIDEN_PAGES, ROTATE_PAGES, VALUE_COLUMNS, PLAN, MASK_TILES),
)

_HALF = (DType.BFLOAT16, DType.FLOAT16)
AHEAD = (
    *(KernelSpec(name, out_dtype=dtype) for name in ("merge", "merge_columns") for dtype in _HALF),
    KernelSpec("merge_columns", out_dtype=DType.FLOAT32),
    *(KernelSpec("merge_states", q_dtype=dtype) for dtype in (*_HALF, DType.FLOAT32)),
    *(KernelSpec("append", kv_dtype=dtype) for dtype in COPIED.values()),
    KernelSpec("plan"),
    KernelSpec("gather_slots"),
)
AHEAD_OF_HOPPER = (
    KernelSpec("gather_rows"),
    KernelSpec(
        "widen_pages", kv_dtype=DType.BYTES, head_dim_qk=128, head_dim_vo=128, k_format="nvfp4", v_format="nvfp4"
    ),
    KernelSpec("rotate_pages", head_dim_qk=128, head_dim_vo=128),
    KernelSpec("value_columns", kv_dtype=DType.FLOAT8_E4M3, head_dim_vo=128),
    KernelSpec("mask_tiles", mask_source="packed_bits"),
)
