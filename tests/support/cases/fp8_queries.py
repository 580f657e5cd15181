"""Rows about fp8 queries: they become fp16 while they are loaded, in the order that fp8 keys need or in their own."""

from __future__ import annotations

from typing import Any

from cases.case import MIXED_KV, MIXED_Q, Case, decode, prefill

E4M3: dict[str, Any] = {"q_dtype": "float8_e4m3fn"}
E5M2: dict[str, Any] = {"q_dtype": "float8_e5m2"}
LONG = (300, 64, 9)


def decode_rows() -> list[Case]:
    other: dict[str, Any] = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e5m2"}
    rows = {"q_len": 8, "num_q_heads": 16}
    return [
        decode("q8-e4m3", "the output is bf16 by default", (65, 0, 130), head_dim=128, scales="float", **E4M3),
        decode("q8-e5m2", "fp16 outputs", (65, 0, 130), head_dim=128, o_dtype="float16", scales="per_head", **E5M2),
        decode("q8-signs", "scales by head, of either sign", LONG, scales="signs", **E4M3),
        decode(
            "q8-page-1", "keys loaded row by row", LONG, page_size=1, scales="tensor", kv_dtype="float8_e4m3fn", **E5M2
        ),
        decode("q8-dim-24", "padding between pairs of values in a row", (65, 9), head_dim=24, page_size=12, **other),
        decode("q8-dim-80", "rows of an odd number of 16-byte chunks", (65, 9), head_dim=80, o_dtype="float16", **E4M3),
        decode("q8-dim-256", "Q is read from shared memory", (65, 130), head_dim=256, **E4M3),
        decode(
            "q8-dim-512-64-rows", "the largest Q to convert", (65, 130), head_dim=512, q_len=16, num_q_heads=8, **E4M3
        ),
        decode("q8-append-8", "64 packed rows", LONG, head_dim=128, scales="float", reduced=True, **rows, **E4M3),
        decode(
            "q8-append-8-heads",
            "scales by head for several rows",
            LONG,
            scales="per_head",
            o_dtype="float16",
            **rows,
            **E5M2,
        ),
        decode("q8-append-3", "rows that do not fill a tile", LONG, q_len=3, num_q_heads=14, **E4M3),
        decode("q8-short", "more units than places for Q", tuple(1 + 5 * i % 37 for i in range(300)), **E4M3),
        decode(
            "q8-split", "pieces, a window, a sink", (1000, 70), window_left=700, sinks=True, fixed_split_size=4, **E4M3
        ),
        decode("q8-rope", "Q is rotated as fp16", LONG, position="ROPE_LLAMA", **E4M3),
        Case("q8-single-decode", "default output", (70,), (1,), entry="single_decode", scales="float", **E5M2),
    ]


def prefill_rows() -> list[Case]:
    batch: dict[str, Any] = {"q_lens": MIXED_Q, "kv_lens": MIXED_KV, "causal": True}
    return [
        prefill("q8-prefill-e4m3", "many rows", head_dim=128, scales="float", **batch, **E4M3),
        prefill("q8-prefill-e5m2", "fp16 outputs", o_dtype="float16", scales="per_head", **batch, **E5M2),
        prefill("q8-prefill-unlike", "other keys", kv_dtype="float8_e4m3fn", head_dim=128, **batch, **E5M2),
        prefill(
            "q8-prefill-192-128",
            "value dim smaller than the query dim",
            head_dim=192,
            head_dim_vo=128,
            scales="signs",
            **batch,
            **E4M3,
        ),
        prefill("q8-prefill-dim-40", "padding between pairs of values", head_dim=40, **batch, **E4M3),
        prefill("q8-prefill-dim-256", "few registers left next to the accumulators", head_dim=256, **batch, **E4M3),
        prefill(
            "q8-prefill-strides", "q is a slice of a QKV row", q_strides="fused_qkv", outputs="strided", **batch, **E4M3
        ),
        prefill("q8-prefill-rope", "Q is rotated as fp16", head_dim=128, position="ROPE_LLAMA", **batch, **E5M2),
        prefill("q8-prefill-cap", "soft cap at run", soft_cap=5.0, at_run=True, outputs="returned", **batch, **E4M3),
        prefill("q8-prefill-mask", "bits", (30, 3, 64), (41, 70, 200), mask="packed", scales="float", **E4M3),
        prefill("q8-ragged", "ragged", entry="ragged", scales="per_head", head_dim=128, **batch, **E4M3),
        prefill("q8-sink", "the wrapper for sinks", entry="sink", sinks=True, **batch, **E4M3),
        prefill(
            "q8-single-prefill",
            "an output type is given",
            (20,),
            (70,),
            entry="single_prefill",
            o_dtype="float16",
            **E4M3,
        ),
    ]


def rows() -> list[Case]:
    return [*decode_rows(), *prefill_rows()]
