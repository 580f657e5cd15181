"""The kernel that rotates q and K (RoPE), on the host, and the prefills that read its copies.

Where a card would launch it before attention, these tests call it on the CPU between two runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import cases.rotated
import pytest
import torch
from cases.case import Case, prefill
from comparison import Outputs, compare
from harness import Runner
from inputs import make_inputs, reference_states
from native_build import shared_library, traits_flags

import flashpage
from flashpage.base.dtypes import DType
from flashpage.kernels import devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem
from flashpage.plan import gather_rows, rotated_pages
from flashpage.run.bound_part import BoundPart

pytestmark = pytest.mark.usefixtures("quick_kernels")

ROPE: dict[str, Any] = {"position": "ROPE_LLAMA", "num_q_heads": 4, "num_kv_heads": 2, "causal": True}
TWO: tuple[tuple[int, ...], tuple[int, ...]] = (70, 90), (71, 130)
WIDE: dict[str, Any] = {**ROPE, "head_dim": 128}
CASES = [
    prefill("rotate-pages", "pages of 16", *TWO, **WIDE),
    prefill("rotate-page-5", "HND, pages that end inside a job", *TWO, page_size=5, kv_layout="HND", **ROPE),
    prefill("rotate-page-1", "pages of one token become rows", *TWO, page_size=1, **ROPE),
    prefill("rotate-fused", "one tensor", *TWO, cache="fused", page_size=1, **ROPE),
    prefill("rotate-gapped", "NaN between tokens and pages", *TWO, cache="gapped", **ROPE),
    prefill("rotate-ragged", "V is read where it is", *TWO, entry="ragged", **WIDE),
    prefill("rotate-ragged-hnd", "heads outside of tokens", *TWO, entry="ragged", kv_layout="HND", **ROPE),
    prefill("rotate-strides", "q is a slice of a QKV row", *TWO, q_strides="fused_qkv", **ROPE),
    prefill("rotate-float16", "fp16", *TWO, q_dtype="float16", rope_scale=4.0, rope_theta=5e5, **ROPE),
    prefill("rotate-192-128", "more of K", *TWO, head_dim=192, head_dim_vo=128, **ROPE),
    prefill("rotate-64-128", "more of V", *TWO, head_dim_vo=128, **ROPE),
    prefill("rotate-dim-80", "ten vectors", *TWO, head_dim=80, **ROPE),
    prefill("rotate-many-heads", "two jobs of heads", *TWO, **{**ROPE, "num_q_heads": 27, "num_kv_heads": 9}),
    prefill("rotate-one-head", "strides of one head", *TWO, **{**ROPE, "num_q_heads": 1, "num_kv_heads": 1}),
    prefill("rotate-more-rows", "rows before the first token", (150, 60), (60, 90), **{**ROPE, "causal": False}),
    prefill("rotate-unseen", "tiles of rows that see nothing", (400, 60), (60, 90), **ROPE),
    prefill("rotate-chunk", "positions in the request", *TWO, chunk=50, **ROPE),
    prefill("rotate-empty", "requests without rows or tokens", (90, 0, 70, 0), (95, 9, 80, 0), **ROPE),
    prefill("rotate-window", "hidden NaN", (70,), (300,), window_left=90, hidden_nan=True, **ROPE),
    prefill("rotate-cap", "soft cap", *TWO, soft_cap=5.0, **ROPE),
    prefill("rotate-sinks", "sinks", *TWO, sinks=True, **ROPE),
    prefill("rotate-many", "more items than threads of a CTA", (24,) * 300, (25,) * 300, **ROPE),
]


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_rows, "runs_on", lambda _: True)
    monkeypatch.setattr(rotated_pages, "LEAST_ROWS", 8)
    monkeypatch.setattr(rotated_pages, "LEAST_VISIBLE", 8)


def rotate(wrapper: Any) -> None:
    """Does the work of the launch before attention."""
    flags = traits_flags(rotated_pages.spec_of(wrapper.last_plan.options))
    library = ctypes.CDLL(str(shared_library("rotate_pages.cpp", first_include="hopper", flags=flags)))
    library.rotate_pages(ctypes.byref(wrapper._attention._local.bound.gather))


class Kept(Runner):
    """A case whose runs all have the same tensors, which the launch between two runs reads."""

    def __init__(self, case: Case) -> None:
        super().__init__(make_inputs(case), "cpu", flashpage)
        self._q, self._kv = super().q(), super().kv()

    def q(self) -> torch.Tensor:
        return self._q

    def kv(self) -> tuple[Any, ...]:
        return self._kv


def planned(case: Case) -> tuple[Any, Runner]:
    runner = Kept(case)
    return runner.planned(), runner


def copy_of(wrapper: Any) -> rotated_pages.RotatedPages | None:
    found: rotated_pages.RotatedPages | None = wrapper._planner.active[0].gathered
    return found


def run(wrapper: Any, runner: Runner) -> tuple[torch.Tensor, torch.Tensor]:
    sinks = {} if runner.inputs.sinks is None else {"sinks": runner.inputs.sinks}
    found: tuple[torch.Tensor, torch.Tensor] = wrapper.run(runner.q(), *runner.kv(), return_lse=True, **sinks)
    return found


def check(found: tuple[torch.Tensor, torch.Tensor], runner: Runner) -> None:
    case = dataclasses.replace(runner.case, outputs="returned")
    compare(case, Outputs(*found), reference_states(runner.inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prefills_read_what_was_rotated(as_on_hopper: None, case: Case) -> None:
    wrapper, runner = planned(case)
    assert isinstance(copy_of(wrapper), rotated_pages.RotatedPages) and rotated_pages.NOTE in wrapper.last_plan.notes
    spec = wrapper._planner.active[0].prepared.choice.spec
    is_paged = case.entry != "ragged" and case.page_size > 1
    assert (spec.position_encoding, spec.kv_source) == ("none", "paged" if is_paged else "ragged")
    assert wrapper.last_plan.options.position_encoding == "ROPE_LLAMA"
    assert run(wrapper, runner)[0].isnan().any(), "nothing was rotated yet"
    rotate(wrapper)
    for _ in range(2):  # the second run's tensors have the form of the first run's
        check(run(wrapper, runner), runner)


@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=lambda case: case.name)
def test_each_layers_tensors_are_rotated(as_on_hopper: None, case: Case) -> None:
    """Later runs point the kernel to their own q and caches, by the call that C serves and by the other."""
    wrapper, runner = planned(case)
    is_ragged = case.entry == "ragged"
    q, kv = runner.q(), runner.kv() if is_ragged else runner.kv()[0]
    for step in range(4):
        if step != 2:  # a run whose tensors alone are new
            q, kv = q.clone(), tuple(half.clone() for half in kv)
        wrapper.run(q, *kv) if is_ragged else wrapper.run(q, kv)
        bound = wrapper._attention._local.bound
        copy, v = copy_of(wrapper), bound.params.v if is_ragged else bound.gather.v
        assert copy is not None
        assert (bound.gather.q, bound.gather.k.data, v.data) == (q.data_ptr(), *(half.data_ptr() for half in kv))
        assert (bound.params.q, bound.params.k.data) == (copy.q, copy.k)


def test_a_larger_cache(as_on_hopper: None) -> None:
    """A cache of more pages has the form of a smaller one; the kernel takes its page numbers as well."""
    wrapper, runner = planned(CASES[0])
    cache = runner.kv()[0]
    for count in (1, 3, 1):
        larger = tuple(torch.cat([half] * count) for half in cache)
        wrapper.run(runner.q(), larger)
        assert wrapper._attention._local.bound.gather.num_pages == len(larger[0])
    assert len(wrapper._attention._local.bindings) == 1


def test_plans_in_turns(as_on_hopper: None) -> None:
    """Batches that are rotated before and one that is not, over the same bound tensors: q, page numbers and strides."""
    case = dataclasses.replace(CASES[0], q_strides="fused_qkv")
    wrapper, runner = planned(case)
    few = Kept(dataclasses.replace(case, q_lens=(3, 4, 153), kv_lens=(3000, 40, 153)))
    for _ in range(2):
        for one, is_rotated in ((runner, True), (few, False)):
            inputs = one.inputs
            pages = (inputs.qo_indptr, inputs.indptr, inputs.indices, inputs.last_page_len)
            options = {"causal": True, "pos_encoding_mode": "ROPE_LLAMA", "q_data_type": torch.bfloat16}
            with pytest.MonkeyPatch.context() as patch:
                if not is_rotated:
                    patch.setattr(gather_rows, "runs_on", lambda _: False)
                wrapper.plan(*pages, 4, 2, 128, 16, **options)
            assert (copy_of(wrapper) is not None) == is_rotated
            run(wrapper, one)
            if is_rotated:
                rotate(wrapper)
            check(run(wrapper, one), one)
    assert len(wrapper._attention._local.bindings) == 1


def test_lengths_that_leave_pages_unused(as_on_hopper: None) -> None:
    """Numbers after those of a request's tokens are not used."""
    wrapper, runner = planned(CASES[0])
    inputs, entries = runner.inputs, 12
    indptr = torch.arange(3, dtype=torch.int32) * entries
    indices = torch.zeros(2 * entries, dtype=torch.int32)
    for i in range(2):
        its = inputs.indices[inputs.indptr[i] : inputs.indptr[i + 1]]
        indices[i * entries :][: len(its)] = its
    options = {"causal": True, "pos_encoding_mode": "ROPE_LLAMA", "q_data_type": torch.bfloat16}
    lengths = torch.tensor(inputs.case.kv_lens, dtype=torch.int32)
    wrapper.plan(inputs.qo_indptr, indptr, indices, None, 4, 2, 128, 16, seq_lens=lengths, **options)
    assert copy_of(wrapper) is not None
    run(wrapper, runner)
    rotate(wrapper)
    check(run(wrapper, runner), runner)


