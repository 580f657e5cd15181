"""Strategies of hypothesis that draw random rows for the case tables: batches and options, all wrappers and formats.

A format decides which kernel is compiled. Only formats of the case table are drawn, so that few kernels are compiled.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from cascade_batch import CascadeCase
from cases import CASES
from cases.case import Case
from cases.variants import MAX_HEADS, MAX_TOKENS
from hypothesis import strategies as st
from vllm_blocks import BlockCase

MOST_SCORES = 300_000  # rows x tokens x heads of a batch; the reference then takes about ten milliseconds
EDGES = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 257, 400, 1000)
_FORMAT = ("q_dtype", "kv_dtype", "kv_format", "o_dtype", "head_dim", "head_dim_vo", "position", "variant")
Format = dict[str, Any]


def formats(device: str, generator: random.Random, count: int) -> list[Format]:
    """The first format of the case table, and a random choice of its others: `count` in all."""
    found: dict[str, Format] = {}
    for case in CASES:
        if case.entry == "latent" or case.head_dim > 256:
            continue
        if case.runs_on(device) and (device == "cpu" or case.reduced):
            values = {name: getattr(case, name) for name in _FORMAT}
            found.setdefault(repr(values) + str(bool(case.soft_cap)), values | {"soft_cap": case.soft_cap})
    first, *others = found.values()
    return [first, *generator.sample(others, min(count - 1, len(others)))]


def lengths(count: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths up to `most`, often at the edges of tiles."""
    edges = st.sampled_from([n for n in EDGES if n <= most])
    return st.lists(edges | st.integers(0, most), min_size=count, max_size=count).map(tuple)


