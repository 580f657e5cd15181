"""Rows about outputs of e4m3, which a run divides by a scale: every way in which kernels store rows and merge them."""

from __future__ import annotations

from typing import Any

from cases.case import MIXED_KV, MIXED_Q, Case, decode, on_cards, prefill

O8: dict[str, Any] = {"o_dtype": "float8_e4m3fn"}
FLOAT: dict[str, Any] = {**O8, "o_scale": "float"}
TENSOR: dict[str, Any] = {**O8, "o_scale": "tensor"}
LONG = (300, 64, 0, 9)
Q_LENS, KV_LENS = (150, 3, 0, 70), (400, 3, 130, 199)
BATCH: dict[str, Any] = {"q_lens": Q_LENS, "kv_lens": KV_LENS, "num_q_heads": 8, "causal": True}
Q8: dict[str, Any] = {"q_dtype": "float8_e4m3fn"}
E4M3: dict[str, Any] = {"kv_dtype": "float8_e4m3fn"}
_CPU = (
    "o8-decode",
    "o8-decode-split",
    "o8-decode-fp8",
    "o8-append-8",
    "o8-prefill",
    "o8-prefill-no-scale",
    "o8-prefill-saturates",
    "o8-prefill-strides",
    "o8-prefill-dim-80",
    "o8-prefill-split",
    "o8-q8-prefill",
    "o8-single-prefill",
    "o8-sink",
)


def decode_rows() -> list[Case]:
    rows = {"q_len": 8, "num_q_heads": 16}
    return [
        decode("o8-decode", "a request without tokens, scales of V as well", LONG, scales="per_head", **FLOAT),
        decode("o8-decode-split", "merged, a sink", (1000, 70), fixed_split_size=4, sinks=True, reduced=True, **TENSOR),
        decode("o8-decode-clusters", "merged by clusters", (20_000,), **TENSOR),
        decode("o8-decode-pieces", "merged in the launch", (5000, 4000, 10, 3000), num_q_heads=16, **TENSOR),
        decode("o8-decode-fp8", "q, K and V in e4m3, whose columns lie otherwise", LONG, **FLOAT, **Q8),
        decode("o8-decode-nvfp4", "products with swapped factors", LONG, kv_format="nvfp4", head_dim=128, **FLOAT),
        decode("o8-decode-int8", "scales of tokens", LONG, kv_format="int8_token", head_dim=128, **TENSOR),
        decode("o8-decode-page-1", "tokens loaded row by row", LONG, page_size=1, head_dim=128, **FLOAT),
        decode("o8-decode-dim-24", "rows of 24 bytes", LONG, head_dim=24, **FLOAT),
        decode("o8-decode-dim-256", "warps share the columns", LONG, head_dim=256, **TENSOR),
        decode("o8-decode-dim-512", "four warps share the columns", (65, 130), head_dim=512, **FLOAT),
        decode("o8-append-8", "64 packed rows", LONG, outputs="strided", **rows, **TENSOR),
        decode("o8-append-8-split", "64 packed rows, merged", (3000, 90), fixed_split_size=16, **rows, **FLOAT),
    ]


