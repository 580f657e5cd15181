"""The kernels over latent rows, each whole on the host: loading and computing warps, rings, barriers, products and the
end of a unit. Copies arrive late and in any order, and wgmmas finish when they are waited for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import latent_rows
import pytest
import torch
from cases.case import Case
from cases.latent import latent_case
from inputs import make_inputs, reference_states
from latent_on_host import run, spec_of
from tolerance import has_16_bits, limits

from aot import build as aot_build
from flashpage.jit import Target
from flashpage.kernels import devices, latent_columns_sm90, latent_decode_sm90, latent_e4m3_sm90, latent_wide_sm90
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.context_classes import ContextClass
from flashpage.kernels.kernel import AttentionKernel
from flashpage.kernels.work import Problem

_EDGES = (0, 1, 17, 63, 64, 65, 129, 200)
_ONES = (1,) * len(_EDGES)
_ROWS_64, _ROWS_96 = {"num_q_heads": 64}, {"num_q_heads": 96}
_LISTED: dict[str, Any] = {"selected": "padded", "sinks": True, "page_size": 64}
_MISTRAL: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "q_dtype": "float16", "head_dim": 320, "head_dim_vo": 256}
_96_LISTED, _40_LISTED = _ROWS_96 | _LISTED, _LISTED | {"num_q_heads": 40}
_V32 = {"row_format": "deepseek_v32-uneven"}
_SCALED: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "page_size": 16}
_TENSORS, _FP8_64 = _SCALED | {"row_format": "tensors"}, {"kv_dtype": "float8_e4m3fn"} | _ROWS_64
_V4: dict[str, Any] = {"row_format": "deepseek_v4", "head_dim": 512}
TRANSPOSED, WIDE = latent_decode_sm90.KERNEL, latent_wide_sm90.KERNEL
BY_COLUMNS, IN_E4M3 = latent_columns_sm90.KERNEL, latent_e4m3_sm90.KERNEL
# Few builds: cases with the same types, sizes, loader and rows of a unit share one.
TRANSPOSED_CASES = [
    latent_case("edges", "slots of one unit, and units that follow each other", _ONES, _EDGES, sinks=True),
    latent_case("mtp", "page 16: four boxes, causal", (2, 2), (129, 1), page_size=16, causal=True, num_q_heads=8),
    latent_case(
        "page-64", "few heads, a negative scale", (1, 1), (100, 256), page_size=64, num_q_heads=3, sm_scale=-0.1
    ),
    latent_case("page-1", "single rows", (1, 1, 1), (70, 129, 2), page_size=1, cache="interleaved"),
    latent_case("page-3", "single rows of pages of an odd size", (1, 2), (270, 66), page_size=3, num_q_heads=8),
    latent_case(
        "256-16",
        "fp16, units of 32 and 8 rows",
        (1, 2),
        (290, 130),
        head_dim=272,
        head_dim_vo=256,
        q_dtype="float16",
        num_q_heads=20,
    ),
    latent_case("512-0", "rows without a tail", (1, 2), (90, 130), head_dim=512, num_q_heads=16, causal=True),
    latent_case("selected", "lists with gaps", (2, 1), (190, 70), selected="padded", sinks=True),
    latent_case("v32", "rows of 656 bytes, a list", (1, 2), (230, 70), **_V32, **_LISTED),
    latent_case("v4", "rows of 584 bytes", (2,), (140,), **_V4, **_LISTED),
    latent_case("v4-two", "in two caches", (2,), (140,), second_page=2, **_V4, **_LISTED),
    latent_case("tokens", "scales of tokens, fp16", (1,), (170,), row_format="tokens", **_MISTRAL),
    latent_case("fp32", "fp32 outputs", (1,), (170,), o_dtype="float32"),
    latent_case("128-48", "few columns, single rows", (1,), (300,), head_dim=176, head_dim_vo=128, page_size=1),
]
E4M3_CASES = [
    latent_case("v32", "rows of 656 bytes, a list, two row tiles", (1, 2), (230, 70), **_V32, **_96_LISTED),
    latent_case("v32-40", "rows of 656 bytes, a list, a row tile", (1, 1), (230, 400), **_V32, **_40_LISTED),
    latent_case(
        "edges", "lists of no token and of one, units that follow each other", _ONES, _EDGES, **_V32, **_96_LISTED
    ),
    latent_case("v32-pages", "rows of 656 bytes, causal", (2, 1), (64, 129), causal=True, **_V32, **_ROWS_64),
    latent_case("v32-fp32", "fp32 outputs", (1,), (170,), o_dtype="float32", **_V32, **_96_LISTED),
    latent_case(
        "tensors", "scales of tensors, a negative scale", (1, 1), (170, 63), sm_scale=-0.1, **_TENSORS, **_ROWS_64
    ),
    latent_case("tail", "the tail decides the scores", (2,), (170,), deviations=(0.05, 4.0), **_TENSORS, **_ROWS_64),
    latent_case("zeros", "rows of zeros", (1,), (170,), deviations=(0.0, 0.0), **_TENSORS, **_ROWS_64),
    latent_case("tokens", "scales of tokens, two row tiles", (2,), (170,), row_format="tokens", **_SCALED, **_ROWS_64),
    latent_case(
        "tokens-256-64",
        "scales of tokens",
        (2,),
        (170,),
        row_format="tokens",
        **_ROWS_64,
        **_MISTRAL | {"q_dtype": "bfloat16"},
    ),
    latent_case("tokens-512-0", "rows without a tail", (1,), (190,), row_format="tokens", head_dim=512, **_FP8_64),
    latent_case("few-v32", "16 rows of a list, rows of 656 bytes", (1, 2), (230, 70), num_q_heads=8, **_V32, **_LISTED),
    latent_case("few-edges", "units that follow each other, causal", _ONES, _EDGES, causal=True, sinks=True, **_V32),
    latent_case("few-mtp", "32 rows, causal", (2, 1), (64, 129), causal=True, num_q_heads=12, **_V32),
    latent_case("few-tensors", "scales of tensors, a negative scale", (1, 1), (170, 63), sm_scale=-0.1, **_TENSORS),
    latent_case("few-tail", "the tail decides the scores", (1,), (170,), deviations=(0.05, 4.0), **_TENSORS),
    latent_case(
        "few-tokens", "scales of tokens, 32 rows", (2,), (170,), row_format="tokens", num_q_heads=16, **_SCALED
    ),
    latent_case(
        "few-256-64", "scales of tokens", (2,), (170,), row_format="tokens", **_MISTRAL | {"q_dtype": "bfloat16"}
    ),
]
COLUMNS_CASES = [
    latent_case("v32-fp16", "rows of 656 bytes, fp16", (1, 2), (230, 70), q_dtype="float16", **_V32, **_96_LISTED),
    latent_case(
        "v32-turns",
        "rows of 656 bytes, fp16, a list of one unit of few rows",
        (1, 1),
        (230, 400),
        q_dtype="float16",
        **_V32,
        **_40_LISTED,
    ),
    latent_case(
        "edges",
        "lists of no token and of one, units that follow each other, fp32 outputs",
        _ONES,
        _EDGES,
        q_dtype="float16",
        o_dtype="float32",
        **_V32,
        **_96_LISTED,
    ),
    latent_case("edges-turns", "the same in units of few rows", _ONES, _EDGES, q_dtype="float16", **_V32, **_40_LISTED),
    latent_case(
        "tokens-fp16", "scales of tokens, two row tiles", (2,), (170,), row_format="tokens", **_ROWS_64, **_MISTRAL
    ),
]
WIDE_CASES = [
    latent_case(
        "rows-edges", "blocks, and units that follow each other", _ONES, _EDGES, page_size=1, sinks=True, **_ROWS_64
    ),
    latent_case(
        "rows-mtp", "single rows, causal, two row tiles", (2, 1), (64, 129), page_size=1, causal=True, **_ROWS_64
    ),
    latent_case(
        "rising", "maxima that rise", (1, 1), (100, 450), page_size=1, cache="gapped", sm_scale=4.0, **_ROWS_64
    ),
    latent_case("page-1", "single rows", (1, 1, 1), (70, 129, 2), page_size=1, **_ROWS_64),
    latent_case("page-3", "single rows, causal", (1, 2), (70, 129), page_size=3, causal=True, num_q_heads=40),
    latent_case("v4-edges", "rows of 584 bytes converted by pairs", _ONES, _EDGES, **_V4, **_96_LISTED),
    latent_case("v4-edges-1", "converted by one CTA", _ONES, _EDGES, **_V4, **_40_LISTED),
    latent_case("v4-pages", "pages, causal", (2, 1), (64, 129), causal=True, page_size=64, **_V4, **_ROWS_64),
    latent_case("v4-two", "lists of two caches", _ONES, _EDGES, second_page=2, **_V4, **_96_LISTED),
    latent_case(
        "v4-two-1",
        "of known lengths, fp16",
        (1, 1, 1),
        (230, 30, 400),
        second_page=16,
        q_dtype="float16",
        **_V4,
        **_40_LISTED | {"selected": "lengths"},
    ),
    latent_case("rows-fp32", "fp32 outputs", (1,), (170,), o_dtype="float32", page_size=1, **_ROWS_64),
    latent_case("selected-two", "known lengths", (1, 2), (140, 70), selected="lengths", sinks=True, num_q_heads=96),
    latent_case(
        "rows-256-64",
        "fp16",
        (1,),
        (290,),
        head_dim=320,
        head_dim_vo=256,
        page_size=1,
        q_dtype="float16",
        num_q_heads=40,
    ),
    latent_case(
        "rows-512-0",
        "rows without a tail, a negative scale",
        (1,),
        (190,),
        head_dim=512,
        page_size=1,
        sm_scale=-0.1,
        **_ROWS_64,
    ),
    latent_case("lists", "lists with gaps", (1, 1), (300, 129), selected="padded", sinks=True, num_q_heads=40),
    latent_case("single", "units of one CTA", _ONES, _EDGES, page_size=64, sinks=True, **_ROWS_64),
    latent_case("mtp-1", "one CTA, causal", (2, 1), (300, 129), page_size=32, causal=True, num_q_heads=20),
    latent_case("equal", "row tiles side by side, Q by boxes", (2, 2), (130, 60), causal=True, num_q_heads=128),
    latent_case("fp32", "fp32 outputs", (1,), (170,), o_dtype="float32", **_ROWS_96),
    latent_case("rows-2", "Q by boxes of two rows", (5, 3), (70, 129), causal=True, num_q_heads=32),
    latent_case("edges", "blocks of one unit, and units that follow each other", _ONES, _EDGES, sinks=True, **_ROWS_96),
    latent_case("mtp", "page 16: four boxes, causal", (2, 1), (64, 129), page_size=16, causal=True, num_q_heads=40),
    latent_case(
        "page-64", "maxima that rise", (1, 1), (100, 450), page_size=64, cache="gapped", sm_scale=4.0, **_ROWS_96
    ),
    latent_case("256-64", "fp16", (1,), (290,), head_dim=320, head_dim_vo=256, q_dtype="float16", num_q_heads=80),
    latent_case(
        "512-0", "rows without a tail, a negative scale", (1,), (190,), head_dim=512, sm_scale=-0.1, **_ROWS_96
    ),
]
ROWS = [*((TRANSPOSED, case) for case in TRANSPOSED_CASES), *((WIDE, case) for case in WIDE_CASES)]
ROWS += [*((BY_COLUMNS, case) for case in COLUMNS_CASES), *((IN_E4M3, case) for case in E4M3_CASES)]
RARE = {
    "latent-512-0",
    "latent-rows-512-0",
    "latent-rows-256-64",
    "latent-256-64",
    "latent-128-48",
}  # builds for sizes of rows, whose paths others take too
WITH_NEIGHBOURS = {"latent-v32-40", "latent-few-v32", "latent-few-mtp", "latent-rows-2"}
assert {case.name for _, case in ROWS} >= RARE | WITH_NEIGHBOURS
by_rows = pytest.mark.parametrize(
    ("kernel", "case"),
    [pytest.param(*row, marks=pytest.mark.rare if row[1].name in RARE else ()) for row in ROWS],
    ids=lambda value: getattr(value, "name", None),
)


def compare(kernel: AttentionKernel, case: Case, cut: int) -> None:
    inputs = make_inputs(case)
    out, lse, left = run(kernel, case, inputs, cut)
    assert left == 0
    begin = 0
    for state in reference_states(inputs):
        rows = slice(begin, begin + len(state.out))
        begin = rows.stop
        allowed = limits(case, state)  # without e4m3_scores: on the host sums of products are fp32
        error = (out[rows].double() - state.out).abs()
        assert (error <= allowed.element).all()
        assert (error.norm(dim=-1) <= allowed.row).all()
        assert case.out_type != "float32" or not has_16_bits(out[rows].double(), state.out).any()
        assert ((lse[rows] == state.lse) | ((lse[rows] - state.lse).abs() <= allowed.lse)).all()


@pytest.mark.parametrize("cut", [0, 48])
@by_rows
def test_the_kernel_on_the_host(kernel: AttentionKernel, case: Case, cut: int) -> None:
    compare(kernel, case, cut)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.rare) for seed in (2, 3))])
@by_rows
def test_warps_may_sleep(kernel: AttentionKernel, case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warp counts on others being as fast: one that misses a phase of a barrier waits for ever."""
    monkeypatch.setenv("FLASHPAGE_HOST_SEED", str(seed))
    compare(kernel, case, 48)


