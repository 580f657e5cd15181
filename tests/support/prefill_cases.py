"""Small batches for prefill_sm90 on the host (tests/kernels/test_prefill_kernel.py): one for each path through it."""

from __future__ import annotations

import dataclasses
from typing import Any

from cases.case import prefill

BF16: dict[str, Any] = {"q_dtype": "bfloat16", "num_q_heads": 8, "head_dim": 128, "causal": True}
GROUP_5, WHOLE = {**BF16, "num_q_heads": 10}, {**BF16, "causal": False}
MASK: dict[str, Any] = {**BF16, "causal": False, "mask": "packed", "mask_kind": "blocks"}
CASES = [
    prefill("host-paged", "units of two heads, a short request", (70, 33, 0), (300, 33, 9), **BF16),
    prefill("host-page-8", "small boxes, a request of one row", (40, 1), (450, 100), page_size=8, **WHOLE),
    prefill("host-ragged", "no pages", (70, 33), (700, 40), entry="ragged", **{**BF16, "head_dim": 80}),
    prefill("host-window", "tiles that no row sees", (60,), (850,), window_left=150, **BF16),
    prefill("host-chunk", "chunks of a request", (150,), (430,), chunk=128, hidden_nan=True, **BF16),
    prefill("host-group-5", "units of 125 rows", (60, 25), (250, 25), window_left=50, **GROUP_5),
    prefill("host-group-5-moving", "next to rows that no box fills", (60, 60), (450, 450), sm_scale=0.3, **GROUP_5),
    prefill("host-group-28", "q loaded row by row", (20,), (250,), **{**BF16, "num_q_heads": 28, "num_kv_heads": 1}),
    prefill("host-sinks", "scores that exceed the sinks", (40,), (500,), sinks=True, sm_scale=1.0, **BF16),
    prefill("host-scales", "scales by head in a lane's scale", (40,), (450,), scales="per_head", **BF16),
    prefill("host-signs", "some of them negative", (40,), (450,), scales="signs", **BF16),
    prefill("host-scale", "scores are scaled first", (40,), (450,), sm_scale=-0.3, **BF16),
    prefill("host-empty", "rows that see nothing", (20, 20, 10), (0, 30, 0), **BF16),
    prefill("host-dim-64", "four heads in each block of rows", (70,), (300,), page_size=64, **{**BF16, "head_dim": 64}),
    prefill("host-dim-256", "room for one Q only", (40,), (200,), **{**BF16, "head_dim": 256}),
    prefill(
        "host-192-128",
        "value dim smaller than the query dim",
        (40,),
        (300,),
        head_dim_vo=128,
        **{**BF16, "head_dim": 192},
    ),
    prefill(
        "host-192-128-long",
        "room for one Q, because rows see more than 1,024 tokens",
        (40, 20),
        (1300, 1200),
        head_dim_vo=128,
        **{**BF16, "num_q_heads": 4, "head_dim": 192},
    ),
    prefill("host-page-1", "tokens loaded row by row", (70, 33), (300, 33), page_size=1, **BF16),
    prefill("host-page-12", "loaded row by row, seven rows to the tile's end", (40,), (387,), page_size=12, **BF16),
    prefill("host-short", "a last tile that is half full or less", (70, 9), (400, 326), **BF16),
    prefill("host-short-page-1", "a last tile that is not full, loaded row by row", (40,), (363,), page_size=1, **BF16),
    prefill("host-short-window", "a unit with one tile", (40,), (380,), window_left=20, **BF16),
    prefill(
        "host-few-rows", "fewer rows than one warpgroup takes", (1, 20, 3), (700, 30, 0), **{**BF16, "causal": False}
    ),
    prefill(
        "host-few-rows-dim-64",
        "fewer rows than two of three warpgroups take",
        (1, 40),
        (300, 40),
        **{**BF16, "head_dim": 64},
    ),
    prefill("host-few-rows-dim-256", "and one Q", (2, 40, 1), (200, 40, 170), **{**BF16, "head_dim": 256}),
    prefill("host-whole-units", "output by boxes in a first and in a last unit", (64, 128, 64), (64, 200, 500), **BF16),
    prefill("host-whole-unit", "alone", (32,), (100,), **{**BF16, "num_q_heads": 4, "num_kv_heads": 1}),
    prefill(
        "host-whole-ragged",
        "output by boxes after a unit of few rows, half a box of columns",
        (60, 96),
        (90, 96),
        entry="ragged",
        **{**BF16, "head_dim": 80},
    ),
    prefill(
        "host-whole-192-128",
        "output by boxes with one Q",
        (64, 9),
        (90, 64),
        head_dim_vo=128,
        **{**BF16, "head_dim": 192},
    ),
    prefill(
        "host-whole-page-1",
        "output by boxes with loading by rows",
        (70, 96),
        (100, 96),
        page_size=1,
        **BF16,
    ),
    prefill("host-mask", "tiles of a custom mask", (70, 40), (500, 300), **MASK),
    prefill(
        "host-mask-nothing",
        "a custom mask that hides everything",
        (40, 3),
        (300, 20),
        **{**MASK, "mask_kind": "nothing"},
    ),
    prefill(
        "host-mask-past",
        "a custom mask that only shows tokens left of the window",
        (200,),
        (900,),
        window_left=20,
        **{**MASK, "mask_kind": "past"},
    ),
    prefill(
        "host-cap",
        "soft cap by an exponential and a reciprocal",
        (70, 9),
        (500, 300),
        soft_cap=3.0,
        sm_scale=1.0,
        **BF16,
    ),
    prefill(
        "host-cap-large", "a soft cap by the variant's function", (40,), (300,), soft_cap=1000.0, sm_scale=3.0, **BF16
    ),
    prefill(
        "host-alibi", "ALiBi with scales by head", (70, 33), (700, 40), position="ALIBI", scales="per_head", **BF16
    ),
]

