"""Rows about options: masks, scores, variants, splits, and values given at run."""

from __future__ import annotations

import itertools
from typing import Any

from cases.case import MIXED_KV, MIXED_Q, Case, decode, prefill


def mask_rows() -> list[Case]:
    """Causal, window and custom masks. Most are run-time options, so they share a kernel."""
    rows = []
    for window in (0, 1, 15, 63, 64, 500):
        why = "window edge inside, at and past a tile"
        rows.append(
            decode(f"window-{window}-decode", why, (1, 64, 200, 0, 17), window_left=window, reduced=window == 15)
        )
        rows.append(prefill(f"window-{window}-causal", why, MIXED_Q, MIXED_KV, causal=True, window_left=window))
    rows += [
        prefill("window-not-causal", "a window with the future visible", MIXED_Q, MIXED_KV, window_left=20),
        prefill(
            "window-ragged",
            "a window over ragged tokens",
            (130, 40),
            (130, 90),
            entry="ragged",
            causal=True,
            window_left=33,
            reduced=True,
        ),
        prefill("window-q-over-kv", "rows before the first token", (70, 5), (33, 5), causal=True, window_left=4),
    ]
    for kind, entry in itertools.product(("dense", "packed"), ("paged", "ragged")):
        options: dict[str, Any] = {"entry": entry, "mask": kind}
        why = "custom mask with a row that sees nothing; bits do not end on bytes"
        rows.append(
            prefill(
                f"mask-{kind}-{entry}",
                why,
                MIXED_Q,
                MIXED_KV,
                reduced=kind == "packed" and entry == "ragged",
                **options,
            )
        )
        why = "requests without rows or tokens own no mask bits"
        rows.append(prefill(f"mask-{kind}-{entry}-empty", why, (0, 9, 3, 65), (12, 0, 11, 66), **options))
    rows += [
        prefill("mask-window", "custom mask and window", MIXED_Q, MIXED_KV, mask="dense", window_left=30),
        prefill("mask-few-rows", "a speculation tree over long contexts", (8, 8, 8), (300, 64, 9), mask="packed"),
        prefill("mask-group-7", "mask rows are packed rows / group", (9, 3), (66, 9), mask="dense", num_q_heads=14),
        *tile_rows(),
    ]
    return rows


def tile_rows() -> list[Case]:
    """Custom masks that hide whole tiles, or none: prefill kernels skip hidden tiles and treat full ones apart."""
    long = {"mask": "packed", "num_q_heads": 8, "num_kv_heads": 2}
    q_lens, kv_lens = (200, 70, 1, 0), (700, 70, 130, 5)
    rows = []
    for kind, why in (
        ("causal", "tiles all visible, on the diagonal and all hidden"),
        ("blocks", "documents: hidden tiles before and after"),
        ("tree", "a speculation tree after a long context"),
        ("nothing", "no row sees anything"),
        ("random", "all tiles mixed"),
    ):
        options = {**long, "mask_kind": kind}
        rows.append(prefill(f"mask-tiles-{kind}", why, q_lens, kv_lens, reduced=kind == "blocks", **options))
        rows.append(prefill(f"mask-tiles-{kind}-ragged", why, q_lens, kv_lens, entry="ragged", **options))
    why = "pages of one token"
    for kind in ("causal", "sparse"):
        rows.append(prefill(f"mask-tiles-{kind}-page-1", why, q_lens, kv_lens, page_size=1, mask_kind=kind, **long))
    past = {**long, "mask_kind": "past", "window_left": 50}
    rows.append(
        prefill("mask-tiles-past", "units whose window hides all tokens that the mask shows", q_lens, kv_lens, **past)
    )
    many = (40,), (5000,)
    options = {**long, "mask_kind": "sparse"}
    rows += [
        prefill("mask-tiles-many", "more tiles than a word has bits, and pieces that see nothing", *many, **options),
        prefill(
            "mask-tiles-many-sinks", "pieces that see nothing, and one with the sink", *many, sinks=True, **options
        ),
        prefill("mask-tiles-fixed", "pieces of a fixed split", *many, fixed_split_size=64, **options),
        prefill(
            "mask-tiles-window", "the window ends inside a tile", *many, window_left=1500, hidden_nan=True, **options
        ),
        prefill(
            "mask-tiles-window-page-1",
            "a window inside a tile, loaded row by row",
            *many,
            window_left=1500,
            hidden_nan=True,
            page_size=1,
            **options,
        ),
        prefill(
            "mask-tiles-window-ragged",
            "a window inside a tile, ragged",
            *many,
            window_left=999,
            hidden_nan=True,
            entry="ragged",
            **options,
        ),
    ]
    options = {**long, "mask_kind": "causal"}
    rows += [
        prefill("mask-tiles-dim-128", "tiles of another size", q_lens, kv_lens, head_dim=128, **options),
        prefill("mask-tiles-dim-256", "tiles of another size", q_lens, kv_lens, head_dim=256, **options),
        prefill("mask-tiles-cap", "scores go through the soft cap", q_lens, kv_lens, soft_cap=3.0, **options),
        prefill(
            "mask-tiles-variant", "a custom mask and a variant's mask", q_lens, kv_lens, variant="expression", **options
        ),
    ]
    return rows


