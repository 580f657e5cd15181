"""Rows that are gathered before a Hopper prefill: when that happens, where they go, and what runs read.

Where a card would launch the gathering kernel before attention, these tests call it on the CPU between two runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import cases.gathered
import numpy as np
import pytest
import torch
from caches import poison
from cases.case import Case, prefill
from comparison import Outputs, compare
from harness import Runner
from inputs import Inputs, make_inputs, reference_states
from native_build import gather_rows

import flashpage
from flashpage import jit, native
from flashpage.base.dtypes import DType
from flashpage.kernels import choose, devices
from flashpage.kernels.options import Options
from flashpage.kernels.spec import KernelSpec
from flashpage.plan import gather_rows as gathered
from flashpage.plan import option_plan, prepared_kernels
from flashpage.plan.prepared_kernels import PreparedKernels

OPTIONS = Options(
    kv_source="paged",
    num_q_heads=32,
    num_kv_heads=8,
    head_dim_qk=128,
    head_dim_vo=128,
    page_size=1,
    q_dtype=DType.BFLOAT16,
    kv_dtype=DType.BFLOAT16,
    out_dtype=DType.BFLOAT16,
    causal=True,
)
FP8 = dataclasses.replace(OPTIONS, page_size=16, kv_dtype=DType.FLOAT8_E4M3)
NVFP4 = dataclasses.replace(OPTIONS, page_size=16, kv_dtype=DType.BYTES, k_format="nvfp4", v_format="nvfp4")
FULL = dataclasses.replace(OPTIONS, causal=False)
ROWS_OF_TOKEN = 64  # replaces the real limit, so that small batches gather


# ---------------------------------------------------------------- when


@pytest.mark.parametrize("window_left", [-1, 0, 50, 300])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (200, 200), (50, 700), (300, 100)])
def test_rows_that_see_a_token(rows: int, tokens: int, causal: bool, window_left: int) -> None:
    """As the mask says, except for tokens that the window hides."""
    worth = gathered.GatherPolicy(dataclasses.replace(OPTIONS, causal=causal, window_left=window_left), devices.H200)
    position, token = tokens - rows + np.arange(rows)[:, None], np.arange(tokens)[None]
    in_window = token >= position - window_left if window_left >= 0 else np.ones((rows, tokens), bool)
    edge = token <= position if causal or window_left >= 0 else in_window
    exact = (edge & in_window).sum() / tokens
    found = worth.rows_of_token(3, 3 * rows, 3 * tokens)
    if window_left < 0:
        assert abs(found - exact) <= 0.5
    else:
        assert exact - 0.5 <= found <= rows
        assert found <= max(1.0, rows / tokens) * (window_left + 1)


@pytest.mark.parametrize(
    ("options", "batch", "q_len", "kv_len", "is_worth_it"),
    [
        (OPTIONS, 4, 4096, 4096, True),
        (OPTIONS, 1, 16384, 16384, True),
        (FULL, 1, 16384, 16384, True),
        (OPTIONS, 16, 1024, 1024, True),  # enough by the rule for units' starts
        (OPTIONS, 4, 1024, 1024, False),  # too few
        (OPTIONS, 4, 512, 16384, False),
        (FULL, 7, 1024, 1024, True),
        (FULL, 7, 1023, 1024, False),
        (dataclasses.replace(OPTIONS, num_q_heads=16), 16, 1024, 1024, False),
        (dataclasses.replace(OPTIONS, window_left=512), 4, 4096, 4096, True),
        (dataclasses.replace(OPTIONS, window_left=512), 1, 4096, 4096, False),
        (dataclasses.replace(OPTIONS, window_left=2048), 4, 4096, 4096, True),
        (OPTIONS, 0, 0, 0, False),
        (OPTIONS, 4, 4096, 0, False),
        (FP8, 4, 512, 16384, True),
        (FP8, 4, 128, 16384, False),
        (FP8, 128, 70, 70, False),  # the rule for units' starts is for single rows alone
        (NVFP4, 4, 128, 16384, True),
        (NVFP4, 16, 32, 8192, False),
    ],
    ids=str,
)
def test_a_batch_is_worth_it(options: Options, batch: int, q_len: int, kv_len: int, is_worth_it: bool) -> None:
    worth = gathered.GatherPolicy(options, devices.H200)
    assert worth.may_be
    assert worth.is_for(batch, batch * q_len, batch * kv_len) is is_worth_it


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_source": "ragged", "page_size": 0},
        {"page_size": 2},
        {"kv_dtype": DType.FLOAT8_E4M3, "q_dtype": DType.FLOAT8_E4M3},
        {"kv_dtype": DType.FLOAT8_E4M3, "kv_source": "ragged", "page_size": 0},
        {"q_dtype": DType.FLOAT32, "kv_dtype": DType.FLOAT32, "out_dtype": DType.FLOAT32},
        {"head_dim_qk": 512, "head_dim_vo": 512},
        {"head_dim_qk": 100},
        {"has_mask": True},
        {"variant": flashpage.Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score)},
        {"position_encoding": "ROPE_LLAMA", "head_dim_qk": 72},
        {"position_encoding": "ROPE_LLAMA", "kv_dtype": DType.FLOAT8_E4M3},
        {"uniform_q_len": 8192},
        {"fixed_piece_tokens": 256},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_options_of_which_no_batch_is(changed: dict[str, Any]) -> None:
    assert not gathered.GatherPolicy(dataclasses.replace(OPTIONS, **changed), devices.H200).may_be


def test_other_cards_read_rows_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for sm in (0, 80, 90, 100):
        monkeypatch.setattr(devices, "of", lambda _, sm=sm: devices.H200 if sm == 90 else devices.named("A100"))
        found[sm] = gathered.runs_on(torch.device("cuda:0"))
    assert found == {0: False, 80: False, 90: True, 100: False}


@pytest.mark.parametrize("case", cases.gathered.rows(), ids=str)
def test_the_tables_batches_are_worth_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's prefill runs them with and without gathering; with it, boxes load the rows."""
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    requested: list[KernelSpec] = []

    def get_kernel(spec: KernelSpec, device: torch.device) -> Any:
        requested.append(spec)
        return SimpleNamespace(handle=0, info=native.KernelInfo(num_sms=132, ctas_per_sm=1))

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    monkeypatch.setattr(prepared_kernels, "trace", functools.partial(trace_on_the_host, prepared_kernels.trace))
    types = (DType(case.q_dtype), DType(case.kv_type), DType(case.out_type))
    dims = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.value_dim)
    options = Options("paged", *dims, case.page_size, *types, causal=case.causal, window_left=case.window_left)
    options = dataclasses.replace(options, has_soft_cap=case.soft_cap > 0, position_encoding=case.position)
    assert gathered.GatherPolicy(options, devices.H200).may_be
    assert gathered.GatherPolicy(options, devices.H200).is_for(len(case.q_lens), sum(case.q_lens), sum(case.kv_lens))
    rows = choose.packed_rows(options, len(case.q_lens), sum(case.q_lens))
    for gathers, form, helpers in ((False, ("paged", "rows"), []), (True, ("ragged", "boxes"), ["gather_rows"])):
        requested.clear()
        prepared = prepared_kernels.PreparedKernels(options, rows, torch.device("cuda:0"), gathers=gathers)
        merge = "merge" if case.value_dim <= 128 else "merge_columns"
        assert [spec.kernel for spec in requested] == ["prefill_sm90", *helpers, merge]
        assert (requested[0].kv_source, requested[0].loader) == form
        assert (prepared.gather_rows is not None) == (gathered.NOTE in prepared.choice.reasons) == gathers