ROWS: dict[str, Any] = {**BF16, "page_size": 5}
CASES += [
    prefill("host-rows-group-5", "boxes of q", (60,), (250,), window_left=50, **{**ROWS, "num_q_heads": 10}),
    prefill(
        "host-rows-chunk", "chunks of a request, loaded row by row", (90,), (250,), chunk=64, hidden_nan=True, **ROWS
    ),
    prefill("host-rows-empty", "rows that see nothing", (20, 20, 10), (0, 30, 0), **ROWS),
    prefill("host-rows-hnd", "heads apart", (40, 9), (200, 129), kv_layout="HND", **ROWS),
    prefill(
        "host-rows-80-24",
        "eight lanes for each row of K, two with two vectors; four for each row of V, one of them idle",
        (40,),
        (300,),
        head_dim_vo=24,
        **{**ROWS, "head_dim": 80},
    ),
    prefill(
        "host-rows-192-256", "lanes that look up one row", (40,), (250,), head_dim_vo=256, **{**ROWS, "head_dim": 192}
    ),
]

FUNCTION: dict[str, Any] = {**BF16, "causal": False, "variant": "documents"}
HEADS: dict[str, Any] = {**FUNCTION, "variant": "head_windows", "head_dim": 64}
NOTHING: dict[str, Any] = {**FUNCTION, "variant": "rows_that_see_nothing", "head_dim": 192, "head_dim_vo": 128}
CASES += [
    prefill("host-function", "a mask function's tiles of documents", (70, 40), (500, 300), **FUNCTION),
    prefill(
        "host-function-causal", "a mask function under causal", (100, 40), (450, 40), **{**FUNCTION, "causal": True}
    ),
    prefill(
        "host-function-window",
        "a mask function in a window",
        (90,),
        (500,),
        window_left=70,
        hidden_nan=True,
        **FUNCTION,
    ),
    prefill("host-function-group-5", "units that cut a group", (60,), (250,), **{**FUNCTION, "num_q_heads": 10}),
    prefill("host-function-heads", "a mask function whose tiles depend on the head", (70, 33), (450, 33), **HEADS),
    prefill(
        "host-function-heads-group-5",
        "tiles of each head, in units that cut a group",
        (40,),
        (300,),
        **{**HEADS, "num_q_heads": 10},
    ),
    prefill(
        "host-function-heads-causal",
        "tiles of each head, row by row",
        (60,),
        (400,),
        page_size=1,
        **{**HEADS, "causal": True, "head_dim": 128},
    ),
    prefill("host-function-nothing", "a mask function whose units see nothing", (70, 30, 10), (400, 0, 200), **NOTHING),
    prefill("host-function-nothing-sinks", "rows that see only a sink", (90,), (400,), sinks=True, **NOTHING),
    prefill(
        "host-function-score",
        "a mask and a score function, tiles of few tokens",
        (40,),
        (300,),
        **{**FUNCTION, "variant": "blocks_and_gain", "head_dim": 256},
    ),
]

