"""The specs of a wheel. tests/jit/test_aot.py holds that these are the very specs that plans ask for."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from flashpage.base.dtypes import DType
from flashpage.jit import Target
from flashpage.kernels.context_classes import Contexts, tile_of
from flashpage.kernels.spec import KernelSpec, VariantSpec, inner_loop
from flashpage.kernels.tile import MaskUse, cpu_tile, sm80_tile, sm90_decode_tile, sm90_prefill_tile
from flashpage.variants import builtin

HALF = (DType.BFLOAT16, DType.FLOAT16)
HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
ROWS = (16, 32, 64, 128)  # packed rows a request and KV head, one for each class of tiles: decode ... prefill
DECODE_ROWS = ROWS[:3]  # those of decode_sm90
HOPPER = 90  # Target.arch that has decode_sm90 and prefill_sm90
_NO_VARIANT = VariantSpec()
SOFT_CAP = builtin(soft_cap=50.0).spec  # the value itself is not compiled in


def default_cuda_specs(target: Target) -> list[KernelSpec]:
    """What most models ask for: 16-bit queries on paged or ragged KV of the same type, and what goes with them."""
    paged = [
        _attention(target, dtype, dtype, dims, rows) for dtype, dims, rows in itertools.product(HALF, HEAD_DIMS, ROWS)
    ]
    ragged = [
        _attention(target, dtype, dtype, dims, 128, kv_source="ragged")
        for dtype, dims in (*itertools.product(HALF[:1], (*HEAD_DIMS, (192, 128))), (DType.FLOAT16, (128, 128)))
    ]
    small_pages = [
        _decode_sm90(dtype, dtype, dims, 16, loader="rows")
        for dtype, dims in itertools.product(HALF, HEAD_DIMS)
        if target.arch == HOPPER
    ]
    if target.arch == HOPPER:
        small_pages += [_prefill_sm90(*(2 * (DType.BFLOAT16,)), (128, 128), loader="rows"), KernelSpec("gather_rows")]
    often_long = [spec for spec in paged + ragged if spec.head_dim_vo == 128 and spec.kernel == "prefill_sm90"]
    pairs = [
        _of_contexts(s, Contexts.LONG) for s in often_long if s.q_dtype is DType.BFLOAT16 or s.kv_source == "paged"
    ]
    of_128 = [s for s in often_long if s.q_dtype is DType.BFLOAT16 and s.head_dim_qk == 128]
    other_tiles = [_of_contexts(s, contexts) for s in of_128 for contexts in (Contexts.SHORT, Contexts.FEW)]
    return _distinct(paged + ragged + pairs + other_tiles + small_pages + helper_specs())


def helper_specs() -> list[KernelSpec]:
    """Merging of split KV and of states, appending (elements of one, two and four bytes), plans and slots on a card."""
    merge = [KernelSpec("merge", out_dtype=dtype) for dtype in HALF]
    states = [KernelSpec("merge_states", q_dtype=dtype) for dtype in (*HALF, DType.FLOAT32)]
    append = [KernelSpec("append", kv_dtype=d) for d in (DType.FLOAT8_E4M3, DType.FLOAT16, DType.FLOAT32)]
    return [*merge, *states, *append, KernelSpec("plan"), KernelSpec("gather_slots")]


def other_cuda_specs(target: Target) -> list[KernelSpec]:
    """fp8 KV, soft caps and custom masks, and head dims whose tiles differ from the default ones'."""
    bf16, e4m3 = DType.BFLOAT16, DType.FLOAT8_E4M3
    fp8 = [_attention(target, bf16, e4m3, dims, rows) for dims, rows in itertools.product(HEAD_DIMS, ROWS)]
    fp8 += [_attention(target, DType.FLOAT16, e4m3, (128, 128), 16)]
    caps = [
        _attention(target, bf16, bf16, dims, rows, variant=SOFT_CAP)
        for dims, rows in (*itertools.product(((128, 128),), ROWS), ((256, 256), 16), ((256, 256), 128))
    ]
    masks = [_attention(target, bf16, bf16, (128, 128), rows, mask_source="packed_bits") for rows in ROWS[2:]]
    if target.arch == HOPPER:
        masks.append(KernelSpec("mask_tiles", mask_source="packed_bits"))
    rope_rows = ROWS if target.arch == HOPPER else (16, 64)
    rope = [_attention(target, bf16, bf16, (128, 128), rows, position_encoding="rope") for rows in rope_rows]
    sizes = ((80, 16), (80, 128), (96, 16), (96, 128), (512, 16))
    dims = [_attention(target, bf16, bf16, (d, d), rows) for d, rows in sizes]
    hopper = _other_hopper_specs() if target.arch == HOPPER else []
    return _distinct(fp8 + caps + masks + rope + dims + hopper)


def _other_hopper_specs() -> list[KernelSpec]:
    """Few rows where the loader differs: pages below 8 tokens, ragged KV, wide rows, values of other widths; and many
    rows of fp8 queries."""
    bf16, e4m3 = DType.BFLOAT16, DType.FLOAT8_E4M3
    wide = [_decode_sm90(bf16, bf16, (512, 512), rows) for rows in (16, 64)]
    unlike = [_decode_sm90(bf16, bf16, (192, 128), rows) for rows in (16, 64)]
    small_pages = [
        _decode_sm90(bf16, kv, (d, d), rows, loader="rows")
        for kv, (d, rows) in itertools.product((bf16, e4m3), ((128, 16), (128, 64), (256, 16)))
    ]
    ragged = [_decode_sm90(bf16, bf16, dims, 64, kv_source="ragged") for dims in ((128, 128), (192, 128))]
    ragged += [_decode_sm90(bf16, bf16, (128, 128), 16, kv_source="ragged")]
    queries = [_prefill_sm90(e4m3, e4m3, (128, 128), kv_source=source) for source in ("paged", "ragged")]
    return wide + unlike + small_pages + ragged + queries + [_of_contexts(spec, Contexts.LONG) for spec in queries]


