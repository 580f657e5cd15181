"""Rows about prefill of e4m3 whose V is transposed once before, on Hopper: enough rows see each token, and each row
enough tokens (flashpage/plan/value_columns.py); tests/kernels/test_value_columns.py checks that these batches are read
so."""

from __future__ import annotations

from typing import Any

from cases.case import Case, on_cards, prefill

Q8: dict[str, Any] = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "causal": True}
PLAIN: dict[str, Any] = {**Q8, "head_dim": 128, "num_q_heads": 32, "num_kv_heads": 1}
HEADS: dict[str, Any] = {**PLAIN, "num_q_heads": 64, "num_kv_heads": 2}
ONE: tuple[tuple[int, ...], tuple[int, ...]] = (200,), (1800,)
THREE: tuple[tuple[int, ...], tuple[int, ...]] = (160, 215, 200), (1760, 2101, 1901)


def rows() -> list[Case]:
    some: tuple[tuple[int, ...], tuple[int, ...]] = (300, 0, 400, 0), (3500, 9, 4100, 0)
    few: tuple[tuple[int, ...], tuple[int, ...]] = (600, 3, 5, 4), (2500, 1800, 1913, 2200)
    found = [
        prefill("columns-pages", "pages of 16, shared by two CTAs", *ONE, reduced=True, **HEADS),
        prefill("columns-full", "every row sees every token", (150, 140), (1633, 1700), **{**PLAIN, "causal": False}),
        prefill("columns-three", "requests whose tokens end inside a page", *THREE, **PLAIN),
        prefill("columns-empty", "requests without rows or tokens", *some, **PLAIN),
        prefill("columns-few-units", "units cut into pieces", (140,), (3000,), outputs="returned", **PLAIN),
        prefill("columns-few-rows", "requests of one tile next to a long one", *few, **PLAIN),
        prefill("columns-ragged", "requests inside of sixteen tokens", *THREE, entry="ragged", **HEADS),
        prefill("columns-ragged-hnd", "heads outside of tokens", *THREE, entry="ragged", kv_layout="HND", **HEADS),
        prefill("columns-page-48", "pages of three boxes", *THREE, page_size=48, **HEADS),
        prefill("columns-page-64", "HND", *THREE, page_size=64, kv_layout="HND", **HEADS),
        prefill("columns-page-256", "pages longer than a tile", *THREE, page_size=256, **PLAIN),
        prefill("columns-fused", "K and V in one tensor", *ONE, cache="fused", **HEADS),
        prefill("columns-interleaved", "K and V of a token in one row", *ONE, cache="interleaved", **HEADS),
        prefill("columns-gapped", "NaN between rows", *ONE, cache="gapped", **HEADS),
        prefill("columns-permuted", "heads outside of tokens in memory", *ONE, cache="permuted", **HEADS),
        prefill("columns-strides", "q is part of a QKV row", *ONE, q_strides="fused_qkv", outputs="strided", **HEADS),
        prefill("columns-dim-32", "boxes of 16 columns", *ONE, **{**HEADS, "head_dim": 32}),
        prefill("columns-dim-64", "boxes of 32 columns", *ONE, **{**HEADS, "head_dim": 64}),
        prefill("columns-dim-96", "boxes of 48 columns", *ONE, **{**PLAIN, "head_dim": 96}),
        prefill("columns-128-64", "more of K", *ONE, head_dim_vo=64, **HEADS),
        prefill("columns-64-128", "more of V", *ONE, head_dim_vo=128, **{**HEADS, "head_dim": 64}),
        prefill("columns-group-15", "units of 120 rows", (320,), (1920,), **{**PLAIN, "num_q_heads": 15}),
        prefill("columns-kv-heads", "several heads of a job", *ONE, **{**PLAIN, "num_q_heads": 96, "num_kv_heads": 3}),
        prefill("columns-window", "hidden NaN", (300,), (2600,), window_left=1700, hidden_nan=True, **PLAIN),
        prefill("columns-cap", "soft cap, planned by forward", *ONE, soft_cap=5.0, at_run=True, **PLAIN),
        prefill("columns-sinks", "sinks", *ONE, sinks=True, **PLAIN),
        prefill("columns-scales", "scales by head", *ONE, scales="per_head", **HEADS),
        prefill("columns-requests", "scales of requests", *THREE, scales="per_request", **HEADS),
        prefill("columns-float16", "outputs of fp16", *ONE, o_dtype="float16", **HEADS),
        prefill("columns-e4m3", "outputs of e4m3", *ONE, o_dtype="float8_e4m3fn", o_scale="float", **HEADS),
        prefill("columns-long", "sums over many tiles", (140,), (9000,), **PLAIN),
        prefill("columns-no-lse", "no LSE", *ONE, outputs="no_lse", **PLAIN),
    ]
    return on_cards(found, "columns-few-units")