def score_rows() -> list[Case]:
    """Scale, scales, sinks, soft cap, ALiBi, RoPE."""
    long = (1, 64, 200, 0, 17)
    rows = [
        decode("scale-small", "nearly uniform weights", long, sm_scale=0.01),
        decode("scale-large", "nearly one-hot weights", long, sm_scale=1.0, reduced=True),
        prefill("scale-large-prefill", "the running maximum moves often", MIXED_Q, MIXED_KV, causal=True, sm_scale=1.0),
        decode("scale-zero-decode", "equal weights", long, sm_scale=0.0),
        prefill("scale-zero-prefill", "equal weights", MIXED_Q, MIXED_KV, causal=True, sm_scale=0.0),
        decode(
            "scale-negative-decode", "the smallest product has the largest weight", long, sm_scale=-1.0, reduced=True
        ),
        decode("scale-negative-split", "a negative scale with pieces and a sink", (3000,), sm_scale=-0.2, sinks=True),
        decode("scale-negative-cap", "transforms see the negative score", long, sm_scale=-1.0, soft_cap=5.0),
        prefill("scale-negative-prefill", "larger tiles", MIXED_Q, MIXED_KV, causal=True, sm_scale=-1.0),
        prefill("scale-negative-mask", "masked tokens", MIXED_Q, MIXED_KV, mask="packed", sm_scale=-0.2),
    ]
    for kind in ("negative", "signs"):
        why = "scales on the device, whose sign the host does not know"
        rows.append(decode(f"scales-{kind}-decode", why, long, scales=kind))
        rows.append(prefill(f"scales-{kind}", why, MIXED_Q, MIXED_KV, causal=True, scales=kind))
        rows.append(prefill(f"scales-{kind}-ragged", why, (30, 3), (41, 70), entry="ragged", scales=kind))
    for kind in ("float", "tensor", "per_head", "per_request"):
        options: dict[str, Any] = {"scales": kind, "kv_dtype": "float8_e4m3fn"}
        why = "q, k and v scales"
        rows.append(decode(f"scales-{kind}-decode", why, long, reduced=kind == "per_head", **options))
        rows.append(prefill(f"scales-{kind}", why, MIXED_Q, MIXED_KV, causal=True, **options))
        rows.append(prefill(f"scales-{kind}-ragged", why, (30, 3), (41, 70), entry="ragged", scales=kind))
    rows += [
        decode("sinks-decode", "a sink joins the denominator and the lse", (1, 64, 200, 17), sinks=True, reduced=True),
        decode("sinks-split", "the sink counts once, in piece 0", (3000,), sinks=True),
        decode("lse-basee-decode", "LSEs as natural logarithms, -inf too", (1, 64, 0, 17), lse_mode="basee"),
        decode("lse-basee-split", "a merge before the change of the base", (3000,), lse_mode="basee", sinks=True),
        prefill("lse-basee", "a returned LSE", MIXED_Q, MIXED_KV, causal=True, outputs="returned", lse_mode="basee"),
        prefill("lse-basee-ragged", "LSEs of ragged keys", (30, 3), (41, 70), entry="ragged", lse_mode="basee"),
        prefill(
            *("lse-basee-single", "one request", (30,), (41,)),
            entry="single_prefill",
            outputs="returned",
            lse_mode="basee",
        ),
        decode("sinks-window", "gpt-oss: sinks and window", (300, 64), sinks=True, window_left=127),
        prefill("sinks-prefill", "sinks in larger tiles", MIXED_Q, MIXED_KV, sinks=True, causal=True),
        prefill(
            "sinks-window-prefill",
            "rows whose window excludes piece 0",
            (40,),
            (900,),
            sinks=True,
            causal=True,
            window_left=50,
        ),
    ]
    sink = {"entry": "sink", "sinks": True, "causal": True}
    rows += [
        prefill("sinks-wrapper", "the wrapper that engines use for sinks", MIXED_Q, MIXED_KV, **sink),
        prefill(
            "sinks-wrapper-window",
            "the sink wrapper's window and scale",
            MIXED_Q,
            MIXED_KV,
            window_left=60,
            sm_scale=0.2,
            **sink,
        ),
        decode("sinks-empty", "without tokens the sink alone is the denominator", (0, 5), sinks=True),
    ]
    for cap in (0.5, 30.0):
        why = "a cap that bends most scores, and one that bends few"
        rows.append(decode(f"cap-{cap:g}-decode", why, long, soft_cap=cap, reduced=cap == 30.0))
        rows.append(prefill(f"cap-{cap:g}", why, MIXED_Q, MIXED_KV, soft_cap=cap, causal=True))
    rows += [
        decode("cap-large-scale", "scores far past the cap", long, soft_cap=5.0, sm_scale=2.0),
        prefill("cap-ragged", "ragged", (30, 3), (41, 70), entry="ragged", soft_cap=30.0, causal=True),
        decode("alibi-decode", "slope by head, position by token", long, position="ALIBI", reduced=True),
        decode("alibi-12-heads", "slopes past a power of two", long, position="ALIBI", num_q_heads=12, num_kv_heads=2),
        prefill("alibi-prefill", "position by row", MIXED_Q, MIXED_KV, position="ALIBI", causal=True),
        prefill("alibi-full", "tokens right of the row", MIXED_Q, MIXED_KV, position="ALIBI"),
        prefill("alibi-cap", "ALiBi and soft cap, in their order", MIXED_Q, MIXED_KV, position="ALIBI", soft_cap=5.0),
        decode("rope-decode", "q and k are rotated in the kernel", long, position="ROPE_LLAMA", reduced=True),
        decode("rope-scaled", "scale and theta", (300, 9), position="ROPE_LLAMA", rope_scale=4.0, rope_theta=5e5),
        decode("rope-page-3", "positions across odd pages", (300, 9), position="ROPE_LLAMA", page_size=3),
        decode("rope-split", "positions in the middle of a cut request", (3000,), position="ROPE_LLAMA"),
        prefill("rope-prefill", "rotation of each row", MIXED_Q, MIXED_KV, position="ROPE_LLAMA", causal=True),
        prefill("rope-ragged", "ragged", (30, 3), (41, 70), entry="ragged", position="ROPE_LLAMA", rope_theta=1e6),
        prefill("rope-q-over-kv", "negative positions", (50, 3), (33, 3), position="ROPE_LLAMA", causal=True),
        prefill("rope-fp32", "the rotation's own error", (30, 3), (41, 70), position="ROPE_LLAMA", q_dtype="float32"),
        decode("rope-e4m3", "rotation after conversion", long, position="ROPE_LLAMA", kv_dtype="float8_e4m3fn"),
        decode("rope-dim-80", "halves that are no multiple of 16", (65, 9), position="ROPE_LLAMA", head_dim=80),
        decode("rope-dim-24", "halves that are no multiple of 8", (65, 9), position="ROPE_LLAMA", head_dim=24),
        prefill(
            "rope-dim-72",
            "halves that do not fill a lane",
            (50, 3),
            (65, 9),
            position="ROPE_LLAMA",
            causal=True,
            head_dim=72,
        ),
    ]
    many: dict[str, Any] = {"position": "ROPE_LLAMA", "head_dim": 128, "causal": True}
    lengths = (260, 70, 40), (500, 70, 9)
    rows += [
        prefill("many-rope", "loading warps rotate tiles", *lengths, reduced=True, **many),
        prefill(
            "many-rope-half-ragged",
            "fp16 with other angles",
            *lengths,
            entry="ragged",
            rope_theta=1e6,
            q_dtype="float16",
            **many,
        ),
        prefill("many-rope-page-1", "tokens loaded row by row", *lengths, page_size=1, **many),
        prefill("many-rope-page-8", "small boxes", *lengths, page_size=8, rope_scale=2.0, **many),
        prefill("many-rope-group-5", "units of 125 rows", *lengths, num_q_heads=10, page_size=12, **many),
        prefill(
            "many-rope-window", "tiles that are not visited", (200,), (900,), window_left=150, hidden_nan=True, **many
        ),
        prefill("many-rope-split", "pieces and a sink", (150,), (2550,), fixed_split_size=20, sinks=True, **many),
        prefill("many-rope-far", "angles of far tokens", (150,), (40000,), window_left=500, q_dtype="float16", **many),
        prefill(
            "many-rope-mask",
            "mask bits of every tile",
            (150, 90),
            (300, 90),
            mask="packed",
            **{**many, "causal": False},
        ),
        prefill("many-rope-cap", "and scores", *lengths, soft_cap=5.0, **many),
        prefill("many-rope-one-tile", "units of one tile each", (70,) * 40, (90,) * 40, **many),
        prefill("many-rope-dim-64", "four rows at a time", *lengths, **{**many, "head_dim": 64}),
        prefill("many-rope-dim-256", "room for one Q only", *lengths, **{**many, "head_dim": 256}),
        prefill("many-rope-dim-256-page-1", "short tiles", *lengths, page_size=1, **{**many, "head_dim": 256}),
        prefill("many-rope-192-128", "rows of 192 columns", *lengths, head_dim_vo=128, **{**many, "head_dim": 192}),
        prefill("many-rope-dim-72", "lanes without columns", *lengths, **{**many, "head_dim": 72}),
        prefill("many-rope-e4m3", "attention_sm80's", *lengths, kv_dtype="float8_e4m3fn", **many),
    ]
    return rows