def trace_on_the_host(trace: Any, options: Options, soft_cap: float, device: torch.device) -> Any:
    return trace(options, soft_cap, torch.device("cpu"))


# ---------------------------------------------------------------- plans and runs


class Batch:
    """A case on the CPU, planned as for a Hopper card."""

    def __init__(self, case: Case, workspace_bytes: int = 16 << 20, first: int = 0, **options: Any) -> None:
        self.case, self.inputs = case, make_inputs(case)
        self.runner = Runner(self.inputs, "cpu", flashpage)
        self.workspace = poison(torch.empty(workspace_bytes, dtype=torch.uint8))
        self.wrapper: Any = flashpage.BatchPrefillWithPagedKVCacheWrapper(self.workspace, case.kv_layout)
        self.plan(first, **options)

    def plan(self, first: int = 0, inputs: Inputs | None = None, **options: Any) -> None:
        """`first`: number of entries before the batch's page numbers that belong to no request."""
        inputs = inputs or self.inputs
        case = inputs.case
        self.indices = torch.cat([torch.zeros(first, dtype=torch.int32), inputs.indices])
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        values = {"causal": case.causal, "head_dim_vo": case.value_dim, "q_data_type": getattr(torch, case.q_dtype)}
        pages = (inputs.indptr + first, self.indices, inputs.last_page_len)
        self.wrapper.plan(inputs.qo_indptr, *pages, *heads, **values | options)

    @property
    def rows(self) -> gathered.Rows | None:
        found: gathered.Rows | None = self.wrapper._planner.active[0].gathered
        return found

    def run(self, cache: Any = None, **options: Any) -> torch.Tensor:
        q, kv = self.runner.q(), self.runner.kv()[0] if cache is None else cache
        out: torch.Tensor = self.wrapper.run(q, kv, **options)
        return out

    def gather(self) -> None:
        """Does the work of the launch before attention."""
        gather_rows()(ctypes.byref(self.wrapper._attention._local.bound.gather), 2)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        compare(dataclasses.replace(self.case, outputs="returned"), Outputs(out, lse), reference_states(self.inputs))


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "runs_on", lambda _: True)
    monkeypatch.setattr(gathered, "LEAST_ROWS", ROWS_OF_TOKEN)