def test_other_rope_options_at_run(as_on_hopper: None) -> None:
    """rope_scale and rope_theta are parameters, not part of a plan."""
    wrapper, runner = planned(CASES[0])
    wrapper.forward(runner.q(), *runner.kv(), causal=True, rope_scale=2.0, rope_theta=1e5)
    gather = wrapper._attention._local.bound.gather
    assert (gather.rope_scale, gather.rope_theta) == (2.0, 1e5)


def test_copies_lie_apart(as_on_hopper: None) -> None:
    """Nothing else of the workspace is written, and partial results have their own room."""
    for case in (CASES[0], CASES[2], CASES[5]):
        wrapper, runner = planned(dataclasses.replace(case, q_lens=(120,), kv_lens=(3000,)))
        copy, workspace = copy_of(wrapper), wrapper._planner.workspaces.float_buffer
        assert copy is not None
        run(wrapper, runner)
        before = workspace.clone()
        rotate(wrapper)
        dim, tokens = case.head_dim, -(-3000 // case.page_size) * case.page_size if case.entry != "ragged" else 3000
        regions = [(copy.k, tokens * 2 * dim * 2), (copy.q, 120 * 4 * dim * 2)]
        regions += [(copy.v, tokens * 2 * dim * 2)] if copy.v else []
        regions += [(copy.numbers, (copy.end - copy.first) * 4)] if copy.numbers else []
        changed = torch.zeros(len(workspace), dtype=torch.bool)
        for address, size in regions:
            offset = address - workspace.data_ptr()
            assert address % 128 == 0 and not changed[offset:][:size].any()
            changed[offset:][:size] = True
        assert torch.equal(workspace[~changed], before[~changed])
        partial_out, partial_lse = wrapper._planner.workspaces.partials(dim)
        assert partial_out + wrapper._planner.result.num_partial_rows * dim * 4 <= copy.k
        assert max(address + size for address, size in regions) <= partial_lse


@pytest.mark.parametrize("what", ["room", "graph", "mask", "fixed split", "odd dim", "fp8", "variant"])
def test_other_batches_rotate_in_the_kernel(as_on_hopper: None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: dict[str, dict[str, Any]] = {
        "mask": {"mask": "packed"},
        "fixed split": {"fixed_split_size": 8},
        "odd dim": {"head_dim": 72},
        "fp8": {"kv_dtype": "float8_e4m3fn"},
        "variant": {"variant": "score_mod"},
    }
    if what == "variant":
        options = Options("paged", 4, 2, 128, 128, 16, *[DType.BFLOAT16] * 3, position_encoding="ROPE_LLAMA")
        of_user = flashpage.Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score)
        for variant, may_be in ((None, True), (of_user, False)):
            changed_options = dataclasses.replace(options, variant=variant)
            assert gather_rows.GatherPolicy(changed_options, devices.H200).may_be is may_be
        return
    if what == "room":
        monkeypatch.setitem(__import__("harness").WORKSPACE_BYTES, "cpu", 200_000)
    case = dataclasses.replace(CASES[0], **changed.get(what, {}))
    if what == "graph":
        buffers = {
            "qo_indptr_buf": torch.zeros(3, dtype=torch.int32),
            "paged_kv_indptr_buf": torch.zeros(3, dtype=torch.int32),
            "paged_kv_indices_buf": torch.zeros(300, dtype=torch.int32),
            "paged_kv_last_page_len_buf": torch.zeros(2, dtype=torch.int32),
        }
        monkeypatch.setattr(Runner, "_more_options", lambda _: {"use_cuda_graph": True, **buffers})
    wrapper, runner = planned(case)
    assert copy_of(wrapper) is None and rotated_pages.NOTE not in wrapper.last_plan.notes
    scales = runner._scale_arguments() if what == "fp8" else {}
    check(wrapper.run(runner.q(), *runner.kv(), return_lse=True, **scales), runner)


H200 = devices.H200


@pytest.mark.usefixtures("as_on_hopper")
def test_no_room_in_either_workspace() -> None:
    """The plan needs more int memory, and then has no room for copies next to its partial results."""
    floats, ints = (torch.empty(size, dtype=torch.uint8) for size in (1_700_000, 512))
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(floats)
    wrapper.reset_workspace_buffer(floats, ints)
    pages = torch.tensor([0, 188]), torch.arange(188), torch.tensor([8])
    rope = {"pos_encoding_mode": "ROPE_LLAMA", "q_data_type": torch.bfloat16}
    wrapper.plan(torch.tensor([0, 120]), *pages, 4, 2, 64, 16, causal=True, **rope)
    assert copy_of(wrapper) is None


PAGED = Options("paged", 32, 8, 128, 128, 16, *[DType.BFLOAT16] * 3, causal=True, position_encoding="ROPE_LLAMA")
RAGGED = dataclasses.replace(PAGED, kv_source="ragged", page_size=0)


@pytest.mark.parametrize(
    ("options", "batch", "q_len", "kv_len", "is_worth_it"),
    [
        (PAGED, 4, 4096, 4096, True),
        (RAGGED, 4, 4096, 4096, True),
        (dataclasses.replace(PAGED, page_size=1), 1, 16384, 16384, True),
        (PAGED, 1, 2100, 2100, True),
        (PAGED, 16, 1024, 1024, True),
        (PAGED, 32, 500, 500, False),  # rows see 250 tokens
        (dataclasses.replace(PAGED, causal=False), 32, 500, 500, True),
        (PAGED, 4, 512, 16384, True),
        (PAGED, 4, 120, 16384, False),  # too few rows
        (dataclasses.replace(PAGED, num_q_heads=8), 4, 512, 16384, False),
        (dataclasses.replace(PAGED, window_left=200), 4, 4096, 4096, False),
        (dataclasses.replace(PAGED, window_left=512), 4, 4096, 4096, True),
        (PAGED, 0, 0, 0, False),
    ],
    ids=str,
)
def test_a_batch_is_worth_it(options: Options, batch: int, q_len: int, kv_len: int, is_worth_it: bool) -> None:
    worth = gather_rows.GatherPolicy(options, H200)
    assert worth.may_be
    assert worth.is_for(batch, batch * q_len, batch * kv_len) is is_worth_it


@pytest.mark.parametrize("case", cases.rotated.rows(), ids=str)
def test_the_tables_batches_are_worth_it(case: Case) -> None:
    """prefill_sm90 runs them, in boxes if pages have eight tokens or one."""
    is_ragged = case.entry == "ragged"
    types = (DType(case.q_dtype), DType(case.kv_type), DType(case.out_type))
    dims = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.value_dim)
    options = Options("ragged" if is_ragged else "paged", *dims, 0 if is_ragged else case.page_size, *types)
    options = dataclasses.replace(
        options, causal=case.causal, window_left=case.window_left, position_encoding=case.position
    )
    worth = gather_rows.GatherPolicy(options, H200)
    assert worth.may_be and worth.is_for(len(case.q_lens), sum(case.q_lens), sum(case.kv_lens))
    spec = choose_for_card(Problem(gather_rows.as_rows(options), 4096), H200).spec
    assert (spec.kernel, spec.loader) == ("prefill_sm90", "rows" if case.page_size == 5 else "boxes")
    assert spec.position_encoding == "none"


