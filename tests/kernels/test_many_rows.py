"""attention_sm80 on the host, with fp8 products (prefill_sm89) too: copies in groups, stages, fragments, softmax and
masks. Copies arrive late and in any order. The loop over few rows runs over formats here, and with one stage over bf16;
the rest of it runs on cards."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import format_rows
import pytest
import torch
from cases.case import Case, decode, prefill
from host_plans import attention_params, merge, plan_of
from inputs import Inputs, make_inputs, reference_states
from native_build import shared_library, traits_flags
from tolerance import limits

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import attention_sm80, devices
from flashpage.kernels.ahead import BF16, BYTES, E4M3, FP16, Ahead
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.options import Options
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.work import Problem
from flashpage.variants import builtin

_E4M3 = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}
_O8 = {"o_dtype": "float8_e4m3fn"}
_ROPE = {"position": "ROPE_LLAMA"}
_WIDE = {"head_dim": 192, "head_dim_vo": 128}
_SINKS = {"sinks": True, "causal": True}
_EMPTY = {"causal": True, "page_size": 3}
# Names of cards decide the tile.
CASES = [
    (
        *("RTX 4090", "prefill_sm89"),
        prefill("fp8", "one stage, a unit without tokens", (20, 2), (210, 0), head_dim=128, causal=True, **_E4M3),
    ),
    (
        *("RTX 4090", "prefill_sm89"),
        prefill("fp8-narrow", "two m16 tiles a warp, two stages", (40,), (150,), sinks=True, page_size=1, **_E4M3),
    ),
    ("RTX 4090", "attention_sm80", prefill("one-stage", "a window", (40,), (150,), window_left=70, causal=True)),
    ("A100", "attention_sm80", prefill("one-body", "three CTAs", (40,), (150,), window_left=60, causal=True)),
    (
        *("B200", "attention_sm80"),
        prefill("two-stages", "a soft cap", (20,), (210,), head_dim=128, causal=True, page_size=3, soft_cap=3.0),
    ),
    (
        *("RTX 4090", "attention_sm80"),
        prefill("nvfp4", "scales of column groups", (20, 2), (140, 0), kv_format="nvfp4", causal=True, page_size=3),
    ),
    (
        *("A100", "attention_sm80"),
        prefill("int8", "scales of tokens", (40,), (90,), kv_format="int8_token", q_dtype="float16", head_dim=72),
    ),
    ("A10", "attention_sm80", decode("few-narrow", "rows on 8 bytes", (70, 9), cache="narrow", kv_format="nvfp4")),
    (
        *("A100", "attention_sm80"),
        prefill("narrow", "rows on 8 bytes", (20,), (90,), cache="narrow", kv_format="nvfp4", head_dim=128),
    ),
    ("A100", "attention_sm80", decode("few-int4", "zero points", (90, 0, 1), kv_format="int4_token", sinks=True)),
    (
        "A10",
        "attention_sm80",
        decode("few-rope", "keys are converted and rotated", (70,), kv_format="int8_token", **_ROPE),
    ),
    ("A100", "attention_sm80", prefill("rope", "the same", (20,), (90,), kv_format="nvfp4", head_dim=128, **_ROPE)),
    (
        *("A100", "attention_sm80"),
        prefill("o8", "e4m3 outputs, 32 bytes by four lanes", (40,), (90,), head_dim=128, o_scale="float", **_O8),
    ),
    ("A100", "attention_sm80", prefill("o8-dim-72", "by pairs", (20,), (90,), head_dim=72, o_scale="tensor", **_O8)),
    ("A10", "attention_sm80", decode("few-o8", "by pairs", (70, 0, 9), o_scale="tensor", **_O8)),
    ("RTX 4090", "prefill_sm89", prefill("o8-fp8", "by pairs", (40,), (150,), o_scale="small", **_O8, **_E4M3)),
    ("A100", "attention_sm80", prefill("cap", "by the card's tanh", (40,), (150,), soft_cap=2.0, sm_scale=0.5)),
    (
        *("A100", "attention_sm80"),
        prefill("cap-fp8", "fp16 weights: by a polynomial", (20,), (90,), kv_dtype="float8_e4m3fn", soft_cap=20.0),
    ),
    ("RTX 4090", "prefill_sm89", prefill("cap-e4m3", "by the card's tanh", (40,), (150,), soft_cap=2.0, **_E4M3)),
    ("A100", "attention_sm80", prefill("bands", "keys in three bands", (70,), (150,), page_size=3, **_SINKS, **_WIDE)),
    ("RTX 4090", "attention_sm80", prefill("groups", "two groups of warps", (70, 3), (210, 0), **_EMPTY, **_WIDE)),
    ("RTX 4090", "attention_sm80", prefill("groups-one", "one has no tokens", (20, 2), (1, 40), **_SINKS, **_WIDE)),
    (
        *("RTX 4090", "attention_sm80"),
        prefill("groups-window", "sinks", (150,), (150,), window_left=70, **_SINKS, **_WIDE),
    ),
    ("RTX 4090", "attention_sm80", prefill("groups-cap", "a soft cap", (40,), (150,), soft_cap=2.0, **_WIDE)),
    (
        *("RTX 4090", "attention_sm80"),
        prefill("groups-o8", "64 columns of e4m3 a group", (150, 3), (400, 3), o_scale="tensor", **_O8, **_WIDE),
    ),
    (
        *("RTX 4090", "attention_sm80"),
        prefill("groups-o8-80", "by pairs", (40,), (90,), head_dim=192, head_dim_vo=80, o_scale="float", **_O8),
    ),
    (
        *("RTX 4090", "attention_sm80"),
        prefill("groups-88", "padded columns", (40,), (90,), head_dim=192, head_dim_vo=88),
    ),
    (
        *("RTX 4090", "attention_sm80"),
        prefill("groups-padded", "keys end within a step", (150, 90), (300, 150), head_dim=184, head_dim_vo=128),
    ),
    ("A10", "attention_sm80", decode("few-padded", "keys end within a step", (70, 90, 33, 5), head_dim=72)),
    ("A100", "attention_sm80", decode("few-padded-a100", "keys end within a step", (70, 90, 33, 5), head_dim=72)),
    ("A10", "attention_sm80", decode("few-stage", "one stage, by halves", (210, 0, 1, 33), head_dim=128, sinks=True)),
    ("A10", "attention_sm80", decode("few-stage-256", "five warps", (210, 1), head_dim=256, soft_cap=5.0)),
    ("A10", "attention_sm80", decode("few-pair", "six scales a row", (70,), kv_format="nvfp4+int8_token", head_dim=96)),
]
CUT = [
    ("RTX 4090", prefill("groups-cut", "partial rows by halves", (150, 3), (150, 40), **_SINKS, **_WIDE)),
    ("A10", decode("few-stage-cut", "one stage", (210, 33), head_dim=128, sinks=True)),
]


def spec_of(case: Case, card: str) -> KernelSpec:
    q, out = (DType.of(getattr(torch, name)) for name in (case.q_dtype, case.out_type))
    kv = DType.BYTES if case.kv_format else DType.of(getattr(torch, case.kv_type))
    k_format, v_format = format_rows.names(case) if case.kv_format else ("plain", "plain")
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.value_dim, case.page_size)
    options = Options("paged", *sizes, q, kv, out, causal=case.causal, k_format=k_format, v_format=v_format)
    options = dataclasses.replace(options, position_encoding=case.position, has_soft_cap=bool(case.soft_cap))
    packed_rows, variant = options.group_size if max(case.q_lens) == 1 else 4096, builtin(case.soft_cap).spec
    return choose_for_card(Problem(options, packed_rows), devices.named(card), variant).spec


def run(case: Case, inputs: Inputs, spec: KernelSpec, cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a CTA with all requests, or, if units are cut, two and the merge; returns out and lse."""
    q, (k, v) = torch.cat(inputs.q), inputs.cache.argument("cpu")
    out = torch.full((len(q), case.num_q_heads, case.value_dim), math.nan, dtype=getattr(torch, case.out_type))
    lse = torch.full((len(q), case.num_q_heads), math.nan)
    planned, sinks = plan_of(case, inputs, spec.rows, cut), inputs.sinks
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
        rope_scale=1.0,
        rope_theta=1e4,
    )
    parts = [(params.k, k), (params.v, v)]
    if inputs.scale_cache is not None:
        parts += zip((params.key_scales, params.value_scales), inputs.scale_cache.argument("cpu"), strict=True)
    for view, cache in parts:
        view.data = cache.data_ptr()
        view.page_stride, view.token_stride, view.head_stride = cache.stride()[:3]
    args = native.VariantArgs()
    args.scalars[0] = case.soft_cap
    library = ctypes.CDLL(str(shared_library("attention_sm80.cpp", first_include="hopper", flags=traits_flags(spec))))
    library.run_attention_sm80(ctypes.byref(params), ctypes.byref(args), planned.num_ctas)
    if cut:
        merge(case, params)
    return out, lse