@st.composite
def cases(draw: st.DrawFn, chosen: list[Format]) -> Case:
    """A row for tests/support/harness.py."""
    form = draw(st.sampled_from(chosen))
    choices = ["paged", "sink", "ragged"]
    if not form["head_dim_vo"]:
        choices.append("decode")  # its plan takes one head dimension for both K and V
    if not form["variant"]:  # the harness passes no variant to single calls
        choices += ["single_prefill"]
        choices += [] if form["o_dtype"] else ["single_decode"]  # a single decode takes no output type
    entry = draw(st.sampled_from(choices))
    count = 1 if entry.startswith("single") else draw(st.integers(1, 6))
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    most_heads, most = (MAX_HEADS, MAX_TOKENS) if form["variant"] else (32, 1000 if count < 4 else 300)
    num_q_heads = num_kv_heads * draw(st.sampled_from([n for n in (1, 2, 4, 5, 8) if n * num_kv_heads <= most_heads]))
    kv_lens = draw(lengths(count, most))
    if entry in ("decode", "single_decode"):
        q_lens = (draw(st.sampled_from([1, 1, 2, 5])) if entry == "decode" else 1,) * count
    else:
        q_lens = draw(lengths(count, 200 if count < 4 else 70))
    while max(q * kv for q, kv in zip(q_lens, kv_lens, strict=True)) * count * num_q_heads > MOST_SCORES:
        kv_lens = tuple(n // 2 for n in kv_lens)
        q_lens = q_lens if entry in ("decode", "single_decode") else tuple(n // 2 for n in q_lens)
        num_q_heads = num_kv_heads if max(kv_lens) < 32 else num_q_heads
    if form["variant"]:  # with more rows than tokens positions are negative, and captured tensors have no such entries
        kv_lens = tuple(map(max, q_lens, kv_lens))
    options = _options(draw, entry, q_lens, form)
    memory = _memory(draw, entry, form)
    return Case("fuzz", "drawn", kv_lens, q_lens, entry, num_q_heads, num_kv_heads, **form, **memory, **options)


def _options(draw: st.DrawFn, entry: str, q_lens: tuple[int, ...], form: Format) -> dict[str, Any]:
    is_decode, is_single = entry.endswith("decode"), entry.startswith("single")
    found: dict[str, Any] = {"causal": q_lens[0] > 1 if is_decode else draw(st.booleans())}
    found["window_left"] = draw(st.sampled_from([-1, -1, -1, 0, 1, 15, 64, 200]))
    if found["window_left"] < 0 and not form["variant"]:
        found["chunk"] = draw(st.sampled_from([0, 0, 0, 1, 16, 50, 128]))
    found["sm_scale"] = draw(st.sampled_from([None, None, 0.2, 0.0]))
    found["scales"] = draw(st.sampled_from(["", "", "float", "tensor", "per_head", "negative", "signs"]))
    found["outputs"] = draw(
        st.sampled_from(["returned", "no_lse"] if is_single else ["given", "strided", "returned", "no_lse"])
    )
    found["q_strides"] = draw(st.sampled_from(["contiguous", "fused_qkv"]))
    if not is_decode and not form["variant"] and not found.get("chunk"):
        found["mask"] = draw(st.sampled_from(["", "", "dense", "packed"]))
        found["mask_kind"] = draw(st.sampled_from(["random", "causal", "blocks", "past", "sparse", "nothing"]))
    if not is_single:
        found["sinks"] = draw(st.booleans())
        found["fixed_split_size"] = draw(st.sampled_from([0, 0, 1, 4, 8]))
        found["disable_split_kv"] = not found["fixed_split_size"] and draw(st.booleans())
    return found


def _memory(draw: st.DrawFn, entry: str, form: Format) -> dict[str, Any]:
    """Draws the layout of K and V in memory."""
    page_size, kv_layout = draw(st.sampled_from([1, 2, 8, 16, 64])), draw(st.sampled_from(["NHD", "HND"]))
    forms = ["tuple", "interleaved", "permuted", "gapped"]
    if entry in ("decode", "paged", "sink"):
        forms.append("indexed")
        if not form["head_dim_vo"] and "+" not in form["kv_format"]:
            forms += ["fused"] + (["fused_4d"] if page_size == 1 else [])
        forms += ["tuple_3d"] if page_size == 1 else []
        # A stride of 7, also of the scales' bytes, which scales of tokens are four of.
        is_odd = page_size == 1 and kv_layout == "NHD" and "token" not in form["kv_format"]
        forms += ["odd_page"] if is_odd else []
    cache = draw(st.sampled_from(forms))
    return {"page_size": page_size, "cache": cache, "kv_layout": kv_layout}


@st.composite
def cascades(draw: st.DrawFn, chosen: list[Format]) -> CascadeCase:
    """Draws a tree of shared prefixes, from the root to the leaves; a node has as many rows as its leaves together."""
    leaves = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 5]), min_size=1, max_size=6))
    causal = max(leaves) > 1 and draw(st.booleans())
    tree, rows = [], leaves
    for _ in range(draw(st.integers(1, 3))):
        least = rows if causal and not tree else [0] * len(rows)  # causal: the last level holds the rows' own tokens
        tree.insert(
            0,
            tuple(
                (n, draw(st.sampled_from([t for t in EDGES[:-1] if t >= m]))) for n, m in zip(rows, least, strict=True)
            ),
        )
        cut = draw(st.integers(1, len(rows)))
        rows = [sum(rows[:cut]), sum(rows[cut:])] if cut < len(rows) else [sum(rows)]
    form = draw(st.sampled_from([f for f in chosen if f["q_dtype"] == "bfloat16" and not f["head_dim_vo"]]))
    num_kv_heads = draw(st.sampled_from([1, 2]))
    return CascadeCase(
        "fuzz",
        tuple(tree),
        num_kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_kv_heads,
        form["head_dim"],
        draw(st.sampled_from([1, 16, 64])),
        form["q_dtype"],
        form["kv_dtype"],
        draw(st.sampled_from(["NHD", "HND"])),
        draw(st.sampled_from(["fused", "tuple", "gapped"])),
        causal=causal,
        window_left=draw(st.sampled_from([-1, -1, 0, 30, 100])),
        sm_scale=draw(st.sampled_from([None, 0.2])),
    )


@st.composite
def blocks(draw: st.DrawFn, chosen: list[Format]) -> BlockCase:
    """Draws a call of vLLM's operators."""
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    sparse = st.tuples(
        st.integers(0, 3), st.integers(0, 4), st.integers(1, 8), st.sampled_from([8, 16, 64]), st.integers(-2, 2)
    )
    return BlockCase(
        "fuzz",
        draw(lengths(draw(st.integers(0, 5)), 1000)),
        num_kv_heads * draw(st.sampled_from([1, 2, 5])),
        num_kv_heads,
        draw(st.sampled_from([64, 128])),
        draw(st.sampled_from([8, 16, 32])),
        draw(st.sampled_from(["bfloat16", "float16"])),
        draw(st.sampled_from(["auto", "fp8", "fp8_e5m2"])),
        alibi=draw(st.booleans()),
        sparse=draw(st.none() | sparse),
        strided=draw(st.booleans()),
    )


def shown(row: Any) -> str:
    """A row as Python source for a table, without fields that have their default."""
    if isinstance(row, tuple):
        return f"({''.join(f'{shown(entry)}, ' for entry in row)})"
    if not dataclasses.is_dataclass(row):
        return repr(row)
    fields = [f for f in dataclasses.fields(row) if getattr(row, f.name) != f.default]
    return f"{type(row).__name__}({', '.join(f'{f.name}={shown(getattr(row, f.name))}' for f in fields)})"
