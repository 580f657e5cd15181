"""Rows about sizes: lengths, pages, cache forms, heads, head dims and element types."""

from __future__ import annotations

import itertools
from typing import Any

from cases.case import MIXED_KV, MIXED_Q, TILE_EDGES, Case, decode, prefill


def length_rows() -> list[Case]:
    squares = tuple(n for n in TILE_EDGES if n)
    appended = tuple(n + 37 for n in TILE_EDGES)
    many = tuple((7 * i) % 40 for i in range(70))
    return [
        decode("decode-edges", "every tile edge in one batch", TILE_EDGES, reduced=True),
        decode("decode-one-token", "the smallest batch", (1,)),
        decode("decode-empty", "one request without KV: out 0, lse -inf", (0,), reduced=True),
        decode("decode-all-empty", "no work at all, still all rows written", (0,) * 9),
        decode("decode-empty-ends", "empty requests at both ends and in a row", (0, 0, 33, 0, 5, 0)),
        decode("decode-long-among-short", "one long request must be cut for balance", (3000, *many), reduced=True),
        decode("decode-batch-70", "more requests than CTAs of the CPU", many),
        decode("decode-multi-token", "q_len_per_req: causal inside the step", (9, 64, 131), q_len=4),
        decode("decode-multi-token-16", "q_len_per_req past one row tile", (16, 77, 20), q_len=16),
        decode("decode-multi-token-short", "more rows than tokens: the first see nothing", (3, 0, 40), q_len=5),
        prefill("prefill-squares", "q = kv at every tile edge", squares, squares, causal=True, reduced=True),
        prefill("prefill-squares-full", "q = kv at every tile edge, all tokens visible", squares, squares),
        prefill("prefill-append", "q rows fewer than KV at every edge", TILE_EDGES, appended, causal=True),
        prefill("prefill-kv-edges", "few rows over every KV edge", (3,) * 11, TILE_EDGES, reduced=True),
        prefill("prefill-one-row", "one row, one token, one request", (1,), (1,), causal=True),
        prefill("prefill-q-over-kv", "q longer than KV: first rows see nothing", (70, 20, 5), (33, 1, 0), causal=True),
        prefill("prefill-empty", "rows without tokens, tokens without rows", (0, 5, 0, 40), (30, 0, 0, 40)),
        prefill("prefill-mixed", "decode rows and prompts in one batch", MIXED_Q, MIXED_KV, causal=True, reduced=True),
        prefill(
            "prefill-decode-rows",
            "one row a request through the prefill wrapper",
            (1,) * 12,
            ((*TILE_EDGES[1:], 300, 7)),
        ),
        prefill(
            "prefill-long-among-short", "one prompt among short", (300, *many[:20]), (300, *many[:20]), causal=True
        ),
        prefill("prefill-batch-70", "many short prompts", [n % 9 for n in many], many, causal=True),
        prefill(
            "ragged-squares", "ragged: every tile edge", squares, squares, entry="ragged", causal=True, reduced=True
        ),
        prefill("ragged-append", "ragged: fewer rows than tokens", TILE_EDGES, appended, entry="ragged", causal=True),
        prefill("ragged-cross", "ragged: lengths unrelated, not causal", (5, 130, 1), (200, 9, 64), entry="ragged"),
        prefill(
            "ragged-empty", "ragged: empty on either side", (0, 7, 0, 3), (12, 0, 0, 3), entry="ragged", causal=True
        ),
        prefill("ragged-q-over-kv", "ragged: q longer than KV", (50, 20), (33, 3), entry="ragged", causal=True),
    ]


def page_rows() -> list[Case]:
    rows = []
    for i, page_size in enumerate((1, 3, 5, 8, 16, 64, 128, 256)):
        layout = ("NHD", "HND")[i % 2]
        edges = (page_size - 1, page_size, page_size + 1, 0, 200)
        options = {"page_size": page_size, "kv_layout": layout}
        rows.append(
            decode(f"page-{page_size}-decode", "lengths around one page", edges, reduced=page_size == 5, **options)
        )
        options["kv_layout"] = ("HND", "NHD")[i % 2]
        rows.append(
            prefill(f"page-{page_size}-prefill", "the other layout", (3, 20, 1, 0, 70), edges, causal=True, **options)
        )
    return rows