FP8: dict[str, Any] = {**BF16, "kv_dtype": "float8_e4m3fn"}
CASES += [
    prefill("host-fp8", "K and V become fp16 while they are loaded", (70, 33, 0), (300, 33, 9), **FP8),
    prefill(
        "host-fp8-page-8",
        "small boxes, and a request of one row",
        (40, 1),
        (450, 100),
        page_size=8,
        **{**FP8, "causal": False},
    ),
    prefill("host-fp8-page-5", "loaded row by row, with a window", (60,), (450,), page_size=5, window_left=150, **FP8),
    prefill("host-fp8-group-5", "units of 128 rows, which cut a group", (60,), (250,), **{**FP8, "num_q_heads": 10}),
    prefill(
        "host-fp8-ragged-dim-256",
        "no pages, three blocks converted in advance, other queries",
        (40, 10),
        (200, 0),
        entry="ragged",
        **{**FP8, "head_dim": 256, "q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e5m2"},
    ),
    prefill("host-fp8-mask", "mask bits in every tile", (70,), (300,), **{**MASK, "kv_dtype": "float8_e4m3fn"}),
]

Q8: dict[str, Any] = {**BF16, "q_dtype": "float8_e4m3fn"}
CASES += [
    prefill("host-q8", "V is transposed while it is loaded", (70, 33, 0), (300, 33, 9), **Q8),
    prefill("host-q8-moving", "maxima that move, next to rows of no unit", (21, 33), (450, 450), sm_scale=1.0, **Q8),
    prefill(
        "host-q8-page-8",
        "small boxes, and a request of one row",
        (40, 1),
        (450, 100),
        page_size=8,
        **{**Q8, "causal": False},
    ),
    prefill("host-q8-page-64", "large boxes, scales by head", (70,), (300,), page_size=64, scales="per_head", **Q8),
    prefill(
        "host-q8-ragged",
        "ragged tokens, one scale, half a block of columns",
        (70, 33),
        (700, 40),
        entry="ragged",
        scales="tensor",
        **{**Q8, "head_dim": 64},
    ),
    prefill("host-q8-window", "tiles that no row sees", (60,), (850,), window_left=150, **Q8),
    prefill("host-q8-group-5", "units of 125 rows", (60,), (250,), **{**Q8, "num_q_heads": 10}),
    prefill("host-q8-sinks", "sinks that are a large part of the sum", (40,), (45,), sinks=True, **Q8),
    prefill("host-q8-signs", "scores are scaled before the softmax", (40,), (450,), scales="signs", **Q8),
    prefill("host-q8-empty", "rows that see nothing", (20, 20, 10), (0, 30, 0), **Q8),
    prefill("host-q8-dim-256", "tiles of 96", (40, 3), (200, 300), **{**Q8, "head_dim": 256}),
    prefill(
        "host-q8-192-128",
        "value dim smaller than the query dim",
        (40,),
        (300,),
        head_dim_vo=128,
        **{**Q8, "head_dim": 192},
    ),
    prefill("host-q8-sums", "sums over tiles that are rescaled", (20,), (4300,), page_size=64, sm_scale=1.0, **Q8),
    prefill(
        "host-q8-few-rows", "fewer rows than one warpgroup takes", (1, 20, 3), (300, 30, 0), **{**Q8, "causal": False}
    ),
    prefill(
        "host-q8-page-5", "K and V become fp16, half a block", (40,), (300,), page_size=5, **{**Q8, "head_dim": 72}
    ),
]


