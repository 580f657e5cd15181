"""Rows whose contexts are long enough for pairs of CTAs on Hopper, which share their loads of K and V
(flashpage/kernels/context_classes.py): boxes of every kind, and units whose second half has few rows or none."""

from __future__ import annotations

from typing import Any

from cases.case import Case, on_cards, prefill

BF16: dict[str, Any] = {"q_dtype": "bfloat16", "head_dim": 128, "num_q_heads": 8, "num_kv_heads": 2, "causal": True}
FULL: dict[str, Any] = {**BF16, "causal": False}
E4M3: dict[str, Any] = {**BF16, "q_dtype": "float8_e4m3fn"}
PAGE_1: dict[str, Any] = {**BF16, "page_size": 1}
LENGTHS: tuple[tuple[int, ...], tuple[int, ...]] = (300, 257, 290), (1100, 1301, 1000)


def bf16_rows() -> list[Case]:
    return [
        prefill("long-paged", "boxes loaded in turns, a pair's last unit half full", *LENGTHS, **BF16),
        prefill("long-ragged", "an odd number of boxes", *LENGTHS, entry="ragged", **BF16),
        prefill("long-page-8", "many boxes", *LENGTHS, page_size=8, **BF16),
        prefill("long-page-64", "large boxes, HND", *LENGTHS, page_size=64, kv_layout="HND", **BF16),
        prefill(
            "long-uneven", "requests of one row, of no rows and of no tokens", (1500, 1, 0, 40), (1600, 1, 9, 0), **BF16
        ),
        prefill("long-few-units", "units cut into pieces", (520,), (2100,), outputs="returned", **BF16),
        prefill("long-full", "only tokens after the end are hidden", *LENGTHS, **FULL),
        prefill(
            "long-window",
            "a window whose both ends lie inside tiles",
            (700, 300),
            (2000, 1203),
            window_left=850,
            **BF16,
        ),
        prefill("long-group-1", "rows of one head", (1100,), (4300,), **{**BF16, "num_kv_heads": 1, "num_q_heads": 1}),
        prefill(
            "long-group-5", "units of 125 rows for each CTA", *LENGTHS, reduced=True, **{**BF16, "num_q_heads": 10}
        ),
        prefill("long-group-7", "of 126, cut", (520,), (2100,), outputs="returned", **{**BF16, "num_q_heads": 14}),
        prefill("long-group-5-strided", "no boxes", *LENGTHS, outputs="strided", **{**BF16, "num_q_heads": 10}),
        prefill("long-group-3-page-1", "no pairs", *LENGTHS, page_size=1, **{**BF16, "num_q_heads": 6}),
        prefill("long-group-12", "units of 120", *LENGTHS, entry="ragged", **{**BF16, "num_q_heads": 24}),
        prefill("long-group-28", "q loaded row by row", *LENGTHS, **{**BF16, "num_q_heads": 28, "num_kv_heads": 1}),
        prefill(
            "long-cap",
            "scores go through the soft cap",
            *LENGTHS,
            soft_cap=5.0,
            at_run=True,
            outputs="returned",
            **BF16,
        ),
        prefill("long-alibi", "and shifted", *LENGTHS, position="ALIBI", **BF16),
        prefill("long-sinks", "sinks", *LENGTHS, sinks=True, **BF16),
        prefill("long-float16", "fp16", *LENGTHS, **{**BF16, "q_dtype": "float16"}),
        prefill("long-dim-96", "three groups of 64 rows, two blocks of columns", *LENGTHS, **{**BF16, "head_dim": 96}),
        prefill("long-192-128", "three blocks", *LENGTHS, head_dim_vo=128, **{**BF16, "head_dim": 192}),
        prefill(
            "long-192-ragged", "ragged tokens in five boxes", *LENGTHS, entry="ragged", **{**BF16, "head_dim": 192}
        ),
    ]


