"""Rows about `chunk`: a row sees only tokens of its own chunk, and earlier pages are not read."""

from __future__ import annotations

from typing import Any

from cases.case import MIXED_KV, MIXED_Q, Case, decode, prefill

LONG = (1000, 64, 65, 200, 0, 17)


def rows() -> list[Case]:
    hidden: dict[str, Any] = {"hidden_nan": True, "causal": True}
    many: dict[str, Any] = {"num_q_heads": 8, "head_dim": 128, **hidden}
    found = []
    for chunk in (1, 63, 64, 500, 2**31 - 1):
        why = "chunk edge inside, at and past a page and a tile"
        found.append(decode(f"chunk-{chunk}-decode", why, LONG, chunk=chunk, hidden_nan=True))
        found.append(prefill(f"chunk-{chunk}-causal", why, MIXED_Q, MIXED_KV, chunk=chunk, **hidden))
    return [
        *found,
        decode("chunk-rows", "rows of a request in two chunks", (300, 130, 65), q_len=7, chunk=64, hidden_nan=True),
        decode(
            "chunk-decode-window",
            "the window or the chunk begins later",
            LONG,
            chunk=100,
            window_left=30,
            hidden_nan=True,
        ),
        decode(
            "chunk-decode-fixed", "pieces that begin after the chunk's start", (900, 64), chunk=300, fixed_split_size=4
        ),
        decode("chunk-e4m3", "NaN bytes", LONG, chunk=100, kv_dtype="float8_e4m3fn", head_dim=128, hidden_nan=True),
        decode("chunk-page-1", "tokens loaded row by row", LONG, chunk=37, page_size=1, hidden_nan=True),
        prefill("chunk-not-causal", "the rest of the chunk is visible", MIXED_Q, MIXED_KV, chunk=50),
        prefill("chunk-ragged", "ragged", (130, 40), (130, 90), entry="ragged", chunk=48, **hidden),
        prefill("chunk-single", "one request", (130,), (190,), entry="single_prefill", chunk=60, **hidden),
        prefill("chunk-q-over-kv", "rows before the first token", (70, 5), (33, 5), causal=True, chunk=20),
        prefill("chunk-no-tokens", "rows that see nothing", (7, 5), (0, 30), causal=True, chunk=20),
        prefill(
            "chunk-window",
            "the window or the chunk begins later",
            MIXED_Q,
            MIXED_KV,
            window_left=40,
            chunk=64,
            **hidden,
        ),
        prefill(
            "chunk-fixed", "cuts at multiples from token 0", (300,), (700,), chunk=256, fixed_split_size=4, **hidden
        ),
        prefill(
            "chunk-alibi",
            "ALiBi counts distances in the request",
            (130,),
            (400,),
            position="ALIBI",
            chunk=150,
            causal=True,
        ),
        prefill(
            "chunk-rope",
            "RoPE counts positions in the request",
            (130,),
            (400,),
            position="ROPE_LLAMA",
            chunk=150,
            **hidden,
        ),
        prefill(
            "chunk-sinks",
            "sinks in rows of every chunk",
            (90,),
            (130,),
            sinks=True,
            chunk=64,
            soft_cap=8.0,
            causal=True,
        ),
        prefill("chunk-many", "units of large row tiles", (700, 300), (2000, 1203), chunk=512, **many),
        prefill(
            "chunk-many-page-1",
            "units of large row tiles over gathered pages",
            (600,),
            (1300,),
            chunk=512,
            page_size=1,
            **many,
        ),
        prefill("chunk-many-ragged", "whole", (1100,), (1100,), entry="ragged", chunk=256, **many),
        prefill(
            "chunk-mixed",
            "requests with few and with many rows",
            (1, 1, 600, 1),
            (900, 40, 1000, 300),
            chunk=400,
            **many,
        ),
    ]
