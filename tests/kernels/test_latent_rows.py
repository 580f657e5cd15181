"""attention_sm80 over latent rows, the whole kernel on the host: copies, products by mma.sync, softmax and output."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import latent_rows
import pytest
import torch
from cases.case import Case
from cases.latent import latent_case
from host_plans import attention_params, listed, merge, plan_of
from inputs import Inputs, make_inputs, reference_states
from native_build import shared_library, traits_flags
from tolerance import limits

from flashpage import native
from flashpage.kernels import devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.work import Problem

_MISTRAL: dict[str, Any] = {"head_dim": 320, "head_dim_vo": 256, "num_q_heads": 24, "causal": True, "page_size": 1}
_MISTRAL["q_dtype"] = "float16"
_E4M3: dict[str, Any] = {"kv_dtype": "float8_e4m3fn"}

# Names of cards are part of a case, because their shared memory decides the tile.
CASES = [
    ("A100", latent_case("rows-16", "tile edges", (1,) * 8, (0, 1, 31, 32, 33, 64, 65, 130))),
    ("A100", latent_case("rows-64", "two units of a row", (1,), (70,), num_q_heads=80, cache="gapped", sinks=True)),
    ("A10", latent_case("less-memory", "Mistral's rows, 16 a tile", (2,), (60,), **_MISTRAL)),
    ("A100", latent_case("scale", "a negative scale", (1,), (50,), sm_scale=-0.1)),
    ("A10", latent_case("v32", "rows of 656 bytes", (1, 1), (70, 20), row_format="deepseek_v32-uneven", page_size=3)),
    ("A100", latent_case("v4", "rows of 584 bytes", (2,), (40,), row_format="deepseek_v4", head_dim=512, causal=True)),
    ("A100", latent_case("selected", "lists with gaps", (2, 3), (40, 30), selected="padded", sinks=True)),
    ("A10", latent_case("tokens", "scales of tokens, fp16", (1,), (70,), row_format="tokens", **_E4M3, **_MISTRAL)),
    (
        "A100",
        latent_case("one-scale", "a token", (1,), (70,), row_format="tokens", head_dim=192, head_dim_vo=128, **_E4M3),
    ),
    ("A100", latent_case("three", "scales", (2,), (40,), row_format="tokens", head_dim=448, head_dim_vo=384, **_E4M3)),
    ("A10", latent_case("numbers", "scales of all tokens", (1,), (40,), row_format="numbers", **_E4M3, **_MISTRAL)),
    ("A10", latent_case("tensors", "the same in memory", (1,), (40,), row_format="tensors", **_E4M3, **_MISTRAL)),
]


def spec_of(case: Case, card: str) -> KernelSpec:
    options = latent_rows.options_of(case)
    spec = choose_for_card(Problem(options, case.num_q_heads * max(case.q_lens)), devices.named(card)).spec
    assert spec.kernel == "attention_sm80"
    return spec


def run(case: Case, inputs: Inputs, spec: KernelSpec, cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the CTAs and, if units are cut, the merge; returns out and lse."""
    q, (first, second) = torch.cat(inputs.q), (half.squeeze(2) for half in inputs.cache.argument("cpu"))
    out = torch.full((len(q), case.num_q_heads, case.value_dim), math.nan, dtype=getattr(torch, case.out_type))
    lse = torch.full((len(q), case.num_q_heads), math.nan)
    sinks, (planned_case, planned_inputs) = inputs.sinks, listed(case, inputs) if case.selected else (case, inputs)
    planned = plan_of(planned_case, planned_inputs, spec.rows, cut)
    params = attention_params(
        case,
        (q, out, lse),
        sinks,
        kv_indices=planned_inputs.indices.data_ptr(),
        plan=planned.data.ctypes.data,
        partial_out=planned.partial_out.data_ptr(),
        partial_lse=planned.partial_lse.data_ptr(),
        num_kv_heads=1,
        causal=case.causal,
        window_left=-1,
        group=native.make_fast_div(case.num_q_heads),
        page=native.make_fast_div(case.page_size),
    )
    for view, half in ((params.k, first), (params.v, second)):
        view.data = half.data_ptr()
        view.page_stride, view.token_stride = half.stride()[:2]
    scales = latent_rows.run_arguments(case, inputs.cache, "cpu")
    latent_rows.set_scales(params, **scales)
    args = native.VariantArgs()
    library = ctypes.CDLL(str(shared_library("attention_sm80.cpp", first_include="hopper", flags=traits_flags(spec))))
    library.run_attention_sm80(ctypes.byref(params), ctypes.byref(args), planned.num_ctas)
    if cut:
        merge(case, params)
    return out, lse


def check(case: Case, card: str, cut: int = 0) -> None:
    inputs = make_inputs(case)
    out, lse = run(case, inputs, spec_of(case, card), cut)
    begin = 0
    for state in reference_states(inputs):
        rows = slice(begin, begin + len(state.out))
        begin = rows.stop
        allowed = limits(case, state)
        error = (out[rows].double() - state.out).abs()
        assert (error <= allowed.element).all()
        assert (error.norm(dim=-1) <= allowed.row).all()
        assert ((lse[rows] == state.lse) | ((lse[rows] - state.lse).abs() <= allowed.lse)).all()


@pytest.mark.parametrize(("card", "case"), CASES, ids=lambda value: value.name if isinstance(value, Case) else "")
def test_the_kernel_on_the_host(card: str, case: Case) -> None:
    check(case, card)


def test_cut_units() -> None:
    card, case = CASES[0]
    check(dataclasses.replace(case, q_lens=(1, 1), kv_lens=(130, 20)), card, cut=48)
