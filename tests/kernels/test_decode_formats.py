"""decode_sm90 over K and V of 4 and 8 bits, whole on the host: loading and computing warps, copies of scales, rings,
barriers, products and the end of a unit. Copies arrive late and in any order."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from pathlib import Path
from typing import Any

import format_rows
import pytest
import torch
from cases.case import Case, decode, prefill
from host_maps import Map, map_of
from host_plans import attention_params, plan_of
from inputs import Inputs, make_inputs, reference_states
from native_build import shared_library, traits_flags
from tolerance import limits

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.jit import Target, build_kernels
from flashpage.jit.compilers import find_nvcc
from flashpage.kernels import decode_sm90, devices
from flashpage.kernels.choose import choose_for_card, packed_rows
from flashpage.kernels.options import Options
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.tensor_maps import loader_tokens
from flashpage.kernels.work import Problem, Work
from flashpage.variants.variant import builtin

_EDGES = (0, 1, 17, 33, 129, 300)
_PAIR = (130, 9)
_TYPES = "bfloat16+float8_e4m3fn"
_NARROW: dict[str, Any] = {"cache": "narrow", "head_dim": 128, "kv_format": "nvfp4"}
_HIDDEN: dict[str, Any] = {"window_left": 400, "hidden_nan": True}
_E4M3: dict[str, Any] = {"kv_dtype": "float8_e4m3fn"}
_E5M2: dict[str, Any] = {"kv_dtype": "float8_e5m2"}
# Few builds: rows with the same formats, dims, loader and rows of a unit share one.
CASES = [
    decode(
        "nvfp4", "boxes of lines of 64 bytes, slots of one unit", _EDGES, head_dim=128, kv_format="nvfp4", sinks=True
    ),
    decode("nvfp4-hnd", "heads before tokens", _PAIR, head_dim=128, kv_format="nvfp4", kv_layout="HND", page_size=64),
    decode("nvfp4-window", "tokens before the first", (300, 90), head_dim=128, kv_format="nvfp4", window_left=40),
    decode("nvfp4-rows", "single rows of half a line", _EDGES, kv_format="nvfp4", page_size=1),
    decode(
        "int4",
        "zero points, hidden scales",
        _EDGES,
        head_dim=128,
        kv_format="int4_token",
        hidden_nan=True,
        window_left=50,
    ),
    decode(
        "int4-rows",
        "zero points, single rows, 16 packed rows",
        _PAIR,
        kv_format="int4_token",
        page_size=3,
        q_len=4,
        num_q_heads=8,
    ),
    decode(
        *("nvfp4-causal", "eight packed rows, causal, a negative scale", (70, 300, 2)),
        kv_format="nvfp4",
        q_len=2,
        num_q_heads=8,
        sm_scale=-0.1,
    ),
    decode(
        *("nvfp4-16", "sixteen packed rows: factors are not swapped", (130, 40)),
        head_dim=128,
        kv_format="nvfp4",
        q_len=4,
        num_q_heads=8,
    ),
    decode("nvfp4-signs", "scales by head, of either sign", (70, 300, 2), kv_format="nvfp4", scales="signs"),
    decode("nvfp4-cap", "a soft cap, fp16", _PAIR, kv_format="nvfp4", soft_cap=8.0, q_dtype="float16"),
    decode("int8-256", "Q in shared memory, two warps a slot", _PAIR, head_dim=256, kv_format="int8_token"),
    decode("nvfp4-requests", "scales of requests", (70, 300, 2), kv_format="nvfp4", scales="per_request"),
    decode("int8", "scales of tokens", _EDGES, kv_format="int8_token"),
    decode("e4m3", "scales of tokens, single rows", _PAIR, head_dim=128, kv_format="e4m3_token", page_size=1),
    decode("pair", "K and V differ in bits", _PAIR, head_dim=128, kv_format="nvfp4+float8_e4m3fn"),
    decode("narrow", "rows on 8 bytes, at most eight packed rows", _PAIR, **_NARROW),
    decode("narrow-16", "the same with sixteen", _PAIR, q_len=4, num_q_heads=8, **_NARROW),
    decode("narrow-int8", "rows on 8 bytes", _PAIR, cache="narrow", kv_format="int8_token"),
    decode("narrow-types", "rows on 8 bytes without scales", _PAIR, **_NARROW | {"kv_format": _TYPES}),
    decode(
        "types", "eight bits without scales", _EDGES, head_dim=128, kv_format="float8_e4m3fn+float8_e5m2", sinks=True
    ),
    decode("types-80", "an odd number of chunks", _PAIR, head_dim=80, kv_format="float8_e5m2+float8_e4m3fn", q_len=2),
    decode("fp8", "boxes, eight teams, hidden NaN", (300, 90), head_dim=128, window_left=40, hidden_nan=True, **_E4M3),
    Case(
        "fp8-units",
        "one request has three units",
        (130, 64, 9, 0),
        (1, 9, 1, 1),
        "paged",
        4,
        2,
        128,
        causal=True,
        **_E4M3,
    ),
    decode("fp8-64", "twelve teams, scales of either sign", _EDGES, scales="signs", sinks=True, **_E4M3),
    decode("fp8-64-page-1", "24 slots of single rows, hidden NaN", (450, 40), page_size=1, **_E5M2 | _HIDDEN),
    decode("fp8-96", "single rows, eight packed rows, fp16", _EDGES, head_dim=96, q_len=4, q_dtype="float16", **_E4M3),
    decode("fp8-112", "an odd number of steps, NaN in a page", _PAIR, head_dim=112, num_q_heads=14, **_E4M3),
    decode("fp8-16-rows", "sixteen packed rows: factors are not swapped", _PAIR, q_len=4, num_q_heads=8, **_E4M3),
    decode("bf16", "K without scales, and of the queries' type", _PAIR, head_dim=128, kv_format="bfloat16+nvfp4"),
]


def options_of(case: Case) -> Options:
    q, out = (DType.of(getattr(torch, name)) for name in (case.q_dtype, case.out_type))
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.value_dim, case.page_size)
    more = {"causal": case.causal, "has_soft_cap": bool(case.soft_cap)}
    if not case.kv_format:
        return Options("paged", *sizes, q, DType.of(getattr(torch, case.kv_type)), out, **more)
    k_format, v_format = format_rows.names(case)
    return Options("paged", *sizes, q, DType.BYTES, out, k_format=k_format, v_format=v_format, **more)


def spec_of(case: Case) -> KernelSpec:
    options, variant = options_of(case), builtin(soft_cap=case.soft_cap).spec
    rows = packed_rows(options, len(case.q_lens), sum(case.q_lens))
    choice = choose_for_card(Problem(options, rows), devices.H200, variant)
    assert choice.kernel is decode_sm90.KERNEL
    spec = choice.kernel.on_eight(choice.spec) if case.cache == "narrow" else choice.spec
    assert spec is not None
    return spec


def run(case: Case, inputs: Inputs, cut: int, fill: int = 0x7F) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Runs the CTAs; returns out, lse, and barriers that miss arrivals. `fill`: each byte of shared memory before."""
    spec, q = spec_of(case), torch.cat(inputs.q)
    assert spec.tile is not None
    out = torch.full((len(q), case.num_q_heads, case.value_dim), math.nan, dtype=getattr(torch, case.out_type))
    lse = torch.full((len(q), case.num_q_heads), math.nan)
    planned, sinks = plan_of(case, inputs, spec.rows, cut), inputs.sinks
    box = loader_tokens(spec.loader, case.page_size, spec.tile.tile_kv, *options_of(case).row_bytes)
    params = attention_params(
        case,
        (q, out, lse),
        sinks,
        kv_indices=inputs.indices.data_ptr(),
        plan=planned.data.ctypes.data,
        partial_out=planned.partial_out.data_ptr(),
        partial_lse=planned.partial_lse.data_ptr(),
        num_kv_heads=case.num_kv_heads,
        causal=case.causal,
        window_left=case.window_left,
        group=native.make_fast_div(case.num_q_heads // case.num_kv_heads),
        page=native.make_fast_div(case.page_size),
        box_tokens=box,
        num_kv_indices=inputs.indices.numel(),
    )
    for name, scales in inputs.scales.items():
        setattr(params, name, scales.data_ptr())
        setattr(params, f"{name}_stride", int(scales.shape[-1] > 1))
        setattr(params, f"{name}_request_stride", scales.stride(0) if scales.dim() == 2 else 0)
    k, v = inputs.cache.rows()
    views = [(params.k, k), (params.v, v)]
    if inputs.scale_cache is not None:
        views += zip((params.key_scales, params.value_scales), inputs.scale_cache.rows(), strict=True)
    for view, rows in views:
        view.data = rows.data_ptr()
        view.page_stride, view.token_stride, view.head_stride = rows.stride()[:3]
    line = decode_sm90.KERNEL.line_bytes(spec)
    maps = (Map * 2)(*(map_of(rows, (line, box, 1, 1)) for rows in ((k, v) if box else ())))
    args, flags = native.VariantArgs(), traits_flags(spec)
    args.scalars[0] = case.soft_cap
    library = ctypes.CDLL(str(shared_library("decode_kernel.cpp", first_include="hopper", flags=flags)))
    left = library.run_decode(ctypes.byref(params), ctypes.byref(args), maps, planned.num_ctas, fill)
    return out, lse, left


@pytest.mark.parametrize("cut", [0, 48])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_on_the_host(case: Case, cut: int) -> None:
    inputs = make_inputs(case)
    out, lse, left = run(case, inputs, cut)
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


def test_a_soft_cap_does_not_depend_on_what_slots_held() -> None:
    """The first unit sees 16 tokens, one box of a slot for two."""
    case = prefill("cap-half-slot", "a unit that causal ends", (17, 20, 3), (17, 65, 40), causal=True, soft_cap=20.0)
    assert spec_of(case).rows == 32
    inputs = make_inputs(case)
    (out, lse, _), *others = (run(case, inputs, 0, fill) for fill in (0, 0x7F, 0xFF))
    for other in others:
        assert torch.equal(other[0], out) and torch.equal(other[1], lse)


@pytest.mark.rare
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_no_registers_spill(tmp_path: Path) -> None:
    names = "nvfp4", "nvfp4-rows", "int4-rows", "nvfp4-16", "narrow", "narrow-16", "narrow-int8", "fp8-96"
    specs = [spec_of(case) for case in CASES if case.name in names]
    results = list(build_kernels([(spec, Target("cuda", 90)) for spec in specs], tmp_path))
    assert len(results) == len(names)
    assert all(result.error is None and result.spill_bytes == 0 for result in results)


def test_few_rows_of_eight_bits_swap_factors() -> None:
    """At most eight packed rows, 64 to 128 columns in steps of 16, no scales of tokens, mask or RoPE."""
    chosen = {case.name: spec_of(case).tile for case in CASES}
    found = {name: tile.warps_kv for name, tile in chosen.items() if tile is not None and tile.tile_q == 8}
    fp8 = {"types": 8, "types-80": 12, "fp8": 8, "fp8-units": 8}
    fp8 |= {f"fp8-{name}": 12 for name in ("64", "64-page-1", "96", "112")}
    assert {name: found.get(name) for name in fp8} == fp8
    assert not found.keys() & {"fp8-16-rows", "int8", "e4m3", "pair", "narrow-types", "bf16", "nvfp4-cap"}
    usual = Options("paged", 4, 2, 64, 64, 16, DType.BFLOAT16, DType.FLOAT8_E4M3, DType.BFLOAT16)
    for change in (
        {"head_dim_qk": 192},
        {"head_dim_vo": 72},
        {"head_dim_qk": 48},
        {"position_encoding": "ROPE_LLAMA"},
        {"has_mask": True},
    ):
        spec = choose_for_card(Problem(dataclasses.replace(usual, **change), 4), devices.H200).spec
        assert spec.tile is not None and spec.tile.tile_q > 8


def test_rows_of_other_widths_are_refused() -> None:
    case = decode("96", "six scales", (9,), head_dim=96, kv_format="nvfp4")
    reasons = decode_sm90.KERNEL.refusals(Work(Problem(options_of(case), 4), devices.H200))
    assert any("head_dim_qk 96 is neither 64 nor 128" in why for why in reasons)