ROPE: dict[str, Any] = {**BF16, "position": "ROPE_LLAMA"}
HALF_ROPE: dict[str, Any] = {**ROPE, "q_dtype": "float16", "head_dim": 64}
CASES += [
    prefill("host-rope", "K and Q are rotated in place", (70, 33, 0), (300, 33, 9), **ROPE),
    prefill(
        "host-rope-ragged",
        "other angles, lanes without columns",
        (70, 33),
        (700, 40),
        entry="ragged",
        rope_theta=1e6,
        **{**ROPE, "head_dim": 72},
    ),
    prefill(
        "host-rope-page-8",
        "small boxes, and a request of one row",
        (40, 1),
        (450, 100),
        page_size=8,
        **{**ROPE, "causal": False},
    ),
    prefill("host-rope-page-64", "units of one tile", (3, 20, 9, 130), (30, 20, 9, 130), page_size=64, **ROPE),
    prefill("host-rope-group-1", "a position a row", (150, 5), (200, 77), **{**HALF_ROPE, "num_q_heads": 2}),
    prefill("host-rope-group-5", "units of 125 rows", (60,), (250,), **{**ROPE, "num_q_heads": 10}),
    prefill("host-rope-window", "tiles that no row sees", (60,), (850,), window_left=150, hidden_nan=True, **ROPE),
    prefill("host-rope-before", "negative positions", (100, 3), (33, 3), rope_scale=2.0, **ROPE),
    prefill("host-rope-empty", "rows that see nothing", (20, 20, 10), (0, 30, 0), **ROPE),
    prefill("host-rope-half", "fp16, whose roundings are small", (40,), (450,), **HALF_ROPE),
    prefill(
        "host-rope-far", "angles of a million tokens", (30,), (4096,), rope_scale=1 / 256, window_left=250, **HALF_ROPE
    ),
    prefill("host-rope-cap", "and scores", (70,), (300,), **{**ROPE, "variant": "blocks_and_gain"}),
    prefill("host-rope-mask", "mask bits in every tile", (70,), (300,), **{**MASK, "position": "ROPE_LLAMA"}),
    prefill("host-rope-dim-64", "four rows at a time", (70,), (500,), **HALF_ROPE),
    prefill("host-rope-dim-16", "eight rows", (40,), (300,), **{**ROPE, "head_dim": 16}),
    prefill("host-rope-192-128", "tiles of 96", (40, 9), (300, 100), head_dim_vo=128, **{**ROPE, "head_dim": 192}),
    prefill("host-rope-page-1", "tokens loaded row by row", (70, 33), (300, 33), page_size=1, **ROPE),
    prefill("host-rope-rows-group-5", "of q too", (60, 2, 9), (250, 30, 0), page_size=5, **{**ROPE, "num_q_heads": 10}),
]

# One warpgroup for each CTA, two CTAs on each SM.
HALVES = [
    prefill("host-halves", "units of 16 rows of four heads", (70, 33, 0), (300, 33, 9), **BF16),
    prefill("host-halves-page-8", "small boxes", (40, 1), (250, 100), page_size=8, **{**BF16, "causal": False}),
    prefill("host-halves-window", "both ends", (60,), (450,), window_left=90, **BF16),
    prefill("host-halves-group-5", "units of 60 rows", (40, 25), (150, 25), **{**BF16, "num_q_heads": 10}),
    prefill("host-halves-group-14", "q loaded row by row", (15,), (150,), **{**BF16, "num_q_heads": 28}),
    prefill("host-halves-sinks", "sinks, and rows that see nothing", (20, 20, 10), (200, 30, 0), sinks=True, **BF16),
    prefill(
        "host-halves-ragged-dim-192",
        "no pages, tiles of 48 tokens and room for one Q",
        (70, 33),
        (300, 40),
        entry="ragged",
        **{**BF16, "head_dim": 192},
    ),
]
CASES += HALVES

# Tiles for rows that see few tokens.
DIM_192: dict[str, Any] = {**BF16, "head_dim": 192, "head_dim_vo": 128}
DIM_256: dict[str, Any] = {**BF16, "head_dim": 256, "page_size": 32}
SHORT = [
    prefill("host-short-192-128", "room for two Qs", (70, 33, 0, 40), (300, 97, 9, 40), **DIM_192),
    prefill("host-short-192-128-group-5", "units of 125 rows", (60, 25), (250, 25), **{**DIM_192, "num_q_heads": 10}),
    prefill("host-short-192-128-ragged", "no pages", (70, 33), (500, 40), entry="ragged", **DIM_192),
    prefill(
        "host-window-dim-256",
        "room for two Qs, and a page that begins in one tile and ends in the next",
        (40, 9, 33),
        (300, 200, 49),
        window_left=100,
        **DIM_256,
    ),
    prefill(
        "host-window-dim-256-group-12",
        "units of 120 rows",
        (30, 12),
        (200, 97),
        window_left=50,
        **{**DIM_256, "num_q_heads": 12, "num_kv_heads": 1},
    ),
]
CASES += SHORT

