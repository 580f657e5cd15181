"""The kernel that widens pages of K and V in formats, on the host, and the prefills that read its pages.

Where a card would launch it before attention, these tests call it on the CPU between two runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import format_rows
import pytest
import torch
from caches import poison
from cases.case import Case, prefill
from comparison import Outputs, compare
from harness import Runner
from inputs import make_inputs, reference_states
from native_build import shared_library, traits_flags

import flashpage
from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.base.errors import CompileError, KernelMissingError
from flashpage.kernels import devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.kv_formats import FORMATS
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem
from flashpage.plan import gather_rows, option_plan, widened_pages
from flashpage.plan.prepared_kernels import PreparedKernels
from flashpage.run.binding import Binding
from flashpage.run.bound_part import BoundPart

pytestmark = pytest.mark.usefixtures("quick_kernels")

BATCH: dict[str, Any] = {"q_lens": (70, 90), "kv_lens": (71, 130), "num_q_heads": 4, "num_kv_heads": 2, "causal": True}
CASES = [
    prefill("widen-nvfp4", "scales of column groups", kv_format="nvfp4", head_dim=128, scales="float", **BATCH),
    prefill("widen-nvfp4-fp16", "fp16", kv_format="nvfp4", kv_layout="HND", q_dtype="float16", **BATCH),
    prefill("widen-nvfp4-dims", "two head dims", kv_format="nvfp4", head_dim=192, head_dim_vo=128, **BATCH),
    prefill("widen-nvfp4-fused", "one tensor", kv_format="nvfp4", cache="fused", head_dim=128, page_size=64, **BATCH),
    prefill("widen-int8", "scales of tokens", kv_format="int8_token", page_size=5, **BATCH),
    prefill("widen-e4m3", "scales of tokens", kv_format="e4m3_token", page_size=1, **BATCH),
    prefill("widen-int4", "zero points", kv_format="int4_token", **BATCH),
    prefill("widen-rotated", "rotated keys", kv_format="int4_token_rotated", **BATCH),
    prefill("widen-pair", "K and V differ", kv_format="float8_e4m3fn+nvfp4", **BATCH),
    prefill("widen-fp8", "no scales", kv_dtype="float8_e4m3fn", scales="float", head_dim=128, **BATCH),
    prefill("widen-e5m2", "no scales", kv_dtype="float8_e5m2", q_dtype="float16", kv_layout="HND", **BATCH),
    prefill("widen-plain", "K is not widened", kv_format="bfloat16+nvfp4", **BATCH),
]
CASES += [
    prefill(f"widen-{name}", "a format that no row above has", kv_format=name, **BATCH)
    for name in sorted(FORMATS.keys() - {case.kv_format for case in CASES})
]


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_rows, "runs_on", lambda _: True)
    monkeypatch.setattr(widened_pages, "LEAST_ROWS", 64)
    monkeypatch.setattr(widened_pages, "LEAST_ROWS_OF_FP8", 64)


def widen(wrapper: Any) -> None:
    """Does the work of the launch before attention."""
    options = wrapper.last_plan.options
    flags = traits_flags(widened_pages.spec_of(options))
    library = ctypes.CDLL(str(shared_library("widen_pages.cpp", first_include="hopper", flags=flags)))
    library.widen_pages(ctypes.byref(wrapper._attention._local.bound.gather))


def test_rows_with_scales_of_tokens_stay_narrow_under_fp16(as_on_hopper: None) -> None:
    """A number times such a scale may be none of fp16, before the scale of the run."""
    for name in ("int8_token", "e4m3_token", "int4_token"):
        for q_dtype in ("float16", "bfloat16"):
            case = prefill("widen-range", "", kv_format=name, q_dtype=q_dtype, **BATCH)
            wrapper, runner = planned(case)
            assert (wrapper._planner.active[0].gathered is None) == (q_dtype == "float16")
    q, kv, scales = runner.q().half(), runner.kv(), [2.0**20 * scale for scale in runner.kv_cache_sf()["kv_cache_sf"]]
    case = dataclasses.replace(case, q_dtype="float16")
    wrapper = planned(case)[0]
    given = {"kv_cache_sf": tuple(scales), "k_scale": 2.0**-20, "v_scale": 2.0**-20}
    torch.testing.assert_close(wrapper.run(q, *kv, **given), wrapper.run(q, *kv, **runner.kv_cache_sf()))


def planned(case: Case, workspace_bytes: int = 16 << 20) -> tuple[Any, Runner]:
    workspace = poison(torch.empty(workspace_bytes, dtype=torch.uint8))
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace, case.kv_layout)
    runner = Runner(make_inputs(case), "cpu", flashpage)
    plan(wrapper, runner)
    return wrapper, runner


def plan(wrapper: Any, runner: Runner) -> None:
    inputs, case = runner.inputs, runner.inputs.case
    lists = (inputs.qo_indptr, inputs.indptr, inputs.indices, inputs.last_page_len)
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    values = {"head_dim_vo": case.value_dim, "causal": True, "q_data_type": getattr(torch, case.q_dtype)}
    stored = format_rows.plan_arguments(case) if case.kv_format else {"kv_data_type": getattr(torch, case.kv_type)}
    wrapper.plan(*lists, *heads, **values | stored)


def check_in_place(wrapper: Any, runner: Runner) -> None:
    """That a run without wider pages is right."""
    assert wrapper._planner.active[0].gathered is None and widened_pages.NOTE not in wrapper.last_plan.notes
    scales = runner.kv_cache_sf() | runner.inputs.scales
    out = wrapper.run(runner.q(), *runner.kv(), **scales, return_lse=True)
    compare(dataclasses.replace(runner.inputs.case, outputs="returned"), Outputs(*out), reference_states(runner.inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prefills_read_what_was_widened(as_on_hopper: None, case: Case) -> None:
    wrapper, runner = planned(case)
    inputs = runner.inputs
    pages = wrapper._planner.active[0].gathered
    assert isinstance(pages, widened_pages.Pages) and widened_pages.NOTE in wrapper.last_plan.notes
    spec = wrapper._planner.active[0].prepared.choice.spec
    assert spec.kv_dtype is spec.q_dtype and not spec.has_formats
    given = runner.kv_cache_sf() | inputs.scales
    run = lambda: wrapper.run(runner.q(), *runner.kv(), **given, return_lse=True)
    assert run()[0].isnan().any(), "nothing was widened yet"
    widen(wrapper)
    compare(dataclasses.replace(case, outputs="returned"), Outputs(*run()), reference_states(inputs))


def test_other_batches_are_read_in_place(as_on_hopper: None) -> None:
    """Batches of few rows, in fp32, and without room for wider pages."""
    few = dataclasses.replace(CASES[0], q_lens=(5, 9))
    wide = dataclasses.replace(CASES[0], q_dtype="float32")
    for case, workspace_bytes in ((few, 16 << 20), (wide, 16 << 20), (CASES[0], 200_000)):
        check_in_place(*planned(case, workspace_bytes))


def fail_with(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Makes the kernels of wider pages fail. Returns the options for which they were requested."""
    make, requested = option_plan.prepare, []

    def prepare(options: Options, *arguments: Any) -> PreparedKernels:
        *_, gathers = arguments
        if not gathers:
            return make(options, *arguments)
        requested.append(options)
        raise error

    monkeypatch.setattr(option_plan, "prepare", prepare)
    return requested