def cuda_specs(target: Target) -> list[KernelSpec]:
    """At most 150 over all targets: CI compiles each for sm_80 or sm_90a, most for both."""
    return _distinct(default_cuda_specs(target) + other_cuda_specs(target))


def cpu_specs() -> list[KernelSpec]:
    """For a machine with neither a GPU nor a compiler."""
    return _distinct(
        [
            KernelSpec(
                "cpu_attention",
                *(dtype, dtype, dtype, dim, dim),
                kv_source=kv_source,
                tile=cpu_tile(dim, dim, rows)[0],
            )
            for dtype in (DType.FLOAT32, *HALF)
            for dim in (64, 128)
            for kv_source, rows in (("paged", 1), ("paged", 128), ("ragged", 128))
        ]
    )


def _attention(
    target: Target,
    q_dtype: DType,
    kv_dtype: DType,
    head_dims: tuple[int, int],
    rows: int,
    *,
    kv_source: str = "paged",
    mask_source: str = "implicit",
    position_encoding: str = "none",
    variant: VariantSpec = _NO_VARIANT,
) -> KernelSpec:
    """What these rows are computed with on the target; pages hold a multiple of 8 tokens."""
    if target.arch == HOPPER and rows in DECODE_ROWS:
        return _decode_sm90(
            *(q_dtype, kv_dtype, head_dims, rows),
            kv_source=kv_source,
            mask_source=mask_source,
            position_encoding=position_encoding,
            variant=variant,
        )
    options = {"kv_source": kv_source, "mask_source": mask_source, "variant": variant}
    is_prefill = max(head_dims) <= 256 and (position_encoding == "none" or not kv_dtype.is_fp8)
    if target.arch == HOPPER and is_prefill:
        return _prefill_sm90(q_dtype, kv_dtype, head_dims, position_encoding=position_encoding, **options)
    return _attention_sm80(q_dtype, kv_dtype, head_dims, rows, position_encoding=position_encoding, **options)


def _attention_sm80(
    q_dtype: DType,
    kv_dtype: DType,
    head_dims: tuple[int, int],
    rows: int,
    *,
    mask_source: str = "implicit",
    position_encoding: str = "none",
    variant: VariantSpec = _NO_VARIANT,
    **options: Any,
) -> KernelSpec:
    loop = inner_loop(mask_source, position_encoding, variant)
    return KernelSpec(
        "attention_sm80",
        *(q_dtype, kv_dtype, q_dtype, *head_dims),
        mask_source=mask_source,
        position_encoding=position_encoding,
        tile=sm80_tile(*head_dims, kv_dtype, rows, loop)[0],
        variant=variant,
        **options,
    )


def _prefill_sm90(
    q_dtype: DType,
    kv_dtype: DType,
    head_dims: tuple[int, int],
    *,
    loader: str = "boxes",
    mask_source: str = "implicit",
    position_encoding: str = "none",
    variant: VariantSpec = _NO_VARIANT,
    **options: Any,
) -> KernelSpec:
    if kv_dtype.is_fp8:
        loader = "transposed" if q_dtype is kv_dtype else "converted"
    mask_bits = mask_source if loader == "converted" else "implicit"
    return KernelSpec(
        "prefill_sm90",
        *(q_dtype, kv_dtype, DType.BFLOAT16 if q_dtype.is_fp8 else q_dtype, *head_dims),
        mask_source=mask_source,
        position_encoding=position_encoding,
        tile=sm90_prefill_tile(
            *(*head_dims, inner_loop(mask_bits, "none", variant)),
            loader=loader,
            mask=MaskUse.BITS if mask_source == "packed_bits" else MaskUse.NONE,
            rotates=position_encoding == "rope",
        )[0],
        variant=variant,
        loader=loader,
        **options,
    )


def _of_contexts(spec: KernelSpec, contexts: Contexts) -> KernelSpec:
    found = tile_of(spec, contexts)
    assert found is not None
    return dataclasses.replace(spec, tile=found[0])


def _decode_sm90(
    q_dtype: DType,
    kv_dtype: DType,
    head_dims: tuple[int, int],
    rows: int,
    *,
    loader: str = "boxes",
    mask_source: str = "implicit",
    position_encoding: str = "none",
    variant: VariantSpec = _NO_VARIANT,
    **options: Any,
) -> KernelSpec:
    loop = inner_loop(mask_source, position_encoding, variant)
    return KernelSpec(
        "decode_sm90",
        *(q_dtype, kv_dtype, q_dtype, *head_dims),
        tile=sm90_decode_tile(*head_dims, kv_dtype, rows, loop, rotates=position_encoding == "rope")[0],
        mask_source=mask_source,
        position_encoding=position_encoding,
        variant=variant,
        loader=loader,
        **options,
    )


def _distinct(specs: list[KernelSpec]) -> list[KernelSpec]:
    return list(dict.fromkeys(specs))