def test_values_may_be_late_at_the_end_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this seed a warpgroup of values of a pair sleeps there, while scores go on by two blocks."""
    monkeypatch.setenv("FLASHPAGE_HOST_SEED", "3")
    compare(WIDE, next(case for kernel, case in ROWS if kernel is WIDE and case.name == "latent-edges"), 48)


@pytest.mark.parametrize(
    ("kernel", "case"),
    [row for row in ROWS if len(row[1].q_lens) > 1 and row[1].name in WITH_NEIGHBOURS],
    ids=lambda value: value.name,
)
def test_bits_do_not_depend_on_queries_of_the_next_request(kernel: AttentionKernel, case: Case) -> None:
    """Boxes of q bring them into the same tile."""
    inputs = make_inputs(case)
    large = dataclasses.replace(inputs, q=[inputs.q[0], *(q * 40 for q in inputs.q[1:])])
    (out, lse, _), (found, found_lse, _) = run(kernel, case, inputs, 0), run(kernel, case, large, 0)
    own = len(inputs.q[0])
    assert not torch.equal(out, found)
    assert torch.equal(out[:own], found[:own]) and torch.equal(lse[:own], found_lse[:own])


@pytest.mark.parametrize(("kernel", "heads", "page_size"), [(WIDE, 64, 1), (WIDE, 64, 64), (WIDE, 128, 64)])
def test_large_weights_are_exact(kernel: AttentionKernel, heads: int, page_size: int) -> None:
    """A row's largest weight is 1 as a factor of its values, so that little but the output's rounding is left. With
    maxima that move by 2^8 alone the error is 2.2e-3."""
    case = latent_case("large", "few tokens have most of the sum", (1,), (500,), num_q_heads=heads, page_size=page_size)
    inputs = make_inputs(case)
    out, _, _ = run(kernel, case, inputs, 0)
    expected = torch.cat([state.out for state in reference_states(inputs)])
    assert (out.double() - expected).norm() <= 2.0e-3 * expected.norm()


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16"])
def test_scales_of_tokens_that_are_not_listed_may_hold_anything(q_dtype: str) -> None:
    """Where a block has no token, the kernel reads the scales of the cache's first token, times zeros."""
    form = _V4 | _LISTED | {"num_q_heads": 40, "q_dtype": q_dtype, "selected": "lengths", "second_page": 16}
    case = latent_case("unlisted", "lists shorter than a block", (1,), (30,), **form)
    inputs = make_inputs(case)
    pages = inputs.cache.buffers[0]
    pages = torch.cat([torch.full_like(pages[:1], 255), pages])
    cache = dataclasses.replace(inputs.cache, buffers=(pages, *inputs.cache.buffers[1:]))
    moved = dataclasses.replace(inputs, cache=cache, indices=inputs.indices + 1)
    expected, (out, _, left) = reference_states(inputs)[0], run(WIDE, case, moved, 0)
    assert left == 0 and ((out.double() - expected.out).abs() <= limits(case, expected).element).all()