def variant_rows() -> list[Case]:
    why = {
        "tensor_bias": "a rank-3 tensor indexed by both positions",
        "head_gain": "a vector and a closed-over scalar",
        "distance_penalty": "torch functions and a branch on integers",
        "documents": "a mask alone, integer tensor",
        "head_windows": "a mask that looks at the head",
        "rows_that_see_nothing": "tiles and units that no row sees",
        "blocks_and_gain": "score and mask together",
        "expression": "C++ expressions with captured values",
    }
    rows = []
    for variant, reason in why.items():
        rows.append(decode(f"variant-{variant}-decode", reason, (1, 64, 200, 0, 17), variant=variant))
        row = prefill(
            f"variant-{variant}", reason, MIXED_Q, MIXED_KV, variant=variant, reduced=variant == "tensor_bias"
        )
        rows.append(row)
    rows += [
        prefill(
            "variant-causal-window",
            "a variant with causal and window",
            MIXED_Q,
            MIXED_KV,
            variant="head_gain",
            causal=True,
            window_left=40,
        ),
        prefill("variant-group-4", "h is the query head", (9, 3), (66, 9), variant="tensor_bias", num_q_heads=8),
        prefill("variant-ragged", "ragged", (30, 3), (41, 70), entry="ragged", variant="documents"),
        prefill(
            "variant-after-cap", "a user's transform comes last", MIXED_Q, MIXED_KV, variant="head_gain", soft_cap=2.0
        ),
        decode(
            "variant-split", "positions in the middle of a cut request", (500, 3), variant="documents", num_q_heads=2
        ),
    ]
    return rows