def prefill_rows() -> list[Case]:
    wide: dict[str, Any] = {"head_dim": 128, **BATCH}
    sizes = ((16, 0), (72, 0), (80, 0), (96, 0), (128, 0), (192, 128), (192, 0), (256, 0), (320, 64), (512, 0))
    return [
        prefill("o8-prefill", "three warpgroups on Hopper", reduced=True, **BATCH, **FLOAT),
        prefill("o8-prefill-no-scale", "a scale of 1: small and subnormal outputs", **BATCH, **O8),
        prefill("o8-prefill-saturates", "outputs beyond 448 become 448", o_scale="small", **BATCH, **O8),
        prefill("o8-prefill-strides", "gaps between rows and heads of out", outputs="strided", **BATCH, **TENSOR),
        *(
            prefill(f"o8-prefill-dim-{qk}{f'-{vo}' if vo else ''}", "rows of out", head_dim=qk, head_dim_vo=vo, **more)
            for qk, vo in sizes
            for more in ({**BATCH, **TENSOR},)
        ),
        prefill("o8-prefill-half", "fp16 queries", q_dtype="float16", **wide, **FLOAT),
        prefill("o8-prefill-mixed", "rows of decode next to a prompt", MIXED_Q, MIXED_KV, causal=True, **FLOAT),
        prefill("o8-prefill-page-1", "tokens loaded row by row", page_size=1, **wide, **FLOAT),
        prefill("o8-prefill-ragged", "no pages, scales of V", entry="ragged", scales="per_head", **wide, **TENSOR),
        prefill("o8-prefill-group-5", "units that are no boxes of rows", **{**wide, "num_q_heads": 10}, **FLOAT),
        prefill("o8-prefill-fp8", "K and V are converted", scales="tensor", **wide, **E4M3, **TENSOR),
        prefill("o8-prefill-split", "merged", (150,), (2000,), num_q_heads=8, fixed_split_size=8, **TENSOR),
        prefill("o8-prefill-split-wide", "merged", (40,), (5000,), num_q_heads=8, head_dim=256, **FLOAT),
        prefill(
            "o8-prefill-long", "pairs", (300, 257), (1100, 1301), head_dim=128, num_q_heads=10, causal=True, **FLOAT
        ),
        prefill("o8-prefill-mask", "tiles of a mask", (70, 33), (70, 200), num_q_heads=8, mask="packed", **FLOAT),
        prefill("o8-prefill-cap", "a soft cap", soft_cap=5.0, **wide, **FLOAT),
        prefill("o8-prefill-rope", "one unit's Q at a time", position="ROPE_LLAMA", **wide, **TENSOR),
        prefill("o8-prefill-nvfp4", "pages are widened", (300,), (700,), head_dim=128, kv_format="nvfp4", **FLOAT),
        prefill(
            "o8-single-prefill",
            "outputs are returned",
            (20,),
            (70,),
            entry="single_prefill",
            outputs="returned",
            **TENSOR,
        ),
        prefill("o8-sink", "the wrapper for sinks", entry="sink", sinks=True, **BATCH, **FLOAT),
    ]


def product_rows() -> list[Case]:
    """e4m3 queries, whose products on Hopper have other columns in a lane."""
    wide: dict[str, Any] = {"head_dim": 128, **BATCH, **Q8}
    return [
        prefill("o8-q8-prefill", "e4m3 throughout", scales="tensor", **{**wide, "head_dim": 64}, **FLOAT),
        prefill("o8-q8-prefill-wide", "e4m3 throughout", scales="per_head", reduced=True, **wide, **TENSOR),
        *(
            prefill(f"o8-q8-prefill-dim-{n}", "rows of out", **{**wide, "head_dim": n}, **FLOAT)
            for n in (32, 80, 96, 192, 256)
        ),
        prefill("o8-q8-prefill-192-128", "V is narrower", **{**wide, "head_dim": 192}, head_dim_vo=128, **TENSOR),
        prefill("o8-q8-prefill-strides", "gaps between rows of out", outputs="strided", **wide, **TENSOR),
        prefill("o8-q8-prefill-ragged", "no pages", entry="ragged", **wide, **FLOAT),
        prefill("o8-q8-prefill-split", "merged", (150,), (2000,), num_q_heads=8, fixed_split_size=8, **Q8, **TENSOR),
        prefill("o8-q8-prefill-long", "pairs", (300, 257), (1700, 1901), head_dim=128, num_q_heads=8, **Q8, **FLOAT),
        prefill("o8-q8-prefill-page-1", "K and V become fp16", page_size=1, **wide, **FLOAT),
    ]


def rows() -> list[Case]:
    return on_cards([*decode_rows(), *prefill_rows(), *product_rows()], *_CPU)
