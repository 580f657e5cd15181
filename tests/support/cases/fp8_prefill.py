"""Rows about prefill over fp8 caches: K and V become 16 bits wide between the cache and the tensor cores, or all
factors stay fp8."""

from __future__ import annotations

from typing import Any

from cases.case import Case, prefill

Q_LENS = (150, 3, 0, 70)  # with a group of 4, more packed rows than decode kernels take
KV_LENS = (400, 3, 130, 199)
BATCH: dict[str, Any] = {"q_lens": Q_LENS, "kv_lens": KV_LENS, "num_q_heads": 8, "causal": True}
E4M3: dict[str, Any] = {"kv_dtype": "float8_e4m3fn"}
E5M2: dict[str, Any] = {"kv_dtype": "float8_e5m2"}
Q8: dict[str, Any] = {"q_dtype": "float8_e4m3fn"}
ONE: dict[str, Any] = {"num_q_heads": 8}


def dims() -> list[Case]:
    """Every class of tiles, and rows with an odd number of 8-byte vectors."""
    sizes = ((16, 0), (24, 32), (40, 0), (64, 0), (72, 0), (80, 0), (96, 0), (192, 128), (192, 0), (200, 0), (256, 0))
    return [
        prefill(f"fp8-prefill-dim-{qk}-{vo or qk}", "tile of its own", head_dim=qk, head_dim_vo=vo, **BATCH, **E4M3)
        for qk, vo in sizes
    ]


def scaled_groups(name: str, **options: Any) -> list[Case]:
    """Scales by head in groups that do not divide eight: rows eight apart, which a lane has, are of different heads."""
    return [
        prefill(
            *(f"{name}-{scales.replace('_', '-')}-group-{group}", "scales of different heads"),
            **options | {"num_q_heads": 2 * group, "scales": scales},
        )
        for group, scales in ((3, "per_head"), (6, "per_head"), (12, "per_head"), (16, "per_head"), (3, "signs"))
    ]


def forms() -> list[Case]:
    wide: dict[str, Any] = {"head_dim": 128, **BATCH}
    return [
        prefill(
            "fp8-prefill", "bf16 queries over e4m3, scales by head", scales="per_head", reduced=True, **wide, **E4M3
        ),
        prefill("fp8-prefill-full", "no mask", **{**wide, "causal": False}, **E4M3),
        prefill("fp8-prefill-e5m2", "bf16 queries over e5m2, scales of either sign", scales="signs", **wide, **E5M2),
        prefill("fp8-prefill-half", "fp16 queries, which are not converted", q_dtype="float16", **wide, **E4M3),
        prefill("fp8-prefill-page-1", "pages of one token", page_size=1, **wide, **E4M3),
        prefill("fp8-prefill-page-5", "a page size that divides no tile", page_size=5, kv_layout="HND", **wide, **E5M2),
        prefill("fp8-prefill-gapped", "a cache with gaps between tokens and pages", cache="gapped", **wide, **E4M3),
        prefill("fp8-prefill-interleaved", "K and V in one tensor", cache="interleaved", **wide, **E4M3),
        prefill("fp8-prefill-ragged", "no pages", entry="ragged", **wide, **E4M3),
        prefill(
            "fp8-prefill-strides", "q is a slice of a QKV row", q_strides="fused_qkv", outputs="strided", **wide, **E4M3
        ),
        prefill("fp8-prefill-group-5", "a group whose rows cross tiles", **{**wide, "num_q_heads": 10}, **E4M3),
        *scaled_groups("fp8-prefill", **wide, **E4M3),
        prefill(
            "fp8-q5m2-prefill",
            "e5m2 queries and cache",
            q_dtype="float8_e5m2",
            **{**wide, "head_dim": 256},
            **E4M3,
        ),
    ]