def split_rows() -> list[Case]:
    rows = [
        decode(
            "split-one-long", "one request must fill all CTAs", (3000,), num_q_heads=2, num_kv_heads=1, reduced=True
        ),
        decode("split-two-long", "two requests of different lengths", (2500, 700), page_size=5),
        decode("split-multi-token", "pieces that some rows do not see", (1000,), q_len=8),
        prefill("split-append", "a short chunk over a long context", (5,), (2000,), causal=True, reduced=True),
        prefill("split-window", "a window that ends in another piece", (40,), (1500,), causal=True, window_left=200),
        prefill("split-mask", "custom mask bits of a later piece", (20,), (1200,), mask="packed"),
        decode("split-e5m2", "partials of fp8 caches", (3000,), kv_dtype="float8_e5m2"),
        decode("split-dim-512", "wide partial rows", (1500,), head_dim=512),
        decode("split-dim-24", "narrow partial rows", (1500,), head_dim=24),
    ]
    for pages in (1, 4, 16, 1000):
        why = "batch-invariant cuts at multiples of the size"
        rows.append(
            decode(f"fixed-split-{pages}", why, (300, 0, 17, 64, 1), fixed_split_size=pages, reduced=pages == 4)
        )
        rows.append(
            prefill(f"fixed-split-{pages}-prefill", why, MIXED_Q, MIXED_KV, fixed_split_size=pages, causal=True)
        )
    rows += [
        decode(
            "fixed-split-page-3", "the size is no multiple of a tile", (300, 0, 17), fixed_split_size=7, page_size=3
        ),
        prefill("fixed-split-ragged", "ragged", (30, 3), (410, 70), entry="ragged", fixed_split_size=64, causal=True),
        decode("no-split-long", "one long request, never cut", (3000, 5), disable_split_kv=True),
        prefill("no-split-prefill", "prompts, never cut", MIXED_Q, MIXED_KV, disable_split_kv=True, causal=True),
        prefill("no-split-ragged", "ragged, never cut", (30, 3), (410, 70), entry="ragged", disable_split_kv=True),
    ]
    return rows


