"""The kernel that transposes V in e4m3, on the host, and the plans and bindings of prefills that read its copy.

test_prefill_kernel.py has the attention kernel that reads it.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.case import Case, prefill
from harness import Runner
from inputs import make_inputs
from native_build import shared_library, traits_flags

import flashpage
from flashpage.kernels import devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.work import Problem
from flashpage.plan import gather_rows, value_columns
from flashpage.run.bound_part import BoundPart

pytestmark = pytest.mark.usefixtures("quick_kernels")

Q8: dict[str, Any] = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "num_kv_heads": 2, "causal": True}
TWO: tuple[tuple[int, ...], tuple[int, ...]] = (70, 90), (71, 120)
CASES = [
    prefill("columns-pages", "pages of 16", *TWO, num_q_heads=4, head_dim=128, **Q8),
    prefill("columns-page-64", "HND", *TWO, num_q_heads=4, head_dim=64, page_size=64, kv_layout="HND", **Q8),
    prefill("columns-gapped", "NaN between tokens", *TWO, num_q_heads=4, head_dim=128, cache="gapped", **Q8),
    prefill("columns-ragged", "not a multiple of 16 tokens", *TWO, num_q_heads=4, head_dim=128, entry="ragged", **Q8),
    prefill("columns-fused", "one tensor", *TWO, num_q_heads=4, head_dim=96, cache="fused", **Q8),
]
# The order of sixteen tokens, and of sixteen columns (include/flashpage/tile/load/transposed_values.h).
TOKENS = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
COLUMNS = [*range(0, 16, 2), *range(1, 16, 2)]


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_rows, "runs_on", lambda _: True)
    monkeypatch.setattr(value_columns, "LEAST_ROWS", 8)
    monkeypatch.setattr(value_columns, "LEAST_VISIBLE", 8)


def transpose(bound: Any, options: Any) -> None:
    """Does the work of the launch before attention."""
    flags = traits_flags(value_columns.spec_of(options))
    library = ctypes.CDLL(str(shared_library("value_columns.cpp", first_include="hopper", flags=flags)))
    library.value_columns(ctypes.byref(bound.gather))


def order(count: int, of_sixteen: list[int]) -> torch.Tensor:
    return torch.arange(count) // 16 * 16 + torch.tensor(of_sixteen).repeat(count // 16)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_v_lies_by_columns(as_on_hopper: None, case: Case) -> None:
    runner = Runner(make_inputs(case), "cpu", flashpage)
    wrapper = runner.planned()
    plan = wrapper._planner.active[0]
    copy, options = plan.gathered, plan.options
    assert isinstance(copy, value_columns.Columns) and value_columns.NOTE in wrapper.last_plan.notes
    q, kv = runner.q(), runner.kv()
    wrapper.run(q, *kv)  # the CPU's kernel does not know copies by columns, but binds them
    bound = wrapper._attention._local.bound
    transpose(bound, options)
    view = copy.views(options)["V"]
    heads, dim, positions = options.num_kv_heads, options.head_dim_vo, view.head_dim
    memory = (ctypes.c_uint8 * (heads * dim * positions)).from_address(copy.v)
    found = torch.frombuffer(memory, dtype=torch.uint8).view(heads, dim, positions)
    found = found[:, :, order(positions, TOKENS).argsort()][:, order(dim, COLUMNS).argsort()]
    begin = 0
    for request, v in enumerate(runner.inputs.v):
        first = int(runner.inputs.indptr[request]) * max(1, options.page_size)
        wanted = v.view(torch.uint8).permute(1, 2, 0)
        assert (found[:, :, first : first + len(v)] == wanted).all()
        begin = first + len(v)
    assert begin <= positions


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
def test_boxes_of_columns(as_on_hopper: None, case: Case) -> None:
    """V's tensor map has the copy's form, K's that of the cache, for lengths of any plan."""
    runner = Runner(make_inputs(case), "cpu", flashpage)
    wrapper = runner.planned()
    q, kv = runner.q(), runner.kv()
    wrapper.run(q, *kv)
    bound, plan = wrapper._attention._local.bound, wrapper._planner.active[0]
    read = value_columns.as_columns(plan.options)
    choice = choose_for_card(Problem(read, 4096), devices.H200)
    prepared = SimpleNamespace(choice=choice, attention_options=read, schedule=SimpleNamespace(tile_q=128))
    part = BoundPart(plan.options)
    part.bind_boxes(prepared, bound.views)
    bound.parts[0].boxes = part.boxes
    bound.resize(q, kv if case.entry == "ragged" else kv[0])
    boxes, positions = part.boxes, bound.views["V"].head_dim
    assert boxes is not None and (choice.spec.kernel, choice.spec.loader) == ("prefill_sm90", "columns")
    assert tuple(boxes.v.box) == (128, 64, 1, 1)
    assert tuple(boxes.v.dims) == (positions, 128, 2, 1)
    assert tuple(boxes.v.strides)[:2] == (positions, 128 * positions)
    k = kv[0] if case.entry == "ragged" else kv[0][0]
    assert tuple(boxes.k.dims) == ((128, len(k), 2, 1) if case.entry == "ragged" else (128, 16, 2, len(k)))
    assert bound.params.v.data == plan.gathered.v and bound.params.k.data == k.data_ptr()
    v = kv[1] if case.entry == "ragged" else kv[0][1]
    assert bound.gather.v.data == v.data_ptr()
