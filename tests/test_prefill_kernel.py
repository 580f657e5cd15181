"""prefill_sm90, the whole kernel on the host: loading and computing warps, rings, barriers, products and masks.

Copies land late and in any order, products are done when they are waited for; ordinary accesses happen where they are
written.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from case import Case, prefill
from case_variants import VARIANTS
from inputs import Inputs, make_inputs, pack_bits, reference_states
from native_build import asked_tiles, shared_library, variant_flags
from native_build import mask_tiles as mask_kernel
from planner_batches import RUNS, Cutting
from tolerance import limits
from variant_build import variant_args

from flashpage import host, plan_bytes
from flashpage.backends import mask_use
from flashpage.boxes import loader_tokens
from flashpage.dtypes import DType
from flashpage.products import short_tokens
from flashpage.spec import KernelSpec, VariantSpec, inner_loop
from flashpage.tiles import InnerLoop, Tile, sm90_prefill_tile
from flashpage.variant_source import mask_looks_at_head
from flashpage.variants import TracedVariant, Variant, alibi_slopes, builtin, compose

BF16: dict[str, Any] = {"q_dtype": "bfloat16", "num_q_heads": 8, "head_dim": 128, "causal": True}
MASK: dict[str, Any] = {**BF16, "causal": False, "mask": "packed", "mask_kind": "blocks"}
CASES = [
    prefill("host-paged", "units of two heads, a short request", (70, 33, 0), (300, 33, 9), **BF16),
    prefill("host-page-8", "small boxes, one row", (40, 1), (450, 100), page_size=8, **{**BF16, "causal": False}),
    prefill("host-ragged", "no pages", (70, 33), (700, 40), entry="ragged", **BF16),
    prefill("host-window", "tiles that nobody sees", (60,), (850,), window_left=150, **BF16),
    prefill("host-group-5", "rows of q one by one", (60,), (250,), window_left=50, **{**BF16, "num_q_heads": 10}),
    prefill("host-sinks", "sinks that scores outgrow", (40,), (500,), sinks=True, sm_scale=1.0, **BF16),
    prefill("host-scale", "scores are scaled first", (40,), (450,), sm_scale=-0.3, **BF16),
    prefill("host-empty", "nothing is seen", (20, 20, 10), (0, 30, 0), **BF16),
    prefill("host-dim-64", "four heads a block of rows", (70,), (300,), page_size=64, **{**BF16, "head_dim": 64}),
    prefill("host-dim-256", "one Q at a time", (40,), (200,), **{**BF16, "head_dim": 256}),
    prefill("host-192-128", "values of other width", (40,), (300,), head_dim_vo=128, **{**BF16, "head_dim": 192}),
    prefill("host-page-1", "row by row", (70, 33), (300, 33), page_size=1, **BF16),
    prefill("host-page-12", "row by row, seven rows to a tile's end", (40,), (387,), page_size=12, **BF16),
    prefill("host-short", "half a tile at the end, or less", (70, 9), (400, 326), **BF16),
    prefill("host-short-page-1", "row by row", (40,), (363,), page_size=1, **BF16),
    prefill("host-short-window", "a unit's only tile", (40,), (380,), window_left=20, **BF16),
    prefill("host-few-rows", "fewer than one group has", (1, 20, 3), (700, 30, 0), **{**BF16, "causal": False}),
    prefill("host-few-rows-dim-64", "and than two of three have", (1, 40), (300, 40), **{**BF16, "head_dim": 64}),
    prefill("host-few-rows-dim-256", "and one Q", (2, 40, 1), (200, 40, 170), **{**BF16, "head_dim": 256}),
    prefill("host-whole-units", "rows leave by boxes, first and last", (64, 128, 64), (64, 200, 500), **BF16),
    prefill("host-whole-unit", "alone", (32,), (100,), **{**BF16, "num_q_heads": 4, "num_kv_heads": 1}),
    prefill("host-whole-last", "behind one that has few rows", (40, 64), (90, 64), entry="ragged", **BF16),
    prefill("host-whole-dim-80", "half a box of columns", (64, 33), (100, 70), **{**BF16, "head_dim": 80}),
    prefill("host-whole-192-128", "one Q at a time", (64, 9), (90, 64), head_dim_vo=128, **{**BF16, "head_dim": 192}),
    prefill("host-whole-page-1", "by who leads", (70, 96), (100, 96), page_size=1, **{**BF16, "head_dim": 64}),
    prefill("host-mask", "tiles of a mask", (70, 40), (500, 300), **MASK),
    prefill("host-mask-page-1", "and row by row", (70,), (500,), page_size=1, **MASK),
    prefill("host-cap", "an exponential, a reciprocal", (70, 9), (500, 300), soft_cap=3.0, sm_scale=1.0, **BF16),
    prefill("host-cap-large", "by the variant's function", (40,), (300,), soft_cap=1000.0, sm_scale=3.0, **BF16),
    prefill("host-alibi", "each head's scale too", (70, 33), (700, 40), position="ALIBI", scales="per_head", **BF16),
    prefill("host-alibi-cap", "one after the other", (70,), (500,), position="ALIBI", soft_cap=5.0, **BF16),
]

ROWS: dict[str, Any] = {**BF16, "page_size": 5}
CASES += [
    prefill("host-rows-group-5", "rows of q too", (60,), (250,), window_left=50, **{**ROWS, "num_q_heads": 10}),
    prefill("host-rows-empty", "nothing is seen", (20, 20, 10), (0, 30, 0), **ROWS),
    prefill("host-rows-hnd", "heads apart", (40, 9), (200, 129), kv_layout="HND", **ROWS),
    prefill("host-rows-dim-16", "two lanes a row", (40,), (300,), **{**ROWS, "head_dim": 16}),
    prefill("host-rows-dim-24", "a lane of four has nothing", (40,), (300,), **{**ROWS, "head_dim": 24}),
    prefill("host-rows-dim-80", "two lanes of eight have more", (40,), (300,), **{**ROWS, "head_dim": 80}),
    prefill("host-rows-dim-256", "some look up one row", (40,), (200,), **{**ROWS, "head_dim": 256}),
    prefill("host-rows-192-128", "other rows", (40,), (250,), head_dim_vo=128, **{**ROWS, "head_dim": 192}),
    prefill("host-rows-mask-dim-16", "lanes without rows", (40,), (300,), **{**MASK, "head_dim": 16, "page_size": 3}),
]

ASKED: dict[str, Any] = {**BF16, "causal": False, "variant": "documents"}
HEADS: dict[str, Any] = {**ASKED, "variant": "head_windows"}
NOTHING: dict[str, Any] = {**ASKED, "variant": "rows_that_see_nothing"}
CASES += [
    prefill("host-asked", "tiles of documents", (70, 40), (500, 300), **ASKED),
    prefill("host-asked-causal", "half of them", (100, 40), (450, 40), **{**ASKED, "causal": True}),
    prefill("host-asked-window", "and some", (90,), (500,), window_left=70, hidden_nan=True, **ASKED),
    prefill("host-asked-page-1", "row by row", (70,), (500,), page_size=1, **ASKED),
    prefill("host-asked-group-5", "a block's edge inside a row's heads", (60,), (250,), **{**ASKED, "num_q_heads": 10}),
    prefill("host-asked-heads", "tiles of each head", (70, 33), (450, 33), **HEADS),
    prefill("host-asked-heads-group-5", "that a row shares", (40,), (300,), **{**HEADS, "num_q_heads": 10}),
    prefill("host-asked-heads-causal", "by rows", (60,), (400,), page_size=1, **{**HEADS, "causal": True}),
    prefill("host-asked-nothing", "units that see nothing", (70, 30, 10), (400, 0, 200), **NOTHING),
    prefill("host-asked-nothing-sinks", "but a sink", (90,), (400,), sinks=True, **NOTHING),
    prefill("host-asked-score", "and scores", (70,), (300,), **{**ASKED, "variant": "blocks_and_gain"}),
    prefill("host-asked-dim-64", "another tile", (70,), (500,), **{**ASKED, "head_dim": 64}),
    prefill("host-asked-dim-256", "48 tokens", (40,), (300,), **{**HEADS, "head_dim": 256}),
    prefill("host-asked-192-128", "112 tokens", (40,), (400,), head_dim_vo=128, **{**ASKED, "head_dim": 192}),
]

FP8: dict[str, Any] = {**BF16, "kv_dtype": "float8_e4m3fn"}
CASES += [
    prefill("host-fp8", "K and V become fp16 on their way", (70, 33, 0), (300, 33, 9), **FP8),
    prefill("host-fp8-page-8", "small boxes, one row", (40, 1), (450, 100), page_size=8, **{**FP8, "causal": False}),
    prefill("host-fp8-page-5", "rows, in a window", (60,), (450,), page_size=5, window_left=150, **FP8),
    prefill("host-fp8-ragged", "no pages", (40,), (300,), entry="ragged", **FP8),
    prefill("host-fp8-group-5", "queries of other rows", (60,), (250,), **{**FP8, "num_q_heads": 10}),
    prefill("host-fp8-e5m2", "the other format", (40, 10), (200, 0), **{**FP8, "kv_dtype": "float8_e5m2"}),
    prefill("host-fp8-dim-256", "three blocks ahead", (40,), (200,), **{**FP8, "head_dim": 256}),
    prefill("host-fp8-dim-72", "half a block of columns", (40,), (300,), **{**FP8, "head_dim": 72}),
    prefill("host-fp8-queries", "other keys", (40,), (200,), **{**FP8, "q_dtype": "float8_e5m2"}),
    prefill("host-fp8-mask", "every tile is masked", (70,), (300,), **{**MASK, "kv_dtype": "float8_e4m3fn"}),
]

Q8: dict[str, Any] = {**BF16, "q_dtype": "float8_e4m3fn"}
CASES += [
    prefill("host-q8", "V is transposed on its way", (70, 33, 0), (300, 33, 9), **Q8),
    prefill("host-q8-page-8", "small boxes, one row", (40, 1), (450, 100), page_size=8, **{**Q8, "causal": False}),
    prefill("host-q8-page-64", "large ones, scales by head", (70,), (300,), page_size=64, scales="per_head", **Q8),
    prefill("host-q8-ragged", "no pages, one scale", (70, 33), (700, 40), entry="ragged", scales="tensor", **Q8),
    prefill("host-q8-window", "tiles that nobody sees", (60,), (850,), window_left=150, **Q8),
    prefill("host-q8-group-5", "rows of q one by one", (60,), (250,), **{**Q8, "num_q_heads": 10}),
    prefill("host-q8-sinks", "a large part of the sum", (40,), (45,), sinks=True, **Q8),
    prefill("host-q8-signs", "scaled before softmax", (40,), (450,), scales="signs", **Q8),
    prefill("host-q8-empty", "nothing is seen", (20, 20, 10), (0, 30, 0), **Q8),
    prefill("host-q8-dim-64", "half a block of columns", (70,), (300,), **{**Q8, "head_dim": 64}),
    prefill("host-q8-dim-256", "tiles of 96", (40, 3), (200, 300), **{**Q8, "head_dim": 256}),
    prefill("host-q8-192-128", "values of other width", (40,), (300,), head_dim_vo=128, **{**Q8, "head_dim": 192}),
    prefill("host-q8-sums", "tiles added up, rescaled", (20,), (4300,), page_size=64, sm_scale=1.0, **Q8),
    prefill("host-q8-few-rows", "fewer than one group has", (1, 20, 3), (300, 30, 0), **{**Q8, "causal": False}),
    prefill("host-q8-page-5", "fp16 on their way", (40,), (200,), page_size=5, **Q8),
]


ROPE: dict[str, Any] = {**BF16, "position": "ROPE_LLAMA"}
HALF_ROPE: dict[str, Any] = {**ROPE, "q_dtype": "float16"}
CASES += [
    prefill("host-rope", "K and Q are turned where they lie", (70, 33, 0), (300, 33, 9), **ROPE),
    prefill("host-rope-ragged", "other angles", (70, 33), (700, 40), entry="ragged", rope_theta=1e6, **ROPE),
    prefill("host-rope-page-8", "small boxes, one row", (40, 1), (450, 100), page_size=8, **{**ROPE, "causal": False}),
    prefill("host-rope-page-64", "units of one tile", (3, 20, 9, 130), (30, 20, 9, 130), page_size=64, **ROPE),
    prefill("host-rope-group-1", "a position a row", (150, 5), (200, 77), **{**HALF_ROPE, "num_q_heads": 2}),
    prefill("host-rope-group-5", "rows of q one by one", (60,), (250,), **{**ROPE, "num_q_heads": 10}),
    prefill("host-rope-window", "tiles that nobody sees", (60,), (850,), window_left=150, hidden_nan=True, **ROPE),
    prefill("host-rope-before", "negative positions", (100, 3), (33, 3), rope_scale=2.0, **ROPE),
    prefill("host-rope-empty", "nothing is seen", (20, 20, 10), (0, 30, 0), **ROPE),
    prefill("host-rope-half", "where roundings are small", (40,), (450,), **HALF_ROPE),
    prefill(
        "host-rope-far", "as if a million tokens", (30,), (4096,), rope_scale=1 / 256, window_left=250, **HALF_ROPE
    ),
    prefill("host-rope-cap", "and scores", (70,), (300,), **{**ROPE, "variant": "blocks_and_gain"}),
    prefill("host-rope-mask", "every tile is masked", (70,), (300,), **{**MASK, "position": "ROPE_LLAMA"}),
    prefill("host-rope-dim-64", "four rows at a time", (70,), (500,), **{**HALF_ROPE, "head_dim": 64}),
    prefill("host-rope-dim-72", "some lanes have no columns", (40,), (300,), **{**ROPE, "head_dim": 72}),
    prefill("host-rope-dim-16", "eight rows", (40,), (300,), **{**ROPE, "head_dim": 16}),
    prefill("host-rope-dim-256", "one Q at a time", (40, 3, 20), (200, 30, 300), **{**HALF_ROPE, "head_dim": 256}),
    prefill("host-rope-192-128", "tiles of 96", (40, 9), (300, 100), head_dim_vo=128, **{**ROPE, "head_dim": 192}),
    prefill("host-rope-page-1", "row by row", (70, 33), (300, 33), page_size=1, **ROPE),
    prefill("host-rope-rows-group-5", "of q too", (60, 2, 9), (250, 30, 0), page_size=5, **{**ROPE, "num_q_heads": 10}),
    prefill("host-rope-rows-dim-256", "more columns", (40,), (200,), page_size=12, **{**ROPE, "head_dim": 256}),
]


class Map(ctypes.Structure):
    """tests/native/hopper/flashpage/ptx/tensor_copy.h"""

    _fields_ = [
        *(("data", ctypes.c_void_p), ("element_bytes", ctypes.c_int64)),
        *((name, ctypes.c_int64 * 4) for name in ("sizes", "strides", "box")),
    ]


def loader_of(case: Case) -> str:
    """As flashpage/backends.py chooses."""
    is_whole = case.entry == "ragged" or case.page_size % 8 == 0
    if not case.kv_type.startswith("float8"):
        return "boxes" if is_whole else "rows"
    return "transposed" if case.q_dtype == case.kv_type and is_whole else "converted"


def variant_of(case: Case) -> TracedVariant:
    slopes = alibi_slopes(case.num_q_heads) if case.position == "ALIBI" else None
    user = Variant(**VARIANTS[case.variant]("cpu").arguments).traced() if case.variant else TracedVariant()
    return compose(builtin(case.soft_cap, slopes), user)


def mask_source_of(case: Case) -> str:
    return "packed_bits" if case.mask else "function" if case.variant and not rotates(case) else "implicit"


def rotates(case: Case) -> bool:
    return case.position == "ROPE_LLAMA"


def tile_of(case: Case) -> Tile:
    source, variant = mask_source_of(case), variant_of(case).spec
    by_rows = case.entry == "paged" and case.page_size % 8 != 0  # tiles of fewer tokens too
    is_heavy = case.mask and (loader_of(case) == "converted" or by_rows or rotates(case))
    loop = InnerLoop.HEAVY if is_heavy else inner_loop("implicit" if rotates(case) else "function", "none", variant)
    dims = (case.head_dim, case.value_dim)
    tile, _ = sm90_prefill_tile(
        *(*dims, loop),
        loader=loader_of(case),
        group_size=case.num_q_heads // case.num_kv_heads,
        mask=mask_use(source, variant),
        rotates=rotates(case),
    )
    return tile


def flags_of(case: Case) -> tuple[str, ...]:
    """What a case's kernel is compiled with."""
    loader, tile, variant = loader_of(case), tile_of(case), variant_of(case).spec
    query, stored = (DType.of(getattr(torch, name)) for name in (case.q_dtype, case.kv_type))
    out = DType.of(getattr(torch, case.out_type))
    product = query if loader == "transposed" else stored.widened
    values: dict[str, Any] = {
        name: dtype.cpp.split("::")[-1]
        for name, dtype in (("QUERY", query), ("CACHE", stored), ("PRODUCT", product), ("OUT", out))
    }
    spec = KernelSpec(
        "prefill_sm90",
        kv_dtype=stored,
        head_dim_qk=case.head_dim,
        head_dim_vo=case.value_dim,
        mask_source=mask_source_of(case),
        tile=tile,
        variant=variant,
        loader=loader,
    )
    values |= {"TILE_Q": tile.tile_q, "TILE_KV": tile.tile_kv, "STAGES": tile.stages}
    values |= {"SHORT_TOKENS": short_tokens(spec)}
    values |= {"HEAD_DIM_QK": case.head_dim, "HEAD_DIM_VO": case.value_dim}
    values |= {"KV_SOURCE": "ragged" if case.entry == "ragged" else "paged", "LOADER": loader}
    values |= {"MASK_SOURCE": mask_source_of(case), "POSITION_ENCODING": "rope" if rotates(case) else "none"}
    flags = tuple(f"-D{name}={value}" for name, value in values.items())
    return (*flags, *(variant_flags(variant) if variant != VariantSpec() else ()))