def entry_rows() -> list[Case]:
    """The single-request functions, and options that arrive at run."""
    single = "single_prefill"
    rows = [
        Case("single-decode", "one request without a plan", (70,), (1,), entry="single_decode", outputs="returned"),
        Case(
            "single-decode-HND",
            "a single request, heads before tokens",
            (70,),
            (1,),
            "single_decode",
            kv_layout="HND",
            outputs="returned",
        ),
        Case("single-decode-empty", "no tokens", (0,), (1,), "single_decode", outputs="returned"),
        Case("single-prefill", "one prompt", (40,), (40,), single, causal=True, outputs="returned", reduced=True),
        Case(
            "single-prefill-HND",
            "a single request, heads before tokens",
            (66,),
            (20,),
            single,
            kv_layout="HND",
            outputs="no_lse",
        ),
        Case("single-prefill-mask", "dense mask", (66,), (20,), single, mask="dense", outputs="returned"),
        Case("single-prefill-packed", "packed mask", (66,), (20,), single, mask="packed", outputs="returned"),
        Case(
            "single-prefill-window",
            "a single request with window and scales",
            (66,),
            (20,),
            single,
            window_left=9,
            scales="float",
            outputs="returned",
        ),
        Case(
            "single-decode-cap",
            "a single request with soft cap and scale",
            (66,),
            (1,),
            "single_decode",
            soft_cap=30.0,
            sm_scale=0.3,
            outputs="returned",
        ),
        Case("single-decode-rope", "rotation", (66,), (1,), "single_decode", position="ROPE_LLAMA", outputs="returned"),
    ]
    for entry in ("decode", "paged", "ragged"):
        q_lens = (1, 1, 1) if entry == "decode" else (30, 3, 1)
        options: dict[str, Any] = {"entry": entry, "at_run": True, "outputs": "returned"}
        why = "options given to forward win over planned ones"
        causal = entry != "decode"
        rows.append(Case(f"run-{entry}-scale", why, (41, 0, 300), q_lens, sm_scale=0.2, causal=causal, **options))
        rows.append(Case(f"run-{entry}-cap", why, (41, 70, 300), q_lens, soft_cap=3.0, causal=causal, **options))
        if entry != "decode":
            rows.append(Case(f"run-{entry}-window", why, (41, 70, 300), q_lens, causal=True, window_left=25, **options))
            rows.append(Case(f"run-{entry}-full", why, (41, 70, 300), q_lens, **options))
    return rows


def rows() -> list[Case]:
    return [*mask_rows(), *score_rows(), *variant_rows(), *split_rows(), *entry_rows()]
