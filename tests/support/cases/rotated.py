"""Rows about prefill under RoPE whose q and K are rotated once before, on Hopper: enough rows see each token, and each
row enough tokens (flashpage/plan/rotated_pages.py); tests/kernels/test_rotate_pages.py checks that these batches are
rotated so."""

from __future__ import annotations

from typing import Any

from cases.case import Case, on_cards, prefill

ROPE: dict[str, Any] = {"position": "ROPE_LLAMA", "causal": True}
PLAIN: dict[str, Any] = {**ROPE, "head_dim": 128, "num_q_heads": 16, "num_kv_heads": 1}
HEADS: dict[str, Any] = {**PLAIN, "num_q_heads": 32, "num_kv_heads": 2}
ONE: tuple[tuple[int, ...], tuple[int, ...]] = (600,), (1500,)
THREE: tuple[tuple[int, ...], tuple[int, ...]] = (260, 415, 300), (1560, 1901, 1700)


def rows() -> list[Case]:
    far: dict[str, Any] = {"rope_scale": 4.0, "rope_theta": 5e5}
    found = [
        prefill("rotated-pages", "pages of 16, with new numbers", *ONE, reduced=True, **HEADS),
        prefill("rotated-full", "every row sees every token", (300, 270), (1333, 1700), **{**PLAIN, "causal": False}),
        prefill("rotated-three", "requests whose tokens end inside a page", *THREE, **PLAIN),
        prefill("rotated-empty", "requests without rows or tokens", (700, 0, 900, 0), (2500, 9, 3100, 0), **PLAIN),
        prefill("rotated-few-units", "units cut into pieces", (70,), (3000,), outputs="returned", **PLAIN),
        prefill("rotated-page-1", "pages of one token become rows", *ONE, page_size=1, **HEADS),
        prefill("rotated-page-5", "pages that boxes cannot bring", *ONE, page_size=5, kv_layout="HND", **HEADS),
        prefill("rotated-page-64", "pages longer than a job", *THREE, page_size=64, **HEADS),
        prefill("rotated-hnd", "HND: heads of a token lie far apart", *ONE, kv_layout="HND", **HEADS),
        prefill("rotated-fused", "K and V in one tensor", *ONE, cache="fused", **HEADS),
        prefill("rotated-gapped", "NaN between rows", *ONE, cache="gapped", **HEADS),
        prefill("rotated-permuted", "heads outside of tokens in memory", *ONE, cache="permuted", **HEADS),
        prefill("rotated-3d", "slots", *ONE, cache="tuple_3d", page_size=1, **HEADS),
        prefill("rotated-ragged", "V is read where it is", *THREE, entry="ragged", reduced=True, **HEADS),
        prefill("rotated-ragged-hnd", "K's copy is NHD, V is not", *THREE, entry="ragged", kv_layout="HND", **HEADS),
        prefill("rotated-strides", "q is part of a QKV row", *ONE, q_strides="fused_qkv", outputs="strided", **HEADS),
        prefill("rotated-float16", "fp16, other frequencies", *ONE, q_dtype="float16", **far, **PLAIN),
        prefill("rotated-dim-64", "four threads a row", *ONE, **{**HEADS, "head_dim": 64}),
        prefill("rotated-dim-80", "51 rows a job", *ONE, **{**HEADS, "head_dim": 80}),
        prefill("rotated-dim-96", "96 columns", *ONE, **{**PLAIN, "head_dim": 96}),
        prefill("rotated-dim-256", "wide heads", *ONE, **{**PLAIN, "head_dim": 256}),
        prefill("rotated-192-128", "more of K", *ONE, head_dim_vo=128, **{**HEADS, "head_dim": 192}),
        prefill("rotated-64-128", "more of V", *ONE, head_dim_vo=128, **{**HEADS, "head_dim": 64}),
        prefill("rotated-group-15", "units of 120 rows", (620,), (1620,), **{**PLAIN, "num_q_heads": 15}),
        prefill("rotated-kv-heads", "several jobs of heads", *ONE, **{**PLAIN, "num_q_heads": 36, "num_kv_heads": 9}),
        prefill("rotated-window", "hidden NaN", (600,), (2600,), window_left=1300, hidden_nan=True, **PLAIN),
        prefill("rotated-cap", "soft cap, planned by forward", *ONE, soft_cap=5.0, at_run=True, **PLAIN),
        prefill("rotated-sinks", "sinks", *ONE, sinks=True, **PLAIN),
        prefill("rotated-scales", "scales by head", *ONE, scales="per_head", **HEADS),
        prefill("rotated-no-lse", "no LSE", *ONE, outputs="no_lse", **PLAIN),
    ]
    return on_cards(found, "rotated-full", "rotated-few-units")