def kernel(flags: tuple[str, ...]) -> ctypes.CDLL:
    return ctypes.CDLL(str(shared_library("prefill_kernel.cpp", first_include="hopper", flags=flags)))


@pytest.fixture(scope="module")
def kernels() -> None:
    """All of them, compiled side by side."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as compilers:
        list(compilers.map(kernel, dict.fromkeys(map(flags_of, CASES))))


def plan_of(case: Case, inputs: Inputs, tile: Tile) -> np.ndarray:
    """One CTA, an item a request: a PlanHeader, its CtaStart and the items."""
    tile_q = tile.tile_q
    items = np.zeros(sum(rows > 0 for rows in case.q_lens), plan_bytes.WORK_ITEM)
    group, offset = case.num_q_heads // case.num_kv_heads, 0
    requests = [i for i, rows in enumerate(case.q_lens) if rows]
    for item, request in zip(items, requests, strict=True):
        rows, tokens = case.q_lens[request], case.kv_lens[request]
        item["kv_offset"], item["request"] = int(inputs.indptr[request]), request
        item["q_begin"], item["q_len"] = int(inputs.qo_indptr[request]), rows
        item["kv_len"] = item["kv_end"] = tokens
        item["num_units"] = -(-rows * group // tile_q) * case.num_kv_heads
        item["partial_row"] = item["merge"] = -1
        item["mask_offset"] = offset
        offset += -(-rows * tokens // 8) if case.mask else tile_cells(rows * group, tokens, tile)
    header, start = np.zeros(1, plan_bytes.PLAN_HEADER), np.zeros(1, plan_bytes.CTA_START)
    header["num_ctas"], header["num_items"] = 1, len(items)
    header["items_offset"] = header.nbytes + start.nbytes
    start["items"]["end"], start["first"] = len(items), items[0]
    return np.concatenate([part.view(np.uint8) for part in (header, start, items)])


def tile_cells(packed_rows: int, tokens: int, tile: Tile) -> int:
    return -(-packed_rows // tile.tile_q) * -(-tokens // (32 * tile.tile_kv))


def find_mask_tiles(
    params: host.AttentionParams, case: Case, tile: Tile, args: host.VariantArgs
) -> tuple[host.MaskTilesParams, np.ndarray]:
    """What the kernel before makes of a mask, and its memory."""
    found, spec, group = host.MaskTilesParams(), variant_of(case).spec, case.num_q_heads // case.num_kv_heads
    lengths = list(zip(case.q_lens, case.kv_lens, strict=True))
    batch = host.MaskedBatch(
        mask_bytes=sum(-(-q * kv // 8) for q, kv in lengths),
        tile_cells=sum(tile_cells(q * group, kv, tile) for q, kv in lengths),
        rows=sum(case.q_lens),
        requests=len(case.q_lens),
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        has_custom_mask=bool(case.mask),
        tile_heads=case.num_kv_heads if not case.mask and mask_looks_at_head(spec) else 1,
    )
    cutting = Cutting(num_ctas=1, walk=RUNS, tile_q=tile.tile_q, tile_kv=tile.tile_kv).struct()
    count = host.load().fp_mask_cells(ctypes.byref(batch), ctypes.byref(cutting), ctypes.byref(found))
    cells = np.zeros(count + 2, np.uint64)
    found.plan, found.custom_mask = params.plan, params.custom_mask
    found.causal, found.window_left = params.causal, params.window_left
    found.cells = -(-cells.ctypes.data // 16) * 16
    if case.mask:
        mask_kernel().find_mask_tiles(ctypes.byref(found), 1)
    else:
        of_mask = dataclasses.replace(spec, logit="")
        asked_tiles(of_mask)(ctypes.byref(found), ctypes.byref(args), 1)
    return found, cells


def run(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, int]:
    """out, lse, and barriers that somebody still has to come to."""
    ragged, dims, tile = case.entry == "ragged", (case.head_dim, case.value_dim), tile_of(case)
    q, (k, v) = torch.cat(inputs.q), inputs.cache.argument("cpu")
    if case.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    out = torch.full((len(q), case.num_q_heads, case.value_dim), math.nan, dtype=getattr(torch, case.out_type))
    lse = torch.full((len(q), case.num_q_heads), math.nan)
    plan, sinks, group = plan_of(case, inputs, tile), inputs.sinks, case.num_q_heads // case.num_kv_heads
    page_size = 0 if ragged else case.page_size
    loader = loader_of(case)
    box = loader_tokens(loader, page_size, tile.tile_kv, *(dim * k.element_size() for dim in dims))
    rows_of_box = 0 if tile.tile_q % group or loader == "converted" else tile.tile_q // group
    bits = None if inputs.masks is None else pack_bits(inputs.masks)
    params = host.AttentionParams(
        q=q.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        q_row_stride=q.stride(0),
        q_head_stride=q.stride(1),
        out_row_stride=out.stride(0),
        out_head_stride=out.stride(1),
        kv_indices=inputs.indices.data_ptr(),
        plan=plan.ctypes.data,
        custom_mask=None if bits is None else bits.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        score_scale=case.score_scale,
        value_scale=1.0,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        causal=case.causal,
        window_left=case.window_left,
        rope_scale=case.rope_scale or 1.0,
        rope_theta=case.rope_theta or 1e4,
        group=host.make_fast_div(group),
        page=host.make_fast_div(page_size or 1),
        box_tokens=box,
        query_box_rows=rows_of_box,
        out_box_rows=0 if loader == "transposed" else rows_of_box,
    )
    for view, cache in ((params.k, k), (params.v, v)):
        view.data = cache.data_ptr()
        view.page_stride, view.token_stride, view.head_stride = cache.stride()[:3]
    set_scales(params, inputs.scales)
    maps = (Map * 4)(
        *(map_of(cache, (128, box, 1, 1)) for cache in (k, v)),
        *(map_of(rows[None].transpose(1, 2), (128, group, tile.tile_q // group, 1)) for rows in (q, out)),
    )
    mask_tiles, cells, variant, source = host.MaskTilesParams(), np.zeros(0), variant_of(case), mask_source_of(case)
    args = variant_args(variant)
    if source != "implicit" and loader != "converted" and not rotates(case):
        mask_tiles, cells = find_mask_tiles(params, case, tile, args)
    arguments = [ctypes.byref(struct) for struct in (params, args)]
    left = kernel(flags_of(case)).run_prefill(*arguments, maps, ctypes.byref(mask_tiles))
    assert len(cells) == 0 or cells.any()
    return out, lse, left


def set_scales(params: host.AttentionParams, scales: dict[str, Any]) -> None:
    for name, scale in scales.items():
        assert isinstance(scale, torch.Tensor)
        setattr(params, name, scale.data_ptr())
        setattr(params, f"{name}_stride", int(scale.numel() > 1))


def map_of(cache: torch.Tensor, box: tuple[int, ...]) -> Map:
    """[pages, tokens, heads, columns]; of q and out: [1, heads, rows, columns]"""
    pages, tokens, heads, columns = cache.shape
    size = cache.element_size()
    strides = (1, *(size * cache.stride(i) for i in (1, 2, 0)))
    return Map(cache.data_ptr(), size, (size * columns, tokens, heads, pages), strides, box)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_on_the_host(case: Case, kernels: None) -> None:
    inputs = make_inputs(case)
    out, lse, left = run(case, inputs)
    assert left == 0
    begin = 0
    for state in reference_states(inputs):
        rows = slice(begin, begin + len(state.out))
        begin = rows.stop
        allowed = limits(case, state, fp8_products=loader_of(case) == "transposed")
        error = (out[rows].double() - state.out).abs()
        assert (error <= allowed.element).all()
        assert (error.norm(dim=-1) <= allowed.row).all()
        assert ((lse[rows] == state.lse) | ((lse[rows] - state.lse).abs() <= allowed.lse)).all()