def single_rows(name: str) -> list[Case]:
    """Contexts that single CTAs read: short ones by tiles of 128 tokens, others by tiles of 160."""
    q_lens, kv_lens = LENGTHS[0], {"short": (400, 513, 333), "usual": (850, 961, 800)}[name]
    return [
        prefill(f"{name}-paged", "tiles whole and half at the end", q_lens, kv_lens, **BF16),
        prefill(f"{name}-ragged", "other boxes", q_lens, kv_lens, entry="ragged", **BF16),
        prefill(f"{name}-page-8", "many boxes", q_lens, kv_lens, page_size=8, kv_layout="HND", **BF16),
        prefill(f"{name}-page-64", "large ones", q_lens, kv_lens, page_size=64, cache="fused", **BF16),
        prefill(f"{name}-uneven", "of one row, of none", (*q_lens, 1, 0), (*kv_lens, 700, 700), **BF16),
        prefill(f"{name}-window", "both ends", q_lens, kv_lens, window_left=150, hidden_nan=True, **BF16),
        prefill(f"{name}-group-3", "units of 126 rows", q_lens, kv_lens, **{**BF16, "num_q_heads": 6}),
        prefill(f"{name}-full", "nothing is hidden", (200,), kv_lens[:1], **{**FULL, "num_kv_heads": 8}),
        prefill(f"{name}-float16", "sinks", q_lens, kv_lens, sinks=True, **{**BF16, "q_dtype": "float16"}),
    ]


def fp8_rows() -> list[Case]:
    return [
        prefill("long-q8", "each CTA transposes V", *LENGTHS, reduced=True, scales="per_head", **E4M3),
        prefill("long-q8-ragged", "fp8 ragged tokens", *LENGTHS, entry="ragged", **E4M3),
        prefill("long-q8-group-5", "units of 125 rows", *LENGTHS, **{**E4M3, "num_q_heads": 10}),
        prefill("long-q8-dim-64", "one block of columns", *LENGTHS, page_size=64, **{**E4M3, "head_dim": 64}),
        prefill("long-q8-window", "V rows hidden at both ends", (700,), (2000,), window_left=850, **E4M3),
    ]


def small_page_rows() -> list[Case]:
    """Pages too small for boxes: single CTAs load them row by row."""
    return [
        prefill("long-page-1", "single rows", *LENGTHS, **PAGE_1),
        prefill("long-page-1-full", "only tokens after the end are hidden", *LENGTHS, **{**PAGE_1, "causal": False}),
        prefill(
            "long-page-1-window",
            "tokens left of the window are NaN",
            (700, 300),
            (2000, 1203),
            window_left=850,
            hidden_nan=True,
            **PAGE_1,
        ),
        prefill("long-page-1-uneven", "of none", (1500, 1, 0, 40), (1600, 1, 9, 0), **PAGE_1),
        prefill("long-page-1-few-units", "units cut into pieces", (520,), (2100,), outputs="returned", **PAGE_1),
        prefill("long-page-1-hnd", "heads apart", *LENGTHS, kv_layout="HND", **PAGE_1),
        prefill("long-page-1-group-5", "units of 125 rows", *LENGTHS, **{**PAGE_1, "num_q_heads": 10}),
        prefill("long-page-1-cap", "scores go through the soft cap", *LENGTHS, soft_cap=5.0, at_run=True, **PAGE_1),
        prefill("long-page-1-sinks", "sinks", *LENGTHS, sinks=True, **PAGE_1),
        prefill("long-page-1-float16", "fp16", *LENGTHS, **{**PAGE_1, "q_dtype": "float16"}),
        prefill("long-page-1-dim-64", "single CTAs", *LENGTHS, **{**PAGE_1, "head_dim": 64}),
        prefill(
            "long-page-1-dim-96", "warps load different numbers of columns", *LENGTHS, **{**PAGE_1, "head_dim": 96}
        ),
        prefill(
            "long-page-1-192-128",
            "three blocks of K's columns",
            *LENGTHS,
            head_dim_vo=128,
            **{**PAGE_1, "head_dim": 192},
        ),
        prefill("long-page-2", "pages of two tokens", *LENGTHS, **{**PAGE_1, "page_size": 2}),
        prefill(
            "long-page-5",
            "pages of five tokens, NaN in hidden ones",
            (700, 300),
            (2000, 1203),
            window_left=850,
            hidden_nan=True,
            **{**PAGE_1, "page_size": 5},
        ),
        prefill("long-page-12", "of twelve", *LENGTHS, **{**PAGE_1, "page_size": 12, "causal": False}),
    ]


def rows() -> list[Case]:
    small = on_cards(small_page_rows(), "long-page-1", "long-page-1-window", "long-page-5")
    return [*bf16_rows(), *single_rows("short"), *on_cards(single_rows("usual")), *fp8_rows(), *small]