@pytest.mark.parametrize(("card", "kernel", "case"), CASES, ids=str)
def test_many_rows(card: str, kernel: str, case: Case) -> None:
    check(card, kernel, case)


@pytest.mark.parametrize(("card", "case"), CUT, ids=str)
def test_cut_units(card: str, case: Case) -> None:
    check(card, "attention_sm80", case, cut=96)


def check(card: str, kernel: str, case: Case, cut: int = 0) -> None:
    inputs, spec = make_inputs(case), spec_of(case, card)
    assert spec.kernel == kernel and spec.tile is not None and (spec.tile.warps_q == 1) == case.name.startswith("few")
    assert (spec.tile.warps_q * spec.tile.warps_kv == 8) == case.name.startswith("groups")
    out, lse = run(case, inputs, spec, cut)
    begin = 0
    for state in reference_states(inputs):
        rows = slice(begin, begin + len(state.out))
        begin = rows.stop
        allowed = limits(case, state, fp8_products=kernel == "prefill_sm89")
        error = (out[rows].double() - state.out).abs()
        assert (error <= allowed.element).all()
        assert (error.norm(dim=-1) <= allowed.row).all()
        assert ((lse[rows] == state.lse) | ((lse[rows] - state.lse).abs() <= allowed.lse)).all()