def cache_rows() -> list[Case]:
    why = {
        "fused": "one 5-D tensor",
        "interleaved": "K and V are halves of one row",
        "permuted": "one layout's view of the other's memory",
        "gapped": "padding between tokens and between pages",
        "indexed": "kv_indices longer than needed, with garbage at the end",
    }
    rows = []
    for form, layout in itertools.product(why, ("NHD", "HND")):
        options: dict[str, Any] = {"cache": form, "kv_layout": layout, "page_size": 8}
        name = f"cache-{form}-{layout}"
        rows.append(decode(f"{name}-decode", why[form], (70, 0, 9), reduced=form == "interleaved", **options))
        rows.append(prefill(f"{name}-prefill", why[form], MIXED_Q, MIXED_KV, causal=True, **options))
    for form, layout in itertools.product(("tuple_3d", "fused_4d"), ("NHD", "HND")):
        one = {"cache": form, "kv_layout": layout, "page_size": 1}
        rows.append(decode(f"cache-{form}-{layout}", "page size 1 without its dimension", (70, 0, 9), **one))
    rows += [
        decode(
            "cache-odd-stride-page",
            "a size-1 page dimension with an odd stride",
            (70, 9),
            page_size=1,
            cache="odd_page",
        ),
        decode(
            "cache-odd-stride-head",
            "a size-1 head dimension with an odd stride",
            (70, 9),
            num_kv_heads=1,
            cache="odd_head",
        ),
        prefill("cache-3d-prefill", "sglang's pool", (9, 30), (40, 30), cache="tuple_3d", page_size=1, causal=True),
        prefill(
            "ragged-gapped",
            "ragged K and V are slices of wider rows",
            (9, 30),
            (40, 30),
            entry="ragged",
            cache="gapped",
        ),
        prefill("q-fused-qkv", "q is a slice of a QKV row", MIXED_Q, MIXED_KV, causal=True, q_strides="fused_qkv"),
        decode("q-fused-qkv-decode", "q is a slice of a QKV row", (70, 0, 9), q_strides="fused_qkv"),
        decode("out-strided", "gaps between rows and heads of out", (70, 0, 9), outputs="strided"),
        prefill("out-strided-prefill", "gaps between rows and heads of out", (9, 30), (40, 30), outputs="strided"),
        decode("out-strided-split", "gaps between merged rows", (2000, 9), outputs="strided"),
        decode("out-returned", "run allocates out and lse", (70, 0, 9), outputs="returned"),
        prefill("out-returned-prefill", "run allocates out and lse", (9, 30), (40, 30), outputs="returned"),
        decode("out-no-lse", "run without an lse", (70, 0, 9), outputs="no_lse"),
        prefill("out-no-lse-prefill", "run without an lse", (9, 0, 30), (40, 7, 30), outputs="no_lse"),
        prefill("out-no-lse-ragged", "run without an lse", (9, 0, 30), (40, 7, 30), entry="ragged", outputs="no_lse"),
    ]
    return rows


def head_rows() -> list[Case]:
    rows = []
    for group, kv_heads in ((1, 5), (2, 3), (3, 2), (4, 1), (5, 2), (7, 2), (8, 2), (16, 1), (64, 1), (128, 1)):
        heads = {"num_q_heads": group * kv_heads, "num_kv_heads": kv_heads}
        why = "group sizes that do and do not divide a row tile"
        rows.append(decode(f"group-{group}-decode", why, (65, 0, 9), reduced=group in (3, 128), **heads))
        rows.append(prefill(f"group-{group}-prefill", why, (30, 3), (41, 70), causal=True, **heads))
    for group in (3, 6, 12, 16):
        heads = {"num_q_heads": group * 2, "num_kv_heads": 2}
        why = "scales by head for neighbouring rows of different heads"
        rows.append(prefill(f"group-{group}-scales", why, (90, 3), (141, 70), causal=True, scales="per_head", **heads))
    heads = {"num_q_heads": 32, "num_kv_heads": 8}
    rows.append(decode("heads-32-8", "a model's own head counts", (129, 300, 1, 64), **heads))
    rows.append(decode("heads-40-40", "many KV heads, no grouping", (33, 80), num_q_heads=40, num_kv_heads=40))
    return rows