FP8 = next(case for case in CASES if case.name == "widen-fp8")


@pytest.mark.parametrize("error", [KeyboardInterrupt, CompileError])
def test_a_plan_that_fails_leaves_no_pages(
    as_on_hopper: None, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the kernels of wider pages are compiled. The plan before had none, and its kernels fit the one after."""
    wrapper, few = planned(dataclasses.replace(FP8, q_lens=(5, 9)))
    _, many = planned(FP8)
    fail_with(error, monkeypatch)
    with pytest.raises(error):
        plan(wrapper, many)
    plan(wrapper, few)
    check_in_place(wrapper, few)


def test_without_their_kernels_pages_are_read_in_place(as_on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler may have kernels for that alone. The others are requested once for each set of
    options."""
    requested = fail_with(KernelMissingError, monkeypatch)
    wrapper, runner = planned(FP8)
    other = planned(dataclasses.replace(FP8, q_lens=(100, 40), kv_lens=(110, 90)))[1]
    assert len(requested) == 2
    for one in (other, runner, other):
        plan(wrapper, one)
        check_in_place(wrapper, one)
    assert len(requested) == 2
    for _ in range(2):
        plan(wrapper, runner)
        wrapper.run(runner.q(), *runner.kv(), window_left=60)
    assert len(requested) == 3


def test_layers_whose_scales_lie_elsewhere(as_on_hopper: None) -> None:
    """Later runs point the kernel to their own caches and scales, by the call that C serves and by the other; a cache
    of more pages has the form of a smaller one."""
    wrapper, runner = planned(CASES[0])
    given = runner.kv()[0], runner.kv_cache_sf()["kv_cache_sf"]
    for count in (1, 1, 3, 1):
        cache, scales = (tuple(torch.cat([half] * count) for half in halves) for halves in given)
        wrapper.run(runner.q(), cache, kv_cache_sf=scales)
        gather = wrapper._attention._local.bound.gather
        found = (gather.k.data, gather.v.data, gather.key_scales.data, gather.value_scales.data)
        assert found == tuple(half.data_ptr() for half in (*cache, *scales))
        assert gather.num_pages == len(cache[0])


@pytest.mark.parametrize("page", [16, 64])
def test_boxes_have_all_pages(page: int) -> None:
    """Also those of a later plan, whose binding only resizes its tensor maps."""
    bf16, stored = DType.BFLOAT16, DType.BYTES
    options = Options("paged", 32, 8, 128, 128, page, bf16, stored, bf16, k_format="nvfp4", v_format="nvfp4")
    read = gather_rows.as_rows(options)
    choice = choose_for_card(Problem(read, 4096), devices.H200)
    prepared: Any = SimpleNamespace(choice=choice, attention_options=read, schedule=SimpleNamespace(tile_q=128))
    part = BoundPart(options)
    option_plan = SimpleNamespace(options=options)
    binding: Any = SimpleNamespace(
        parts=[part],
        option_plan=option_plan,
        kv_layout="NHD",
        cache_views=dict.fromkeys("KV"),
        gather=native.WidenPagesParams(),
    )
    binding._resize = functools.partial(Binding._resize, binding)
    for tokens in (1024, 16384):
        pages = tokens // page
        binding.gathered = widened_pages.Pages.below(1 << 34, 0, pages, options)
        binding.views = binding.gathered.views(options)
        part.use_boxes(prepared, binding.views, binding.gathered)
        Binding.resize(binding, torch.empty(tokens, 32, 128), torch.empty(pages, 0))
        assert binding.gather.num_pages == pages
        assert list(part.boxes.k.dims) == list(part.boxes.v.dims) == [128, page, 8, pages]
