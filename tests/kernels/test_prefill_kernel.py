"""prefill_sm90, the whole kernel on the host: loading and computing warps, rings, barriers, products and masks.

Copies arrive late and in any order, and wgmmas finish when they are waited for; other accesses are immediate.
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
from cases.case import Case
from cases.variants import VARIANTS
from host_maps import Map, map_of
from host_plans import attention_params
from inputs import Inputs, make_inputs, pack_bits, reference_states
from native_build import function_tiles, shared_library, traits_flags, variant_flags
from native_build import mask_tiles as mask_kernel
from planner_batches import Cutting
from prefill_cases import CASES, COLUMNS, HALVES, RARE, SHORT
from tolerance import limits
from variant_build import variant_args

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.base.kv_view import View
from flashpage.kernels import devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.context_classes import ContextClass
from flashpage.kernels.options import Options
from flashpage.kernels.prefill_sm90 import whole_rows
from flashpage.kernels.spec import KernelSpec, VariantSpec
from flashpage.kernels.tensor_maps import loader_tokens
from flashpage.kernels.tile import Tile
from flashpage.kernels.wgmma_source import short_tokens
from flashpage.kernels.work import Problem
from flashpage.native import records
from flashpage.plan import value_columns
from flashpage.variants import TracedVariant, Variant, alibi_slopes, builtin, compose
from flashpage.variants.source import mask_looks_at_head

FP8_LOADERS = ("transposed", "columns")  # whose factors are fp8


def loader_of(case: Case) -> str:
    """The loader that flashpage/kernels/choose.py chooses."""
    is_whole = case.entry == "ragged" or case.page_size % 8 == 0
    if not case.kv_type.startswith("float8"):
        return "boxes" if is_whole else "rows"
    if case in COLUMNS:
        return "columns"
    return "transposed" if case.q_dtype == case.kv_type and is_whole else "converted"


def variant_of(case: Case) -> TracedVariant:
    slopes = alibi_slopes(case.num_q_heads) if case.position == "ALIBI" else None
    user = Variant(**VARIANTS[case.variant]("cpu").arguments).traced() if case.variant else TracedVariant()
    return compose(builtin(case.soft_cap, slopes), user)


def mask_source_of(case: Case) -> str:
    return "packed_bits" if case.mask else "function" if case.variant and not rotates(case) else "implicit"


def rotates(case: Case) -> bool:
    return case.position == "ROPE_LLAMA"


def options_of(case: Case) -> Options:
    query, stored, out = (DType.of(getattr(torch, name)) for name in (case.q_dtype, case.kv_type, case.out_type))
    return Options(
        kv_source="ragged" if case.entry == "ragged" else "paged",
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim_qk=case.head_dim,
        head_dim_vo=case.value_dim,
        page_size=0 if case.entry == "ragged" else case.page_size,
        q_dtype=query,
        kv_dtype=stored,
        out_dtype=out,
        position_encoding=case.position or "NONE",
        has_mask=bool(case.mask),
        has_value_columns=case in COLUMNS,
    )


def tile_of(case: Case) -> Tile:
    contexts = ContextClass.FEW if case in HALVES else ContextClass.SHORT if case in SHORT else ContextClass.USUAL
    problem = Problem(options_of(case), 4096, contexts=contexts)
    spec = choose_for_card(problem, devices.H200, variant_of(case).spec).spec
    assert spec.tile is not None and (spec.kernel, spec.loader) == ("prefill_sm90", loader_of(case))
    assert case not in SHORT or spec.tile.tile_kv in (48, 96)
    return spec.tile


def flags_of(case: Case) -> tuple[str, ...]:
    """Compiler flags of a case's kernel."""
    loader, tile, variant = loader_of(case), tile_of(case), variant_of(case).spec
    query, stored = (DType.of(getattr(torch, name)) for name in (case.q_dtype, case.kv_type))
    out = DType.of(getattr(torch, case.out_type))
    product = query if loader in FP8_LOADERS else stored.widened
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
def kernels(request: pytest.FixtureRequest) -> None:
    """Kernels of all collected cases, compiled in parallel."""
    found = (getattr(getattr(item, "callspec", None), "params", {}).get("case") for item in request.session.items)
    flags = dict.fromkeys(flags_of(case) for case in found if case in CASES)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as compilers:
        list(compilers.map(kernel, flags))