def dim_rows() -> list[Case]:
    """Every head dim once, decode and prefill, paged and ragged alternately; 8 mod 16 also in fp8 (8-byte loads)."""
    rows = []
    for i, dim in enumerate((16, 24, 40, 72, 80, 96, 112, 128, 160, 192, 256, 512)):
        why = "a head dim that is a multiple of 8, with its own row tile"
        if i % 2:
            rows.append(decode(f"dim-{dim}", why, (65, 0, 130), head_dim=dim, reduced=dim in (24, 256)))
        else:
            entry = "ragged" if i % 4 else "paged"
            rows.append(prefill(f"dim-{dim}", why, (30, 3), (41, 70), entry=entry, head_dim=dim, causal=True))
    deepseek = {"head_dim": 192, "head_dim_vo": 128}
    narrow = {"head_dim": 128, "head_dim_vo": 64}
    why = "value dim is not the query dim"
    rows += [
        prefill("dim-192-128", why, (30, 3), (41, 70), entry="ragged", causal=True, reduced=True, **deepseek),
        prefill("dim-128-64", why, (30, 3), (41, 70), causal=True, **narrow),
        prefill("dim-128-64-interleaved", why, (3, 1), (41, 70), cache="interleaved", **narrow),
        prefill("dim-64-128", "value dim wider than the query's", (1, 3), (41, 70), head_dim=64, head_dim_vo=128),
        prefill(
            "dim-128-prefill", "the commonest head dim, larger row tiles", (70, 3), (90, 70), head_dim=128, causal=True
        ),
        prefill("dim-256-prefill", "the largest head dim of most models", (40, 3), (41, 70), head_dim=256, causal=True),
        prefill("dim-512-prefill", "the largest head dim", (20,), (41,), head_dim=512, causal=True),
        decode("dim-128-decode", "the commonest head dim", (700, 64), head_dim=128),
        decode("dim-512-decode", "the largest head dim", (65, 130), head_dim=512),
        prefill("dim-512-256", "slots shared by four teams", (1, 2), (700, 64), head_dim=512, head_dim_vo=256),
        prefill("dim-512-128", "dims that decode_sm90 refuses", (1, 2), (700, 64), head_dim=512, head_dim_vo=128),
    ]
    for dim in (24, 40, 72):
        rows.append(
            decode(
                f"dim-{dim}-e4m3",
                "rows that do not divide into 16 bytes",
                (65, 9),
                head_dim=dim,
                kv_dtype="float8_e4m3fn",
            )
        )
    return rows


def dtype_rows() -> list[Case]:
    rows = []
    for q_dtype in ("float32", "float16", "bfloat16"):
        for kv_dtype in ("", "float8_e4m3fn", "float8_e5m2"):
            kind = {"": "same", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[kv_dtype]
            dtypes: dict[str, Any] = {"q_dtype": q_dtype, "kv_dtype": kv_dtype}
            why = "a pair of element types"
            is_reduced = kind == "e4m3" and q_dtype == "bfloat16"
            rows.append(decode(f"dtype-{q_dtype}-{kind}-decode", why, (65, 0, 130), reduced=is_reduced, **dtypes))
            if kind != "e5m2" or q_dtype == "bfloat16":
                rows.append(prefill(f"dtype-{q_dtype}-{kind}", why, MIXED_Q, MIXED_KV, causal=True, **dtypes))
    rows.append(prefill("dtype-float32-ragged", "fp32, ragged", (30, 3), (41, 70), entry="ragged", q_dtype="float32"))
    rows.append(
        prefill(
            "dtype-float16-ragged", "fp16 ragged", (30, 3), (41, 70), entry="ragged", q_dtype="float16", causal=True
        )
    )
    return rows


def rows() -> list[Case]:
    return [*length_rows(), *page_rows(), *cache_rows(), *head_rows(), *dim_rows(), *dtype_rows()]
