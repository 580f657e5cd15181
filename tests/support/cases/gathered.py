"""Pages of one token that so many query rows see that K and V are gathered into rows before a Hopper prefill
(flashpage/plan/gather_rows.py); tests/planner/test_gathered.py checks that these batches are gathered."""

from __future__ import annotations

from typing import Any

from cases.case import Case, on_cards, prefill

PLAIN: dict[str, Any] = {"page_size": 1, "head_dim": 128, "num_q_heads": 16, "num_kv_heads": 1, "causal": True}
HEADS: dict[str, Any] = {**PLAIN, "num_q_heads": 32, "num_kv_heads": 2}
SQUARE: tuple[tuple[int, ...], tuple[int, ...]] = (600,), (600,)
THREE: tuple[tuple[int, ...], tuple[int, ...]] = (560, 615, 700), (560, 901, 700)


def rows() -> list[Case]:
    found = [
        prefill("gathered-plain", "rows of two KV heads, boxes shared by two CTAs", *SQUARE, reduced=True, **HEADS),
        prefill("gathered-full", "every row sees every token", (300, 270), (333, 700), **{**PLAIN, "causal": False}),
        prefill("gathered-three", "requests whose tokens end inside a box", *THREE, **PLAIN),
        prefill("gathered-empty", "requests without rows or tokens", (1500, 0, 900, 0), (1500, 9, 1100, 0), **PLAIN),
        prefill("gathered-few-units", "units cut into pieces", (270,), (3000,), outputs="returned", **PLAIN),
        prefill("gathered-hnd", "HND: heads of a token lie far apart", *SQUARE, kv_layout="HND", **HEADS),
        prefill("gathered-fused", "K and V in one tensor", *SQUARE, cache="fused", **HEADS),
        prefill("gathered-interleaved", "K and V of a token in one row", *SQUARE, cache="interleaved", **HEADS),
        prefill("gathered-gapped", "NaN between rows", *SQUARE, cache="gapped", **HEADS),
        prefill("gathered-permuted", "heads outside of tokens in memory", *SQUARE, cache="permuted", **HEADS),
        prefill("gathered-3d", "slots", *SQUARE, cache="tuple_3d", **HEADS),
        prefill("gathered-indexed", "invalid page numbers after the batch's", *SQUARE, cache="indexed", **PLAIN),
        prefill("gathered-float16", "fp16", *SQUARE, **{**PLAIN, "q_dtype": "float16"}),
        prefill("gathered-dim-64", "single CTAs, three groups of rows", *SQUARE, **{**HEADS, "head_dim": 64}),
        prefill("gathered-dim-96", "96 columns", *SQUARE, **{**PLAIN, "head_dim": 96}),
        prefill("gathered-dim-80", "rows of ten vectors", *SQUARE, **{**HEADS, "head_dim": 80}),
        prefill("gathered-dim-256", "wide heads", *SQUARE, **{**PLAIN, "head_dim": 256}),
        prefill("gathered-192-128", "more of K", *SQUARE, head_dim_vo=128, **{**HEADS, "head_dim": 192}),
        prefill("gathered-64-128", "more of V", *SQUARE, head_dim_vo=128, **{**HEADS, "head_dim": 64}),
        prefill("gathered-group-15", "units of 120 rows", (620,), (620,), **{**PLAIN, "num_q_heads": 15}),
        prefill("gathered-window", "hidden NaN", (600,), (1300,), window_left=650, hidden_nan=True, **PLAIN),
        prefill("gathered-cap", "soft cap, planned by forward", *SQUARE, soft_cap=5.0, at_run=True, **PLAIN),
        prefill("gathered-alibi", "and shifted", *SQUARE, position="ALIBI", **PLAIN),
        prefill("gathered-sinks", "sinks", *SQUARE, sinks=True, **PLAIN),
        prefill("gathered-scales", "scales by head", *SQUARE, scales="per_head", outputs="strided", **HEADS),
        prefill("gathered-no-lse", "no LSE", *SQUARE, outputs="no_lse", **PLAIN),
    ]
    return on_cards(found, "gathered-plain", "gathered-full", "gathered-few-units")
