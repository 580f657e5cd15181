"""decode_sm90 whole on the host: units of no, few and many tokens that follow each other in a CTA, and units of many
pieces. Copies arrive late and in any order."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from cases.case import Case
from host_maps import Map, map_of
from host_plans import attention_params
from inputs import Inputs, make_inputs, reference_states
from native_build import shared_library, traits_flags
from planner_batches import Batch, Cutting, arrays_of, bounds, call, problem_of
from tolerance import limits

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import decode_sm90, devices
from flashpage.kernels.options import Options
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.tensor_maps import loader_tokens
from flashpage.kernels.work import Problem, Work

_LENGTHS = (0, 1, 31, 32, 33, 7, 130, 5, 17, 64, 65, 0, 12, 28, 30, 257, 2, 600)
_ONES = (1,) * len(_LENGTHS)
_O8: dict[str, Any] = {"o_dtype": "float8_e4m3fn"}
CASES = [
    Case("short-page-16", "boxes, a slot or less next to several slots", _LENGTHS, _ONES, num_q_heads=6, sinks=True),
    Case("short-page-1", "rows, a slot or less next to several slots", _LENGTHS, _ONES, num_q_heads=20, page_size=1),
    Case("short-rows-20", "both halves of two row tiles", (3, 200, 40), (1, 2, 1), num_q_heads=20, num_kv_heads=1),
    Case("pieces", "12 rows in 38 pieces: more jobs than warps", (1190,), (1,), num_q_heads=12, num_kv_heads=1),
    Case(
        "pieces-d-192", "two jobs a row, in 36 pieces", (1125, 20), (1, 1), num_q_heads=9, num_kv_heads=1, head_dim=192
    ),
    Case("short-o8", "outputs of e4m3", _LENGTHS, _ONES, num_q_heads=6, o_scale="tensor", **_O8),
    Case("pieces-o8", "merged", (1190,), (1,), num_q_heads=12, num_kv_heads=1, o_scale="tensor", **_O8),
    Case(
        "short-rows-64",
        "Q of 512 columns, two warps share those of V",
        (3, 200, 40),
        (1, 4, 3),
        num_q_heads=16,
        num_kv_heads=1,
        head_dim=512,
        head_dim_vo=256,
    ),
    Case("pieces-shared", "three rows in 38 pieces: warps share a row", (1190,), (1,), num_q_heads=3, num_kv_heads=1),
]


def spec_of(case: Case) -> KernelSpec:
    options = dataclasses.replace(options_of(case), uniform_q_len=0)
    work = Work(Problem(options, max(case.q_lens) * case.num_q_heads // case.num_kv_heads), devices.H200)
    assert not decode_sm90.KERNEL.refusals(work)
    return decode_sm90.KERNEL.spec(work)


def options_of(case: Case) -> Options:
    bf16, out = DType.of(torch.bfloat16), DType.of(case.out_type)
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.value_dim)
    return Options("paged", *heads, case.page_size, bf16, bf16, out, causal=case.causal)


def planned(case: Case, spec: KernelSpec) -> tuple[np.ndarray, native.PlanResult]:
    assert spec.tile is not None
    is_cut = case.name.startswith("pieces")
    batch = Batch(np.array(case.q_lens), np.array(case.kv_lens), case.num_q_heads, case.num_kv_heads, case.page_size)
    cutting = Cutting(
        num_ctas=5 if is_cut else 3,
        tile_q=spec.tile.tile_q,
        tile_kv=spec.tile.tile_kv,
        fixed_piece_tokens=32 if is_cut else 0,
        merge_rows=64,
    )
    capacity, arrays = bounds(batch, cutting)[0], arrays_of(batch)
    status, buffer, result = call(problem_of(batch, arrays), cutting, capacity)
    assert status == native.OK, native.last_error()
    if is_cut:
        assert result.num_partial_rows > 32 * case.num_q_heads
    return buffer, result


def run(case: Case, inputs: Inputs, times: int, most_rounds: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns out, lse, and barriers that miss arrivals. Units of more than `most_rounds` are left to the merge kernel;
    0: none are."""
    spec, q = spec_of(case), torch.cat(inputs.q)
    assert spec.tile is not None
    data, result = planned(case, spec)
    k, v = inputs.cache.argument("cpu")
    out = torch.full((len(q), case.num_q_heads, case.value_dim), math.nan, dtype=getattr(torch, case.out_type))
    lse = torch.full((len(q), case.num_q_heads), math.nan)
    partial_out = torch.full((result.num_partial_rows + 1, case.value_dim), math.nan)
    partial_lse = torch.full((result.num_partial_rows + 1,), math.nan)
    row_bytes = (case.head_dim * 2, case.value_dim * 2)
    box = loader_tokens(spec.loader, case.page_size, spec.tile.tile_kv, *row_bytes)
    params = attention_params(
        case,
        (q, out, lse),
        inputs.sinks,
        kv_indices=inputs.indices.data_ptr(),
        num_kv_indices=inputs.indices.numel(),
        plan=data.ctypes.data,
        partial_out=partial_out.data_ptr(),
        partial_lse=partial_lse.data_ptr(),
        num_kv_heads=case.num_kv_heads,
        causal=case.causal,
        window_left=-1,
        group=native.make_fast_div(case.num_q_heads // case.num_kv_heads),
        page=native.make_fast_div(case.page_size),
        box_tokens=box,
        most_merge_rounds=most_rounds,
    )
    for view, half in ((params.k, k), (params.v, v)):
        view.data = half.data_ptr()
        view.page_stride, view.token_stride, view.head_stride = half.stride()[:3]
    forms = [map_of(half, (128, box, 1, 1)) for half in (k, v)] if box else []
    library = ctypes.CDLL(str(shared_library("decode_units.cpp", first_include="hopper", flags=traits_flags(spec))))
    args, left = native.VariantArgs(), 0
    for _ in range(times):
        left += library.run_units(ctypes.byref(params), ctypes.byref(args), (Map * 2)(*forms), result.num_ctas)
    if most_rounds:
        assert out.isnan().any() == (result.num_merges > 0)
        merge = native.MergeParams(head_dim_vo=case.value_dim)
        for name, _ in native.MergeParams._fields_:
            setattr(merge, name, getattr(params, name, getattr(merge, name)))
        flags = (f"-DOUT={'E4m3' if case.has_fp8_output else 'Bf16'}", "-DBY_COLUMNS=0")
        ctypes.CDLL(str(shared_library("merge.cpp", first_include="hopper", flags=flags))).merge(ctypes.byref(merge), 2)
    return out, lse, left


@pytest.mark.parametrize("most_rounds", [0, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_units_on_the_host(case: Case, most_rounds: int) -> None:
    inputs = make_inputs(case)
    out, lse, left = run(case, inputs, 2, most_rounds)  # the second run needs what the first one resets
    assert left == 0
    begin = 0
    for state in reference_states(inputs):
        rows = slice(begin, begin + len(state.out))
        begin = rows.stop
        allowed = limits(case, state)
        error = (out[rows].double() - state.out).abs()
        assert (error <= allowed.element).all()
        assert (error.norm(dim=-1) <= allowed.row).all()
        assert ((lse[rows] == state.lse) | ((lse[rows] - state.lse).abs() <= allowed.lse)).all()