SMALL: dict[str, Any] = {"page_size": 1, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "causal": True}
TWO = prefill("gathered-small", "two requests", (70, 90), (71, 130), **SMALL)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache", ["tuple", "fused"])
def test_runs_read_what_was_gathered(as_on_hopper: None, cache: str, layout: str, first: int) -> None:
    batch = Batch(dataclasses.replace(TWO, cache=cache, kv_layout=layout), first=first)
    assert batch.rows is not None and gathered.NOTE in batch.wrapper.last_plan.notes
    assert batch.wrapper._planner.active[0].prepared.choice.spec.kv_source == "ragged"
    assert batch.wrapper.last_plan.options.kv_source == "paged"
    assert batch.run().isnan().any(), "nothing has been gathered yet"
    batch.gather()
    for _ in range(2):  # the second run's tensors have the form of the first run's
        batch.check(*batch.run(return_lse=True))


def test_each_layers_cache_is_what_is_gathered(as_on_hopper: None) -> None:
    """Each layer's run gathers its own cache, also if a run only writes addresses."""
    batch = Batch(TWO)
    q, kv = batch.runner.q(), batch.runner.kv()[0]
    layers = [tuple(half * scale for half in kv) for scale in (1.0, 0.5, 2.0)]
    layers.append(tuple(torch.cat([half, half]) for half in layers[1]))  # more pages, so that structs are bound again
    for layer in [*layers, *layers]:
        batch.run(layer)
        batch.gather()
        params = batch.wrapper._attention._local.bound.gather
        assert (params.k.data, params.v.data) == tuple(half.data_ptr() for half in layer)
        found = batch.run(layer)
        ragged = [half[batch.indices.long(), 0] for half in layer]
        wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 22, dtype=torch.uint8))
        wrapper.plan(batch.inputs.qo_indptr, batch.inputs.indptr, 4, 2, 64, causal=True, q_data_type=q.dtype)
        assert torch.equal(found, wrapper.run(q, *ragged))


