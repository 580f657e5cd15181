"""The specs of a wheel. tests/test_aot.py holds that these are the very specs that plans ask for."""

from __future__ import annotations

import itertools

from flashpage.dtypes import DType
from flashpage.spec import KernelSpec, VariantSpec, inner_loop
from flashpage.tiles import cpu_tile, sm80_tile
from flashpage.variants import builtin

HALF = (DType.BFLOAT16, DType.FLOAT16)
HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
ROWS = (16, 32, 64, 128)  # packed rows a request and KV head, one for each class of tiles: decode ... prefill
_NO_VARIANT = VariantSpec()
SOFT_CAP = builtin(soft_cap=50.0).spec  # the value itself is not compiled in


def default_cuda_specs() -> list[KernelSpec]:
    """What most models ask for: 16-bit queries on paged or ragged KV of the same type, and what goes with them."""
    paged = [_sm80(dtype, dtype, dims, rows) for dtype, dims, rows in itertools.product(HALF, HEAD_DIMS, ROWS)]
    ragged = [
        _sm80(dtype, dtype, dims, 128, kv_source="ragged")
        for dtype, dims in itertools.product(HALF, (*HEAD_DIMS, (192, 128)))
    ]
    return _distinct(paged + ragged + helper_specs())


def helper_specs() -> list[KernelSpec]:
    """Merging of split KV and of states, and appending: elements of one, two and four bytes."""
    merge = [KernelSpec("merge", out_dtype=dtype) for dtype in HALF]
    states = [KernelSpec("merge_states", q_dtype=dtype) for dtype in (*HALF, DType.FLOAT32)]
    append = [KernelSpec("append", kv_dtype=d) for d in (DType.FLOAT8_E4M3, DType.FLOAT16, DType.FLOAT32)]
    return merge + states + append


def other_cuda_specs() -> list[KernelSpec]:
    """fp8 KV, soft caps and custom masks, and head dims whose tiles differ from the default ones'."""
    bf16, e4m3 = DType.BFLOAT16, DType.FLOAT8_E4M3
    fp8 = [_sm80(bf16, e4m3, dims, rows) for dims, rows in itertools.product(HEAD_DIMS, ROWS)]
    fp8 += [_sm80(DType.FLOAT16, e4m3, (128, 128), rows) for rows in ROWS]
    fp8 += [_sm80(bf16, DType.FLOAT8_E5M2, (128, 128), rows) for rows in ROWS]
    caps = [
        _sm80(bf16, bf16, dims, rows, variant=SOFT_CAP)
        for dims, rows in itertools.product(((128, 128), (256, 256)), ROWS)
    ]
    masks = [_sm80(bf16, bf16, (128, 128), rows, mask_source="packed_bits") for rows in ROWS]
    rope = [_sm80(bf16, bf16, (128, 128), rows, position_encoding="rope") for rows in ROWS]
    dims = [_sm80(bf16, bf16, (d, d), rows) for d, rows in itertools.product((80, 96, 512), (16, 128))]
    return _distinct(fp8 + caps + masks + rope + dims)


def cuda_specs() -> list[KernelSpec]:
    """At most 150: CI compiles each for sm_80 and sm_90a."""
    return _distinct(default_cuda_specs() + other_cuda_specs())


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


def _sm80(
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
    loop = inner_loop(mask_source, position_encoding, variant)
    return KernelSpec(
        "attention_sm80",
        *(q_dtype, kv_dtype, q_dtype, *head_dims),
        kv_source=kv_source,
        mask_source=mask_source,
        position_encoding=position_encoding,
        tile=sm80_tile(*head_dims, kv_dtype, rows, loop)[0],
        variant=variant,
    )


def _distinct(specs: list[KernelSpec]) -> list[KernelSpec]:
    return list(dict.fromkeys(specs))
