"""Rows about few packed rows (query rows x group size, up to 64): slots and boxes of a ring, teams, pieces, merges.

The shapes are those of Hopper's decode kernel: slots of 32 or 64 tokens that eight warps use in turn, boxes of at
most a page, or single rows where pages are too small for boxes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cases.case import Case, decode, on_cards, prefill

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
EDGES_32 = (31, 32, 33, 1, 0)
TEAM_EDGES = (255, 256, 257, 511, 512, 513)  # eight slots of 32 and of 64 tokens, so that every warp's last slot occurs


def length_rows() -> list[Case]:
    short = tuple(1 + 5 * i % 37 for i in range(300))
    return [
        decode("few-edges-32", "around half a slot of 64 tokens", EDGES_32),
        decode("few-edges-32-dim-128", "around a slot of 32 tokens", (*EDGES_32, 64, 65), head_dim=128),
        decode("few-team-edges", "requests in which all teams or none have a last slot", TEAM_EDGES, head_dim=128),
        decode("few-short", "a CTA has more units than the ring has places", short, num_q_heads=8, num_kv_heads=4),
        decode(
            "few-short-64-rows",
            "a CTA has more units than the ring has places, which is one",
            short[:150],
            q_len=16,
            num_q_heads=8,
            head_dim=256,
        ),
    ]


def page_rows() -> list[Case]:
    rows = []
    for page_size, layout in ((4, "NHD"), (32, "HND"), (48, "NHD")):
        edges = (page_size - 1, page_size, page_size + 1, 0, 200)
        why = "boxes of half a slot, of a third of a page, and pages too small for boxes"
        rows.append(
            decode(f"few-page-{page_size}", why, edges, page_size=page_size, kv_layout=layout, reduced=page_size == 48)
        )
    for page_size, layout, form in ((1, "HND", "tuple"), (8, "NHD", "fused"), (128, "HND", "gapped")):
        options: dict[str, Any] = {"page_size": page_size, "kv_layout": layout, "cache": form, "head_dim": 128}
        why = "64 packed rows over the smallest and larger pages"
        rows.append(decode(f"few-page-{page_size}-64-rows", why, (200, 5, 0, 129), q_len=16, num_q_heads=8, **options))
    options = {"cache": "interleaved", "page_size": 32, "head_dim": 128, "kv_dtype": E4M3}
    rows.append(decode("few-halves-e4m3", "fp8 rows in two boxes, HND", (70, 0, 33), kv_layout="HND", **options))
    rows.append(
        decode("few-page-12", "a page size that is a multiple of 4 but not of 8", (11, 12, 13, 200), page_size=12)
    )
    return rows


def packed_rows() -> list[Case]:
    """Query rows times group size from 17 to 64."""
    rows = []
    for q_len, group in ((9, 2), (3, 8), (2, 16), (7, 5), (5, 7), (8, 8), (16, 4), (2, 32), (16, 1)):
        heads = {"num_q_heads": 2 * group, "num_kv_heads": 2}
        why = "packed rows that do and do not fill 16, 32 or 64"
        rows.append(decode(f"few-rows-{q_len}x{group}", why, (q_len, 65, 300, 0, 9), q_len=q_len, **heads))
    ragged = {"entry": "ragged", "causal": True}
    rows += [
        decode(
            "few-group-32",
            "two tiles of 16 packed rows from one query row",
            (65, 0, 129),
            num_q_heads=32,
            num_kv_heads=1,
        ),
        prefill(
            "few-unlike",
            "requests of fewer and of more rows than the tile",
            (1, 40, 3, 9),
            (300, 40, 65, 9),
            causal=True,
        ),
        prefill("few-ragged", "one row a request, ragged", (1,) * 6, (1, 33, 64, 300, 0, 129), reduced=True, **ragged),
        prefill("few-ragged-8", "eight rows a request, ragged", (8, 8, 8), (300, 8, 65), num_q_heads=8, **ragged),
        prefill(
            "few-ragged-e5m2",
            "ragged fp8 with gaps between rows",
            (2, 1),
            (70, 200),
            cache="gapped",
            kv_dtype=E5M2,
            **ragged,
        ),
    ]
    return rows


def dim_rows() -> list[Case]:
    rows = []
    for dim, vo, kv_dtype in (
        *((16, 16, ""), (80, 80, ""), (256, 256, ""), (192, 128, ""), (64, 128, "")),
        *((16, 16, E4M3), (24, 24, E5M2), (80, 80, E4M3), (96, 96, E5M2), (192, 128, E4M3)),
        *((128, 128, E4M3), (128, 128, E5M2), (256, 256, E4M3), (256, 256, E5M2), (512, 512, E4M3)),
    ):
        kind = {"": "bf16", E4M3: "e4m3", E5M2: "e5m2"}[kv_dtype]
        why = "one row: dims in whole and partial blocks of 128 bytes"
        options: dict[str, Any] = {"head_dim": dim, "head_dim_vo": vo, "kv_dtype": kv_dtype}
        row = prefill(f"few-dim-{dim}-{vo}-{kind}", why, (1,) * 3, (65, 0, 130), **options)
        rows.append(dataclasses.replace(row, reduced=kind == "e4m3" and dim in (192, 256)))
    rows.append(decode("few-many-pieces", "pieces for the merge kernel", (20000, 300), num_q_heads=16, num_kv_heads=1))
    for dim, kv_dtype, page_size in ((256, "", 1), (256, E4M3, 16), (512, "", 16), (512, E4M3, 1)):
        kind = "e4m3" if kv_dtype else "bf16"
        options = {"head_dim": dim, "kv_dtype": kv_dtype, "page_size": page_size}
        why = "the widest values with all 64 rows"
        rows.append(decode(f"few-dim-{dim}-{kind}-64-rows", why, (65, 130), q_len=16, num_q_heads=8, **options))
    return rows


def swapped_rows() -> list[Case]:
    """At most eight packed rows over fp8: Hopper's decode kernel swaps the factors of its products, and has eight or
    twelve teams."""
    e4m3, e5m2, hidden = {"kv_dtype": E4M3}, {"kv_dtype": E5M2}, {"window_left": 437, "hidden_nan": True}
    long, teams = (600, 64, 9), (383, 384, 385, 767, 768, 769)  # twelve slots of 32 tokens, once and twice
    wide: dict[str, Any] = {"head_dim": 128, "page_size": 1, **e4m3}
    return on_cards(
        [
            decode("few-fp8-teams", "requests in which all twelve teams or none have a last slot", teams, **e4m3),
            decode("few-fp8-112", "an odd number of steps, seven rows", teams, head_dim=112, num_q_heads=14, **e4m3),
            decode("few-fp8-96-window", "single rows, hidden NaN", long, head_dim=96, sinks=True, **e4m3, **hidden),
            decode("few-fp8-80", "rows of five chunks, odd pages", long, head_dim=80, page_size=7, **e5m2),
            prefill("few-fp8-64-128", "values wider than keys", (1, 1, 1), long, head_dim=64, head_dim_vo=128, **e5m2),
            decode(
                "few-fp8-split", "pieces, no LSE", (2000, 9), head_dim=96, fixed_split_size=4, outputs="no_lse", **e4m3
            ),
            decode("few-fp8-page-1", "eight packed rows, causal", long, q_len=4, reduced=True, **wide),
            decode("few-fp8-clusters", "few long requests: clusters merge", (9000, 3000), head_dim=128, **e4m3),
            decode("few-fp8-short", "more units than places", tuple(1 + 5 * i % 37 for i in range(300)), **wide),
            decode("few-fp8-signs", "scales by head, of either sign", long, scales="signs", head_dim=80, **e4m3),
            decode("few-fp8-negative", "a negative scale", long, sm_scale=-0.1, q_dtype="float16", **wide),
            decode("few-fp8-types", "K and V differ", long, head_dim=128, kv_format=f"{E4M3}+{E5M2}"),
            prefill(
                "few-fp8-units",
                "a request of 18 packed rows, the others of two",
                (1, 9, 1, 1),
                (600, 64, 9, 0),
                causal=True,
                **e4m3,
            ),
            prefill("few-fp8-chunk", "chunks of attention", (1, 2), (300, 130), chunk=100, causal=True, **wide),
        ]
    )


def window_rows() -> list[Case]:
    """Tokens that no row sees are NaN in the cache."""
    hidden: dict[str, Any] = {"hidden_nan": True}
    long = (300, 129, 64, 7)
    return [
        decode("few-window-in-page", "the first visible token is inside a page", long, window_left=21, **hidden),
        decode("few-window-at-page", "the first visible token begins a page", (300, 172), window_left=43, **hidden),
        decode(
            "few-window-in-box",
            "the first visible token is inside a box of a large page",
            long,
            window_left=37,
            page_size=128,
            reduced=True,
            **hidden,
        ),
        decode("few-window-page-1", "tokens loaded row by row", long, window_left=37, page_size=1, **hidden),
        decode("few-window-e4m3", "NaN bytes", long, window_left=37, kv_dtype=E4M3, head_dim=128, **hidden),
        decode(
            "few-window-rows", "each of several rows has its own window", long[:3], q_len=7, window_left=20, **hidden
        ),
        decode("few-window-0", "a row sees only its own token", long, window_left=0, **hidden),
        decode("few-window-fixed", "pieces before the window", (900, 64), window_left=99, fixed_split_size=4, **hidden),
        prefill(
            "few-window-ragged",
            "a window over ragged tokens",
            (3, 5),
            (300, 65),
            entry="ragged",
            causal=True,
            window_left=18,
            **hidden,
        ),
    ]


def split_rows() -> list[Case]:
    pieces: dict[str, Any] = {"fixed_split_size": 4}  # of 64 tokens
    return [
        decode("few-split-79", "a merge of more than two groups of 32 pieces", (5000,), reduced=True, **pieces),
        decode("few-split-79-group-7", "a merge whose rows do not fill its tile", (5000, 64), num_q_heads=14, **pieces),
        decode("few-split-33", "one piece more than a group of 32", (33 * 64, 32 * 64, 32 * 64 + 1), **pieces),
        decode("few-split-sinks", "the sink is in one of 40 pieces", (2550, 3), sinks=True, **pieces),
        decode("few-split-rows", "several rows, the last piece hidden from some", (1000, 70), q_len=10, **pieces),
        decode("few-split-rows-sinks", "and a sink", (1000, 70), q_len=10, sinks=True, num_q_heads=8, **pieces),
        decode("few-split-64-rows", "pieces of 64 partial rows each", (700, 9), q_len=16, num_q_heads=8, **pieces),
        decode("few-split-dim-256", "two units of merge work for each merged row", (700, 9), head_dim=256, **pieces),
        decode("few-split-no-lse", "a merge without lse output", (2000, 9), outputs="no_lse"),
        decode("few-no-split-rows", "several rows, not cut", (1000, 70), q_len=10, disable_split_kv=True),
        prefill(
            "few-split-mask",
            "mask bits of later pieces, pages of one token",
            (6, 9),
            (1000, 31),
            mask="packed",
            page_size=1,
            **pieces,
        ),
    ]


def score_rows() -> list[Case]:
    rows: dict[str, Any] = {"q_len": 8, "num_q_heads": 16}  # 64 packed rows
    long = (300, 64, 9)
    return [
        decode(
            "few-cap-rows", "soft cap of 64 packed rows, loaded row by row", long, soft_cap=5.0, page_size=1, **rows
        ),
        decode("few-alibi-rows", "ALiBi positions of rows and heads", long, position="ALIBI", **rows),
        decode("few-variant-rows", "h and q_idx of 64 packed rows", long, variant="tensor_bias", **rows),
        decode(
            "few-variant-page-1",
            "a variant's mask over tokens loaded row by row",
            long,
            variant="documents",
            page_size=1,
        ),
        decode("few-variant-e4m3", "a variant over an fp8 cache", long, variant="blocks_and_gain", kv_dtype=E4M3),
        decode("few-scales-rows", "scales by head for 64 packed rows", long, scales="per_head", kv_dtype=E5M2, **rows),
        decode("few-scales-requests", "scales of requests", long, scales="per_request", kv_dtype=E4M3, **rows),
        decode("few-scales-split", "the value scale counts once", (3000,), scales="per_head", kv_dtype=E4M3),
        prefill("few-mask-rows", "mask bits of 32 packed rows", (8, 8, 8), long, mask="dense", num_q_heads=8),
        prefill(
            "few-mask-e4m3",
            "mask bits over fp8 pages of one token",
            (9, 12),
            (65, 300),
            mask="packed",
            page_size=1,
            kv_dtype=E4M3,
        ),
    ]


def rope_rows() -> list[Case]:
    """RoPE: keys are rotated between shared memory and the tensor cores, by the angle of a slot's first token and a
    table for the tokens after it."""
    rope: dict[str, Any] = {"position": "ROPE_LLAMA"}
    wide: dict[str, Any] = {"head_dim": 128, **rope}
    many: dict[str, Any] = {"q_len": 16, "num_q_heads": 8}  # 64 packed rows
    long = (300, 64, 9)
    rows = [
        decode("few-rope-128", "requests in which all teams or none have a slot", (513, 0, 31), reduced=True, **wide),
        decode("few-rope-page-1", "tokens loaded row by row", (*long, 0), page_size=1, **wide),
        decode("few-rope-64-rows", "four query positions for each warp", long, **many, **wide),
        decode(
            "few-rope-group-1",
            "one query position for each packed row",
            long,
            q_len=16,
            num_q_heads=2,
            q_dtype="float16",
            **wide,
        ),
        decode("few-rope-short", "more units than places of Q", tuple(1 + 5 * i % 37 for i in range(150)), **wide),
        decode("few-rope-long", "rotation of far tokens", (40000,), q_dtype="float16", **rope),
        decode("few-rope-window", "slots that begin left of the window", long, window_left=37, hidden_nan=True, **rope),
        decode("few-rope-split", "pieces and a sink", (2550, 3), fixed_split_size=4, sinks=True, **rope),
        decode("few-rope-cap", "scores are scaled before the cap", long, soft_cap=5.0, kv_dtype=E4M3, **wide),
        decode("few-rope-scales", "a negative scale", long, scales="negative", kv_dtype=E5M2, **wide),
        decode("few-rope-e4m3-rows", "fp8 keys rotated in fp16", long, reduced=True, **many, kv_dtype=E4M3, **wide),
        decode("few-rope-e5m2-page-1", "fp8 keys loaded row by row", long, page_size=1, kv_dtype=E5M2, **wide),
        decode("few-rope-half-e4m3", "fp16 queries over fp8 keys", long, q_dtype="float16", kv_dtype=E4M3, **wide),
        prefill("few-rope-mask", "mask bits with RoPE", (6, 9), (300, 31), mask="packed", **wide),
        prefill("few-rope-ragged", "ragged tokens with RoPE", (8, 2), (300, 65), entry="ragged", causal=True, **wide),
        prefill("few-rope-before", "rows at negative positions", (7, 3), (3, 33), causal=True, kv_dtype=E4M3, **rope),
    ]
    for dim, vo, kv_dtype in (
        *((16, 16, ""), (136, 136, ""), (192, 128, ""), (256, 256, ""), (512, 512, "")),
        *((24, 24, E5M2), (32, 32, E4M3), (80, 80, E4M3), (256, 256, E4M3), (512, 512, E5M2)),
    ):
        kind = {"": "bf16", E4M3: "e4m3", E5M2: "e5m2"}[kv_dtype]
        why = "half a row is or is not a whole number of 16-byte chunks, and that number is or is not a power of two"
        options: dict[str, Any] = {"head_dim": dim, "head_dim_vo": vo, "kv_dtype": kv_dtype, **rope}
        rows.append(prefill(f"few-rope-dim-{dim}-{vo}-{kind}", why, (1,) * 3, (65, 0, 130), **options))
    return rows


def rows() -> list[Case]:
    return [
        *length_rows(),
        *page_rows(),
        *packed_rows(),
        *dim_rows(),
        *swapped_rows(),
        *window_rows(),
        *split_rows(),
        *score_rows(),
        *rope_rows(),
    ]
