"""Rows about K and V in formats with scales (include/flashpage/formats)."""

from __future__ import annotations

from typing import Any

from format_names import EACH

from cases.case import MIXED_KV, MIXED_Q, Case, decode, prefill

PAIRS = ("nvfp4+float8_e4m3fn", "int8_token+nvfp4", "bfloat16+nvfp4", "float8_e4m3fn+int4_token")
LONG = (300, 64, 9)
BATCH: dict[str, Any] = {"q_lens": MIXED_Q, "kv_lens": MIXED_KV, "causal": True}
FEW_MASKED: dict[str, Any] = {"q_lens": MIXED_Q, "kv_lens": MIXED_KV, "kv_format": "nvfp4"}
NVFP4: dict[str, Any] = {"kv_format": "nvfp4"}
WIDE: dict[str, Any] = {"q_lens": (150, 260), "kv_lens": (400, 700), "causal": True}


def decode_rows() -> list[Case]:
    nvfp4: dict[str, Any] = {"kv_format": "nvfp4"}
    int4: dict[str, Any] = {"kv_format": "int4_token"}
    return [
        *(
            decode(f"format-{name}", "128 columns", (65, 0, 130, 1), head_dim=128, kv_format=name, reduced=True)
            for name in EACH
        ),
        *(decode(f"format-{name}-dim-64", "rows of half a line", LONG, kv_format=name) for name in EACH),
        *(decode(f"format-{name}", "K and V differ", LONG, head_dim=128, kv_format=name) for name in PAIRS),
        decode("format-bf16-e4m3", "two element types", LONG, kv_format="bfloat16+float8_e4m3fn", scales="float"),
        decode("format-rotated", "rotated keys and queries", LONG, head_dim=128, kv_format="int4_token_rotated"),
        decode("format-rotated-64", "an even power of two", LONG, kv_format="int4_token_rotated", q_dtype="float16"),
        decode("format-nvfp4-scales", "scales of tensors", LONG, head_dim=128, scales="float", **nvfp4),
        decode("format-nvfp4-signs", "scales by head, of either sign", LONG, scales="signs", **nvfp4),
        decode("format-nvfp4-requests", "scales of requests", LONG, head_dim=128, scales="per_request", **nvfp4),
        decode("format-int8-heads", "scales by head as well", LONG, scales="per_head", kv_format="int8_token"),
        decode("format-nvfp4-hnd", "heads before tokens", LONG, kv_layout="HND", head_dim=128, **nvfp4),
        decode("format-int4-hnd", "heads before tokens", LONG, kv_layout="HND", **int4),
        decode("format-nvfp4-fused", "one tensor, and one of scales", LONG, cache="fused", head_dim=128, **nvfp4),
        decode("format-e4m3-fused", "one tensor, and one of scales", LONG, cache="fused", kv_format="e4m3_token"),
        decode("format-nvfp4-gapped", "strides of any length", LONG, cache="gapped", **nvfp4),
        decode("format-int4-interleaved", "K and V in one row", LONG, cache="interleaved", **int4),
        decode("format-nvfp4-page-1", "rows one by one", LONG, page_size=1, cache="tuple_3d", **nvfp4),
        decode("format-int8-page-5", "pages that no tile fits", LONG, page_size=5, kv_format="int8_token"),
        decode("format-nvfp4-page-64", "large pages", (300, 64, 1000), page_size=64, head_dim=128, **nvfp4),
        decode("format-nvfp4-fp16", "fp16 queries", LONG, q_dtype="float16", head_dim=128, **nvfp4),
        decode("format-nvfp4-fp32", "fp32 queries", LONG, q_dtype="float32", **nvfp4),
        decode("format-nvfp4-append", "64 packed rows", LONG, q_len=8, num_q_heads=16, head_dim=128, **nvfp4),
        decode("format-int4-append", "rows of several queries", LONG, q_len=3, num_q_heads=14, **int4),
        decode("format-nvfp4-window", "hidden tokens are NaN", LONG, window_left=40, hidden_nan=True, **nvfp4),
        decode("format-int4-window", "hidden scales are NaN", LONG, window_left=40, hidden_nan=True, **int4),
        decode("format-nvfp4-split", "pieces and a sink", (1000, 70), sinks=True, fixed_split_size=4, **nvfp4),
        decode("format-int8-split", "pieces", (1000, 70), fixed_split_size=4, kv_format="int8_token"),
        decode("format-nvfp4-cap", "a soft cap", LONG, soft_cap=8.0, **nvfp4),
        decode("format-int4-cap", "a soft cap of scores with zero points", LONG, soft_cap=8.0, **int4),
        decode("format-nvfp4-alibi", "ALiBi", LONG, position="ALIBI", **nvfp4),
        decode("format-nvfp4-rope", "converted and rotated", LONG, position="ROPE_LLAMA", head_dim=128, **nvfp4),
        decode("format-narrow-decode", "rows on 8 bytes", LONG, cache="narrow", head_dim=128, **nvfp4),
        decode("format-narrow-append", "rows on 8 bytes", LONG, q_len=8, num_q_heads=16, cache="narrow", **nvfp4),
        decode("format-narrow-page-1", "rows on 8 bytes", LONG, cache="narrow", page_size=1, kv_format="int4_token"),
        decode("format-narrow-types", "rows on 8 bytes", LONG, cache="narrow", kv_format="bfloat16+float8_e4m3fn"),
        decode("format-narrow-rope", "rows on 8 bytes", LONG, position="ROPE_LLAMA", cache="narrow", **nvfp4),
        decode("format-int8-rope", "scales of scores", LONG, position="ROPE_LLAMA", kv_format="int8_token"),
        decode("format-nvfp4-256", "the widest rows", (65, 130), head_dim=256, **nvfp4),
        decode("format-int4-80", "rows of 40 bytes", (65, 9), head_dim=80, **int4),
        decode("format-nvfp4-96", "six scales a row", (65, 9), head_dim=96, **nvfp4),
    ]