@pytest.mark.parametrize("form", [_LISTED | {"num_q_heads": 40}, _ROWS_64 | {"page_size": 1}], ids=["list", "page-1"])
def test_single_rows_may_lie_far_apart(form: dict[str, Any], tmp_path: Path) -> None:
    """Offsets of rows may exceed 32 bits, and also 32 bits of 16 bytes each."""
    case = latent_case("far", "all pages but the first beyond 64 GiB", (1,), (130,), cache="interleaved", **form)
    inputs = make_inputs(case)
    near = inputs.cache.buffers[0]
    shift = 2**36 // near[0].nbytes
    size = (shift + len(near)) * near[0].numel()
    sparse = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=near.dtype)
    far = sparse.view(-1, *near.shape[1:])
    far[0], far[shift + 1 :] = near[0], near[1:]
    indices = torch.where(inputs.indices > 0, inputs.indices + shift, 0)
    moved = dataclasses.replace(inputs, cache=dataclasses.replace(inputs.cache, buffers=(far,)), indices=indices)
    (out, lse, left), expected = run(WIDE, case, moved, 0), run(WIDE, case, inputs, 0)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and left == 0


@pytest.mark.parametrize(
    ("form", "by_heads"),
    [
        ({}, {16: TRANSPOSED, 40: WIDE, 128: WIDE}),
        ({"page_size": 1}, {32: TRANSPOSED, 40: WIDE, 128: WIDE}),
        ({"selected": "padded"}, {32: TRANSPOSED, 40: WIDE, 128: WIDE}),
        ({"row_format": "deepseek_v32"}, {16: IN_E4M3, 32: IN_E4M3, 128: IN_E4M3}),
        ({"row_format": "deepseek_v32", "q_dtype": "float16"}, {32: TRANSPOSED, 64: BY_COLUMNS, 128: BY_COLUMNS}),
        (_V4 | {"selected": "padded"}, {32: TRANSPOSED, 64: WIDE, 128: WIDE}),
        (_V4 | {"selected": "padded", "second_page": 64}, {32: TRANSPOSED, 64: WIDE, 128: WIDE}),
    ],
)
def test_the_kernel_of_a_form(form: dict[str, Any], by_heads: dict[int, AttentionKernel]) -> None:
    """As the table of docs/latent_sm90.md has it."""
    for heads, kernel in by_heads.items():
        case = latent_case("form", "a row of the table", (1,), (1,), **({"num_q_heads": heads, "page_size": 64} | form))
        assert choose_for_card(Problem(latent_rows.options_of(case), heads), devices.H200).kernel is kernel