def rows_of_unit(case: Case, tile: Tile) -> int:
    if mask_source_of(case) != "implicit" or loader_of(case) == "converted":
        return tile.tile_q
    return whole_rows(tile.tile_q, case.num_q_heads // case.num_kv_heads)


def plan_of(case: Case, inputs: Inputs, tile: Tile) -> np.ndarray:
    """A plan for one CTA, with one item for each request or chunk: a PlanHeader, its CtaStart and the items."""
    tile_q = rows_of_unit(case, tile)
    parts = [part for request in range(len(case.q_lens)) for part in parts_of(case, request)]
    items = np.zeros(len(parts), records.WORK_ITEM)
    group, offset = case.num_q_heads // case.num_kv_heads, 0
    for item, (request, first_row, rows, first_token, tokens) in zip(items, parts, strict=True):
        item["kv_offset"], item["request"] = int(inputs.indptr[request]), request
        item["q_begin"], item["q_len"] = int(inputs.qo_indptr[request]) + first_row, rows
        item["kv_begin"] = first_token
        item["kv_len"] = item["kv_end"] = tokens
        item["num_units"] = -(-rows * group // tile_q) * case.num_kv_heads
        item["partial_row"] = item["merge"] = -1
        item["mask_offset"] = offset
        offset += -(-rows * tokens // 8) if case.mask else tile_cells(rows * group, tokens, tile)
    header, start = np.zeros(1, records.PLAN_HEADER), np.zeros(1, records.CTA_START)
    header["num_ctas"], header["num_items"] = 1, len(items)
    header["items_offset"] = header.nbytes + start.nbytes
    start["items"]["end"], start["first"] = len(items), items[0]
    return np.concatenate([part.view(np.uint8) for part in (header, start, items)])


def parts_of(case: Case, request: int) -> list[tuple[int, int, int, int, int]]:
    """Parts of a request for each chunk in which it has rows: the request, the first row and the number of rows, the
    first token and the end."""
    rows, tokens = case.q_lens[request], case.kv_lens[request]
    if not rows or not case.chunk:
        return [(request, 0, rows, 0, tokens)] if rows else []
    chunks = [max(0, tokens - rows + row) // case.chunk for row in range(rows)]
    return [
        (request, chunks.index(chunk), chunks.count(chunk), chunk * case.chunk, min(tokens, (chunk + 1) * case.chunk))
        for chunk in sorted(set(chunks))
    ]


def tile_cells(packed_rows: int, tokens: int, tile: Tile) -> int:
    return -(-packed_rows // tile.tile_q) * -(-tokens // (32 * tile.tile_kv))


def find_mask_tiles(
    params: native.AttentionParams, case: Case, tile: Tile, args: native.VariantArgs
) -> tuple[native.MaskTilesParams, np.ndarray]:
    """Runs the kernel that finds a mask's tiles; returns its results and its memory."""
    found, spec, group = native.MaskTilesParams(), variant_of(case).spec, case.num_q_heads // case.num_kv_heads
    lengths = list(zip(case.q_lens, case.kv_lens, strict=True))
    batch = native.MaskedBatch(
        mask_bytes=sum(-(-q * kv // 8) for q, kv in lengths),
        tile_cells=sum(tile_cells(q * group, kv, tile) for q, kv in lengths),
        rows=sum(case.q_lens),
        requests=len(case.q_lens),
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        has_custom_mask=bool(case.mask),
        tile_heads=case.num_kv_heads if not case.mask and mask_looks_at_head(spec) else 1,
    )
    cutting = Cutting(num_ctas=1, heads_on_axis=True, tile_q=tile.tile_q, tile_kv=tile.tile_kv).struct()
    count = native.load().fp_mask_cells(ctypes.byref(batch), ctypes.byref(cutting), ctypes.byref(found))
    cells = np.full(count + 4, 2**64 - 1, np.uint64)  # as if an earlier batch had left them
    found.plan, found.custom_mask = params.plan, params.custom_mask
    found.causal, found.window_left = params.causal, params.window_left
    found.cells = -(-cells.ctypes.data // 16) * 16
    cells[:4] = 0  # the queue
    if case.mask:
        mask_kernel().find_mask_tiles(ctypes.byref(found), 1)
        params.lane_bits = found.cells + 8 * found.lanes_begin
    else:
        of_mask = dataclasses.replace(spec, logit="")
        function_tiles(of_mask)(ctypes.byref(found), ctypes.byref(args), 1)
    return found, cells


def run(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Runs the CTA; returns out, lse, and barriers at which arrivals are still missing."""
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
    cta_rows = rows_of_unit(case, tile)
    rows_of_box = 0 if cta_rows % group or loader == "converted" else cta_rows // group
    bits = None if inputs.masks is None else pack_bits(inputs.masks)
    params = attention_params(
        case,
        (q, out, lse),
        sinks,
        kv_indices=inputs.indices.data_ptr(),
        plan=plan.ctypes.data,
        custom_mask=None if bits is None else bits.data_ptr(),
        num_kv_heads=case.num_kv_heads,
        causal=case.causal,
        window_left=case.window_left,
        rope_scale=case.rope_scale or 1.0,
        rope_theta=case.rope_theta or 1e4,
        group=native.make_fast_div(group),
        page=native.make_fast_div(page_size or 1),
        box_tokens=box,
        query_box_rows=rows_of_box,
        out_box_rows=0 if loader in FP8_LOADERS else rows_of_box,
        cta_rows=cta_rows,
    )
    for view, cache in ((params.k, k), (params.v, v)):
        view.data = cache.data_ptr()
        view.page_stride, view.token_stride, view.head_stride = cache.stride()[:3]
    set_scales(params, inputs.scales)
    maps = (Map * 4)(
        *(map_of(cache, (128, box, 1, 1)) for cache in (k, v)),
        *(map_of(rows[None].transpose(1, 2), (128, group, cta_rows // group, 1)) for rows in (q, out)),
    )
    if loader == "columns":
        _columns, maps[1] = columns_of(case, inputs, params, v)
    mask_tiles, cells, variant, source = native.MaskTilesParams(), np.zeros(0), variant_of(case), mask_source_of(case)
    args = variant_args(variant)
    if source != "implicit" and loader != "converted" and not rotates(case):
        mask_tiles, cells = find_mask_tiles(params, case, tile, args)
    arguments = [ctypes.byref(struct) for struct in (params, args)]
    left = kernel(flags_of(case)).run_prefill(*arguments, maps, ctypes.byref(mask_tiles))
    if len(cells):
        num_units, claimed = (ctypes.c_uint32 * 2).from_address(mask_tiles.cells)
        assert num_units > 0 and claimed == 0, "the next launch finds all units unclaimed"
    return out, lse, left


def columns_of(case: Case, inputs: Inputs, params: native.AttentionParams, v: torch.Tensor) -> tuple[torch.Tensor, Map]:
    """V by columns, as the kernel before attention writes it, and its tensor map. Values before and after it are
    NaN."""
    options, end = options_of(case), v.shape[1] if case.entry == "ragged" else len(inputs.indices)
    copy = value_columns.Columns(0, end, 0)
    view = copy.views(options)["V"]
    columns = torch.full((options.num_kv_heads, options.head_dim_vo, view.head_dim), math.nan).to(v.dtype)
    given = native.ValueColumnsParams()
    views = {"V": View(v.shape[0], v.shape[1], v.shape[2], v.shape[3], *v.stride()[:3])}
    copy._replace(k=columns.data_ptr()).bind(given, views, options, params)
    given.v.data = v.data_ptr()
    library = shared_library(
        "value_columns.cpp", first_include="hopper", flags=traits_flags(value_columns.spec_of(options))
    )
    ctypes.CDLL(str(library)).value_columns(ctypes.byref(given))
    return columns, map_of(columns.transpose(0, 1)[None], (128, options.head_dim_vo // 2, 1, 1))


def set_scales(params: native.AttentionParams, scales: dict[str, Any]) -> None:
    for name, scale in scales.items():
        assert isinstance(scale, torch.Tensor)
        setattr(params, name, scale.data_ptr())
        setattr(params, f"{name}_stride", int(scale.numel() > 1))


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.build(flags_of(case)), *([pytest.mark.rare] if case.name in RARE else [])]


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case)) for case in CASES], ids=str)
def test_the_kernel_on_the_host(case: Case, kernels: None) -> None:
    inputs = make_inputs(case)
    out, lse, left = run(case, inputs)
    assert left == 0
    begin = 0
    for state in reference_states(inputs):
        rows = slice(begin, begin + len(state.out))
        begin = rows.stop
        allowed = limits(case, state, fp8_products=loader_of(case) in FP8_LOADERS)
        error = (out[rows].double() - state.out).abs()
        assert (error <= allowed.element).all()
        assert (error.norm(dim=-1) <= allowed.row).all()
        assert ((lse[rows] == state.lse) | ((lse[rows] - state.lse).abs() <= allowed.lse)).all()


WITH_NEIGHBOURS = {
    f"host-{name}" for name in ("halves", "halves-group-5", "short-192-128", "o8", "group-5-moving", "q8-moving")
}
NEIGHBOURS = [case for case in CASES if case.name in WITH_NEIGHBOURS]
assert len(NEIGHBOURS) == len(WITH_NEIGHBOURS)


@pytest.mark.parametrize("factor", [40.0, math.inf, math.nan])
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case)) for case in NEIGHBOURS], ids=str)
def test_bits_do_not_depend_on_queries_of_other_requests(case: Case, factor: float, kernels: None) -> None:
    """Boxes of q bring those of the next request into a tile, and those of the one before may be left in its memory."""
    inputs = make_inputs(case)
    out, lse, _ = run(case, inputs)
    begin = 0
    for own, rows_of_own in enumerate(inputs.q):
        rows = slice(begin, begin + len(rows_of_own))
        begin = rows.stop
        others = [q if i == own else (q.float() * factor).to(q.dtype) for i, q in enumerate(inputs.q)]
        found, found_lse, _ = run(case, dataclasses.replace(inputs, q=others))
        assert torch.equal(out[rows], found[rows]) and torch.equal(lse[rows], found_lse[rows])