def options() -> list[Case]:
    return [
        prefill(
            "fp8-prefill-window", "tokens left of it are not read", window_left=50, hidden_nan=True, **BATCH, **E4M3
        ),
        *(
            prefill(f"fp8-wide-{dtype[7:]}", "pages are widened", (300,), (700,), head_dim=128, kv_dtype=dtype, **ONE)
            for dtype in ("float8_e4m3fn", "float8_e5m2")
        ),
        prefill("fp8-prefill-cap", "scores go through the soft cap", soft_cap=5.0, scales="float", **BATCH, **E4M3),
        prefill("fp8-prefill-negative", "scores are scaled before the softmax", scales="negative", **BATCH, **E4M3),
        prefill("fp8-prefill-sinks", "the denominator", sinks=True, **BATCH, **E4M3),
        prefill("fp8-prefill-split", "pieces are merged", (150,), (2000,), num_q_heads=8, fixed_split_size=8, **E4M3),
        prefill("fp8-prefill-mask", "bits", (70, 33), (70, 200), num_q_heads=8, mask="packed", head_dim=128, **E4M3),
        prefill(
            "fp8-prefill-empty", "a request without tokens", (90, 90), (0, 90), num_q_heads=8, head_dim=128, **E4M3
        ),
    ]


def products() -> list[Case]:
    """e4m3 queries, which Hopper multiplies with fp8 keys."""
    batch: dict[str, Any] = {"q_dtype": "float8_e4m3fn", **BATCH}
    wide: dict[str, Any] = {"head_dim": 128, **batch}
    long: dict[str, Any] = {**wide, "q_lens": (40,), "kv_lens": (5000,)}
    return [
        prefill("fp8-q8-prefill", "e4m3 queries and cache, scales by head", scales="per_head", reduced=True, **wide),
        prefill("fp8-q8-prefill-requests", "scales of requests", scales="per_request", **wide),
        prefill("fp8-q8-prefill-full", "no mask", o_dtype="float16", scales="tensor", **{**wide, "causal": False}),
        *(prefill(f"fp8-q8-prefill-dim-{n}", "tile of its own", head_dim=n, **batch) for n in (32, 64, 96, 192, 256)),
        prefill(
            "fp8-q8-prefill-192-128", "value dim smaller than the query dim", head_dim=192, head_dim_vo=128, **batch
        ),
        prefill("fp8-q8-prefill-page-8", "small boxes", page_size=8, kv_layout="HND", **wide),
        prefill("fp8-q8-prefill-page-64", "large boxes", page_size=64, scales="float", **wide),
        prefill("fp8-q8-prefill-page-1", "pages of one token, which become fp16", page_size=1, **wide),
        prefill("fp8-q8-prefill-gapped", "a cache with gaps between tokens and pages", cache="gapped", **wide),
        prefill("fp8-q8-prefill-interleaved", "K and V in one tensor", cache="interleaved", **wide),
        prefill("fp8-q8-prefill-ragged", "no pages", entry="ragged", scales="tensor", **wide),
        prefill(
            "fp8-q8-prefill-strides", "q is a slice of a QKV row", q_strides="fused_qkv", outputs="strided", **wide
        ),
        prefill("fp8-q8-prefill-group-5", "a group whose rows cross tiles", **{**wide, "num_q_heads": 10}),
        *scaled_groups("fp8-q8-prefill", **wide),
        prefill(
            *("fp8-q8-prefill-cap-group-5", "scales by head before the cap"),
            **wide | {"num_q_heads": 10, "soft_cap": 5.0, "scales": "per_head"},
        ),
        prefill("fp8-q8-prefill-window", "tokens left of the window are NaN", window_left=50, hidden_nan=True, **wide),
        prefill("fp8-q8-prefill-cap", "scores go through the soft cap", soft_cap=5.0, scales="float", **wide),
        prefill("fp8-q8-prefill-alibi", "ALiBi's tensor of slopes", position="ALIBI", **batch),
        prefill("fp8-q8-prefill-signs", "scores are scaled before the softmax", scales="signs", **wide),
        prefill("fp8-q8-prefill-sinks", "the denominator", sinks=True, **wide),
        prefill("fp8-q8-prefill-split", "pieces are merged", (150,), (2000,), fixed_split_size=8, **ONE, **Q8),
        prefill(
            "fp8-q8-prefill-mask",
            "mask bits, which convert fp8 to fp16",
            (70, 33),
            (70, 200),
            mask="packed",
            head_dim=128,
            **ONE,
            **Q8,
        ),
        prefill("fp8-q8-prefill-empty", "a request without tokens", (90, 90), (0, 90), head_dim=128, **ONE, **Q8),
        prefill("fp8-q8-prefill-long", "sums over many tiles", **long),
        prefill("fp8-q8-prefill-long-steep", "sums over many tiles, whose maxima change", sm_scale=1.0, **long),
    ]


def rows() -> list[Case]:
    return [*dims(), *forms(), *options(), *products()]