def gathering_kernel() -> Any:
    """A CPU kernel of one CTA in place of the card's."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    call = function(lambda params, *_: gather_rows()(ctypes.c_void_p(params), 2))
    handle = native.check_handle(native.load().fp_kernel_from_function(ctypes.cast(call, ctypes.c_void_p)))
    return SimpleNamespace(handle=handle, info=SimpleNamespace(ctas_per_sm=1, num_sms=1), keeps=call)


def test_plans_in_turns(as_on_hopper: None) -> None:
    """Batches that gather and one that does not, over the same bound tensors."""
    batch = Batch(TWO)
    short = Batch(dataclasses.replace(TWO, q_lens=(20,) * 8, kv_lens=(25,) * 7 + (26,)))
    assert short.rows is None
    batch.wrapper._planner.active[0].prepared.gather_rows = gathering_kernel()  # a CPU has no such kernel
    batch.run()
    args = batch.wrapper._attention._local.bound.args
    for _ in range(2):
        batch.plan()
        assert batch.rows is not None
        batch.run()
        params = ctypes.addressof(batch.wrapper._attention._local.bound.gather)
        assert (args.count, args.launches[0].params, args.launches[0].grid) == (2, params, 1)
        batch.check(batch.run())
        batch.plan(inputs=short.inputs)
        assert batch.rows is None and gathered.NOTE not in batch.wrapper.last_plan.notes
        short.check(batch.wrapper.run(short.runner.q(), short.runner.kv()[0]))
        assert args.count == 1 and len(batch.wrapper._attention._local.bindings) == 1
    assert len(batch.wrapper._planner.active[0]._prepared) == 2, "kernels are chosen once for each"


def test_options_at_run_have_plans_of_their_own(as_on_hopper: None) -> None:
    batch = Batch(TWO, window_left=10)
    assert batch.rows is None
    batch.run()
    values = {"causal": True, "window_left": -1}
    batch.wrapper.forward(batch.runner.q(), batch.runner.kv()[0], **values)
    batch.gather()
    batch.check(batch.wrapper.forward(batch.runner.q(), batch.runner.kv()[0], **values))


@pytest.mark.parametrize("what", ["lengths", "graph", "mask", "fixed split", "rope"])
def test_batches_that_are_not_gathered(as_on_hopper: None, what: str) -> None:
    given: dict[str, dict[str, Any]] = {
        "lengths": {"seq_lens": torch.tensor([71, 130])},
        "mask": {"custom_mask": torch.ones(70 * 71 + 90 * 130, dtype=torch.bool)},
        "fixed split": {"fixed_split_size": 64},
        "rope": {"pos_encoding_mode": "ROPE_LLAMA"},
    }
    batch = Batch(TWO)
    assert batch.rows is not None
    if what == "graph":
        batch.wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=batch.workspace,
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(3, dtype=torch.int32),
            paged_kv_indptr_buf=torch.zeros(3, dtype=torch.int32),
            paged_kv_indices_buf=torch.zeros(300, dtype=torch.int32),
            paged_kv_last_page_len_buf=torch.zeros(2, dtype=torch.int32),
        )
    batch.plan(**given.get(what, {}))
    assert batch.rows is None and gathered.NOTE not in batch.wrapper.last_plan.notes


# ---------------------------------------------------------------- room

LONG = prefill("gathered-long", "pieces", (120,), (3000,), **{**SMALL, "num_q_heads": 2, "num_kv_heads": 1})
LONG_BYTES = 3000 * 2 * 64 * 2


def test_partial_results_and_rows_lie_apart(as_on_hopper: None) -> None:
    batch = Batch(LONG)
    planner, rows = batch.wrapper._planner, batch.rows
    partial_rows = planner.result.num_partial_rows
    assert rows is not None and partial_rows > 0
    partial_out, partial_lse = planner.workspaces.partials(64)
    assert partial_out + partial_rows * 64 * 4 <= rows.k and rows.v + 3000 * 64 * 2 <= partial_lse
    assert partial_lse + partial_rows * 4 <= batch.workspace.data_ptr() + batch.workspace.numel()
    batch.run()
    batch.gather()
    batch.check(*batch.run(return_lse=True))


def test_without_room_rows_are_read_where_they_are(as_on_hopper: None) -> None:
    """No room for the rows; and room for the rows, but not also for the partial results."""
    partial_bytes = Batch(LONG).wrapper._planner.result.num_partial_rows * 65 * 4
    found = {}
    for name, size in (
        ("none", LONG_BYTES // 2),
        ("for rows", LONG_BYTES * 65 // 64 + 512),
        ("for both", (LONG_BYTES + partial_bytes) * 65 // 64 + 512),
    ):
        batch = Batch(LONG, workspace_bytes=size)
        found[name] = batch.rows is not None
        if batch.rows is None:
            assert batch.wrapper._planner.active[0].prepared.choice.spec.kv_source == "paged"
            batch.check(*batch.run(return_lse=True))
    assert found == {"none": False, "for rows": False, "for both": True}


def test_boxes_are_those_of_the_rows(as_on_hopper: None) -> None:
    """Tensor maps have as many rows as the plan, for every form of cache."""
    batch = Batch(dataclasses.replace(TWO, cache="fused"))
    batch.run()
    bound = batch.wrapper._attention._local.bound
    choice = bound.option_plan.prepared.choice
    capability = dataclasses.replace(choice.kernel, row_boxes=True)
    spec = dataclasses.replace(choice.spec, loader="boxes")
    changed = dataclasses.replace(choice, kernel=capability, spec=spec)
    (part,) = bound.parts
    prepared = bound.option_plan.prepared
    part.bind_boxes(
        SimpleNamespace(choice=changed, schedule=prepared.schedule, attention_options=prepared.attention_options),
        bound.views,
    )
    bound.point(batch.runner.q(), batch.runner.kv()[0], torch.empty_like(batch.runner.q()), None)
    read = part.boxes
    for form in (read.k, read.v):
        assert tuple(form.dims) == (64, 201, 2, 1) and tuple(form.strides) == (256, 128, 128)
        assert form.box[1] == bound.params.box_tokens == 32
    assert (bound.params.k.data, bound.params.v.data) == (batch.rows.k, batch.rows.v)  # type: ignore[union-attr]


def test_strides_of_one_token_are_not_those_of_many(as_on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tensor map a dimension of one entry has no stride; both batches use the same kernels."""

    class InBoxes(PreparedKernels):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.choice = dataclasses.replace(self.choice, spec=dataclasses.replace(self.choice.spec, loader="boxes"))

    monkeypatch.setattr(prepared_kernels, "PreparedKernels", InBoxes)
    monkeypatch.setattr(option_plan.choose, "packed_rows", lambda *_: 128)
    one, many = (dataclasses.replace(TWO, q_lens=(70,), kv_lens=(tokens,), causal=False) for tokens in (1, 130))
    batch, other = Batch(one), Batch(many)
    for step in (batch, other, batch):
        batch.plan(inputs=step.inputs)
        assert batch.rows is not None
        batch.wrapper.run(step.runner.q(), step.runner.kv()[0])
        (part,) = batch.wrapper._attention._local.bound.parts
        assert part.boxes.k.dims[1] == step.case.kv_lens[0]
        assert part.boxes.k.strides[0] == part.boxes.v.strides[0] == (128 if step is batch else 256)
    assert len(batch.wrapper._attention._local.bindings) == 1