@pytest.mark.parametrize("kernel", [IN_E4M3, BY_COLUMNS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("contexts", list(ContextClass))
def test_contexts_do_not_change_the_tile_over_rows_in_fp8(kernel: AttentionKernel, contexts: ContextClass) -> None:
    """Engines build the kernels of all classes of contexts when they start."""
    q_dtype = "bfloat16" if kernel is IN_E4M3 else "float16"
    case = latent_case(
        "contexts",
        "boxes",
        (1,),
        (1,),
        num_q_heads=64,
        page_size=64,
        row_format="tensors",
        q_dtype=q_dtype,
        kv_dtype="float8_e4m3fn",
    )
    problem = Problem(latent_rows.options_of(case), 64)
    usual, chosen = (
        choose_for_card(dataclasses.replace(problem, contexts=found), devices.H200).spec
        for found in (ContextClass.USUAL, contexts)
    )
    assert usual.kernel == kernel.name and chosen.tile == usual.tile


@pytest.mark.parametrize(
    ("kernel", "rows", "form"),
    [
        (TRANSPOSED, 32, {}),
        (WIDE, 128, {}),
        (WIDE, 64, {}),
        (WIDE, 64, {"page_size": 1}),
        (WIDE, 64, {"selected": "padded"}),
        (IN_E4M3, 64, {"selected": "padded", "row_format": "deepseek_v32"}),
        (IN_E4M3, 16, {"selected": "padded", "row_format": "deepseek_v32"}),
        (IN_E4M3, 32, {"selected": "padded", "row_format": "deepseek_v32"}),
        (BY_COLUMNS, 64, {"selected": "padded", "row_format": "deepseek_v32", "q_dtype": "float16"}),
        (BY_COLUMNS, 128, {"row_format": "deepseek_v32", "q_dtype": "float16"}),
        (TRANSPOSED, 32, {"selected": "padded", "second_page": 64, "o_dtype": "float32", **_V4}),
        (WIDE, 64, {"selected": "padded", "second_page": 64, **_V4}),
        (WIDE, 128, {"selected": "padded", "second_page": 64, "o_dtype": "float32", **_V4}),
    ],
)
def test_ci_looks_at_the_machine_code(kernel: AttentionKernel, rows: int, form: dict[str, Any]) -> None:
    """`python -m aot.build --check` fails where registers spill and where ptxas serialises products."""
    case = latent_case("machine code", "DeepSeek's rows", (1,), (1,), num_q_heads=rows, **({"page_size": 64} | form))
    target = Target("cuda", 90)
    assert (spec_of(kernel, case), target) in aot_build.checked([target.name])