# Outputs of e4m3.
O8: dict[str, Any] = {**BF16, "o_dtype": "float8_e4m3fn", "o_scale": "tensor"}
CASES += [
    prefill("host-o8", "a unit by boxes, and one by rows", (70, 33, 0), (300, 33, 9), **O8),
    prefill("host-o8-dim-80", "half a box, an odd number of chunks", (60, 96), (90, 96), **{**O8, "head_dim": 80}),
    prefill("host-o8-dim-64", "three warpgroups", (70,), (300,), scales="per_head", **{**O8, "head_dim": 64}),
    prefill("host-o8-dim-256", "two boxes of columns", (40,), (200,), **{**O8, "head_dim": 256}),
    prefill("host-o8-group-5", "units of 125 rows", (60,), (250,), **{**O8, "num_q_heads": 10}),
    prefill("host-o8-fp8", "K and V are converted", (70, 9), (300, 33), **{**O8, "kv_dtype": "float8_e4m3fn"}),
    prefill("host-o8-q8", "a lane has four neighbouring columns", (70, 33, 0), (300, 33, 9), **{**O8, **Q8}),
    prefill("host-o8-q8-dim-96", "the same", (40,), (300,), **{**O8, **Q8, "head_dim": 96, "o_scale": "small"}),
]

# Scales by head where eight rows are not whole groups: a lane's rows, which are eight apart, may have different heads.
HEAD_SCALES: dict[str, Any] = {"q_lens": (60,), "kv_lens": (250,), "scales": "per_head"}
SIGNS: dict[str, Any] = {**HEAD_SCALES, "scales": "signs"}
CASES += [
    prefill("host-scales-group-5", "units of 125 rows", **HEAD_SCALES, **{**BF16, "num_q_heads": 10}),
    prefill("host-scales-group-16", "each row has another head", **HEAD_SCALES, **{**BF16, "num_q_heads": 32}),
    prefill("host-scales-mask", "mask bits", **HEAD_SCALES, **{**MASK, "num_q_heads": 10}),
    prefill("host-scales-cap", "before the cap", soft_cap=3.0, **HEAD_SCALES, **{**BF16, "num_q_heads": 10}),
    prefill("host-scales-alibi", "before ALiBi", position="ALIBI", **HEAD_SCALES, **{**BF16, "num_q_heads": 10}),
    prefill("host-signs-group-3", "scores are scaled before the softmax", **SIGNS, **{**BF16, "num_q_heads": 6}),
    prefill("host-fp8-scales-group-12", "K and V are converted", **HEAD_SCALES, **{**FP8, "num_q_heads": 24}),
    prefill("host-q8-scales-group-5", "exponents that wait", **HEAD_SCALES, **{**Q8, "num_q_heads": 10}),
    prefill("host-q8-scales-group-16", "each row has another head", **HEAD_SCALES, **{**Q8, "num_q_heads": 32}),
    prefill("host-q8-signs-group-6", "scores are scaled before the softmax", **SIGNS, **{**Q8, "num_q_heads": 12}),
]

# Builds for head dims and combinations, whose paths other rows take too.
RARE = {
    *("host-rows-80-24", "host-rows-192-256", "host-function-heads-causal", "host-fp8-mask", "host-q8-192-128"),
    *("host-q8-page-5", "host-rope-cap", "host-rope-mask", "host-rope-dim-16", "host-rope-192-128"),
    *("host-halves-ragged-dim-192", "host-o8-dim-64", "host-o8-dim-256", "host-o8-fp8", "host-o8-q8-dim-96"),
    "host-short-192-128-ragged",
}
assert {case.name for case in CASES} >= RARE

# V by columns (kernels/helpers/value_columns.h), also of requests that begin inside of sixteen positions.
RAGGED: dict[str, Any] = {"entry": "ragged", **Q8}
COLUMNS = [
    dataclasses.replace(case, name=case.name.replace("host", "host-columns"))
    for case in CASES
    if case.q_dtype == case.kv_type == "float8_e4m3fn"
    and max(case.head_dim, case.value_dim) <= 128
    and (case.page_size % 16 == 0 or case.entry == "ragged")
]
COLUMNS += [
    prefill("host-columns-ragged", "tiles begin earlier", (33, 70, 5, 40), (45, 700, 131, 40), **RAGGED),
    prefill("host-columns-window", "hidden", (60, 50), (850, 333), window_left=150, hidden_nan=True, **RAGGED),
    prefill("host-columns-empty", "no rows, no tokens", (33, 0, 40, 0), (45, 9, 133, 0), **RAGGED),
    prefill("host-columns-page-48", "pages of three boxes", (33, 40), (45, 400), page_size=48, **Q8),
]
CASES += COLUMNS