@pytest.mark.parametrize("options", [PAGED, RAGGED, dataclasses.replace(PAGED, page_size=1)], ids=str)
def test_boxes_are_those_of_the_copies(options: Options) -> None:
    """q in boxes of contiguous rows; K of the plan's tokens; V, too, unless it is read where it is."""
    read = gather_rows.as_rows(options)
    choice = choose_for_card(Problem(read, 4096), H200)
    assert choice.spec.loader == "boxes" and choice.spec.position_encoding == "none"
    prepared: Any = SimpleNamespace(choice=choice, attention_options=read, schedule=SimpleNamespace(tile_q=128))
    part = BoundPart(options)
    struct: Any = SimpleNamespace(kv_begin=0, kv_end=100, rows_end=1000)
    copy = rotated_pages.RotatedPages.below(1 << 34, struct, options)
    part.params.q_row_stride, part.params.q_head_stride = 32 * 128, 128
    part.params.group.divisor = 4
    views = copy.views(options)
    assert ("V" in views) == options.is_paged
    part.use_boxes(prepared, dict.fromkeys("KV", views["K"]) | views, copy)
    assert part.boxes is not None
    page = options.page_size if copy.is_paged else 100
    assert list(part.boxes.k.dims) == [128, page, 8, 100 if copy.is_paged else 1]
    assert list(part.boxes.k.strides) == [8 * 256, 256, page * 8 * 256 if copy.is_paged else 256]
    assert list(part.boxes.q.strides) == [256, 32 * 256, 32 * 256] and part.params.query_box_rows == 32