def prefill_rows() -> list[Case]:
    return [
        *(prefill(f"format-prefill-{name}", "many rows", kv_format=name, head_dim=128, **BATCH) for name in EACH),
        *(prefill(f"format-wide-{name}", "pages are widened", kv_format=name, head_dim=128, **WIDE) for name in EACH),
        prefill("format-wide-page-64", "fewer pages than tokens of one", page_size=64, head_dim=128, **WIDE | NVFP4),
        prefill("format-wide-rotated", "pages are widened", kv_format="int4_token_rotated", **WIDE),
        prefill("format-wide-lengths", "pages of no request", kv_format="nvfp4", cache="indexed", head_dim=128, **WIDE),
        prefill("format-wide-pair", "K is copied", kv_format="bfloat16+nvfp4", page_size=5, q_dtype="bfloat16", **WIDE),
        prefill("format-prefill-pair", "K and V differ", kv_format="int8_token+nvfp4", **BATCH),
        prefill("format-prefill-rotated", "rotated keys and queries", kv_format="int4_token_rotated", **BATCH),
        prefill("format-prefill-requests", "scales of requests", kv_format="nvfp4", scales="per_request", **BATCH),
        prefill("format-prefill-hnd", "heads before tokens", kv_format="nvfp4", kv_layout="HND", **BATCH),
        prefill("format-prefill-dims", "two head dims", kv_format="nvfp4", head_dim=192, head_dim_vo=128, **BATCH),
        prefill(
            "format-prefill-window",
            "hidden tokens are NaN",
            kv_format="nvfp4",
            window_left=30,
            hidden_nan=True,
            **BATCH,
        ),
        prefill("format-prefill-rope", "keys are rotated", kv_format="nvfp4", position="ROPE_LLAMA", **BATCH),
        prefill("format-wide-rope", "pages are widened", kv_format="int4_token", position="ROPE_LLAMA", **WIDE),
        prefill("format-rope-512", "the widest", kv_format="nvfp4", position="ROPE_LLAMA", head_dim=512, **BATCH),
        prefill("format-prefill-cap", "a soft cap", kv_format="int8_token", soft_cap=8.0, **BATCH),
        prefill("format-prefill-returned", "outputs are returned", kv_format="nvfp4", outputs="returned", **BATCH),
        prefill("format-mask", "a custom mask", kv_format="nvfp4", mask="dense", q_lens=MIXED_Q, kv_lens=MIXED_KV),
        prefill(
            "format-mask-int4", "a custom mask", kv_format="int4_token", mask="packed", q_lens=MIXED_Q, kv_lens=MIXED_KV
        ),
        prefill("format-narrow", "rows on 8 bytes", mask="dense", cache="narrow", head_dim=128, **FEW_MASKED),
        prefill("format-sink-wrapper", "sinks", entry="sink", sinks=True, kv_format="nvfp4", **BATCH),
        prefill("format-ragged", "rows without pages", entry="ragged", kv_format="nvfp4", head_dim=128, **BATCH),
        prefill(
            "format-ragged-int8", "rows without pages", entry="ragged", kv_format="int8_token", kv_layout="HND", **BATCH
        ),
        Case("format-single", "one prefill", (70,), (17,), entry="single_prefill", kv_format="nvfp4", causal=True),
        Case("format-single-decode", "one row", (70,), (1,), entry="single_decode", kv_format="int4_token"),
    ]


def rows() -> list[Case]:
    return [*decode_rows(), *prefill_rows()]