@pytest.mark.parametrize(
    ("options", "approximates"),
    [
        ({}, True),
        ({"q_dtype": FP16, "kv_dtype": FP16}, False),
        ({"kv_dtype": E4M3}, False),
        ({"kv_dtype": DType.FLOAT8_E5M2}, False),
        ({"kv_dtype": BYTES, "kv_format": "nvfp4"}, False),
        ({"kv_dtype": BYTES, "kv_format": "bfloat16", "v_format": "nvfp4"}, False),
        ({"kv_dtype": BYTES, "kv_format": "nvfp4", "v_format": "bfloat16"}, True),
        ({"packed_rows": 16}, False),  # loads take longer than any tanh
    ],
    ids=str,
)
def test_soft_caps_are_exact_where_weights_are_fp16(options: dict[str, Any], approximates: bool) -> None:
    """Weights are fp16 over values of less than 16 bits, whatever q's type is (tile/layout/shape.h)."""
    types = {"q_dtype": BF16, "kv_dtype": BF16, "packed_rows": 128}
    row = Ahead(**types | options, head_dims=(128, 128), has_soft_cap=True)
    choice = choose_for_card(row.problem, devices.named("A100"), row.variant)
    assert choice.kernel is attention_sm80.KERNEL
    found = any("approximates_tanh = true" in line for line in choice.kernel.traits(choice.spec))
    assert found is approximates
