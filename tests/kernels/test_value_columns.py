"""The kernel that transposes V in e4m3, on the host, and the plans and bindings of prefills that read its copy.

test_prefill_kernel.py has the attention kernel that reads it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases.case import Case, prefill
from comparison import Outputs, compare
from harness import Runner
from inputs import make_inputs, reference_states
from native_build import shared_library, traits_flags

import flashpage
from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.kernel import AttentionKernel
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem, Work
from flashpage.plan import gather_rows, value_columns
from flashpage.run.bound_part import BoundPart

pytestmark = pytest.mark.usefixtures("quick_kernels")

Q8: dict[str, Any] = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "num_kv_heads": 2, "causal": True}
WIDE: dict[str, Any] = {**Q8, "num_q_heads": 4, "head_dim": 128}
TWO: tuple[tuple[int, ...], tuple[int, ...]] = (70, 90), (71, 120)
CASES = [
    prefill("columns-pages", "pages of 16", *TWO, **WIDE),
    prefill("columns-page-64", "HND", *TWO, num_q_heads=4, head_dim=64, page_size=64, kv_layout="HND", **Q8),
    prefill("columns-gapped", "NaN between tokens", *TWO, cache="gapped", **WIDE),
    prefill("columns-ragged", "not a multiple of 16 tokens", *TWO, entry="ragged", **WIDE),
    prefill("columns-fused", "one tensor", *TWO, num_q_heads=4, head_dim=96, cache="fused", **Q8),
    prefill("columns-empty", "requests without rows or tokens", (90, 0, 70, 0), (95, 9, 80, 0), **WIDE),
    prefill("columns-empty-ragged", "the same", (90, 0, 70, 0), (95, 9, 80, 0), entry="ragged", **WIDE),
    prefill("columns-64-128", "more of V", *TWO, num_q_heads=4, head_dim=64, head_dim_vo=128, **Q8),
]
# The order of sixteen tokens, and of sixteen columns (include/flashpage/tile/load/transposed_values.h).
TOKENS = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
COLUMNS = [*range(0, 16, 2), *range(1, 16, 2)]
H200, E4M3 = devices.H200, DType.FLOAT8_E4M3
PAGED = Options("paged", 32, 8, 128, 128, 16, E4M3, E4M3, DType.BFLOAT16, causal=True)
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python 3.11's mmap does not name


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for small batches. The CPU's kernel is bound to copies by columns, which it cannot read."""
    monkeypatch.setattr(gather_rows, "runs_on", lambda _: True)
    monkeypatch.setattr(value_columns, "LEAST_ROWS", 8)
    monkeypatch.setattr(value_columns, "LEAST_VISIBLE", 8)
    refusals = AttentionKernel.refusals

    def without_columns(kernel: AttentionKernel, work: Work) -> list[str]:
        if kernel.backend == "cpu":
            options = dataclasses.replace(work.options, has_value_columns=False)
            work = dataclasses.replace(work, problem=dataclasses.replace(work.problem, options=options))
        return refusals(kernel, work)

    monkeypatch.setattr(AttentionKernel, "refusals", without_columns)


class Planned:
    """A case with one q and one cache, planned as for a Hopper card."""

    def __init__(self, case: Case) -> None:
        self.case, self.inputs = case, make_inputs(case)
        self.runner = Runner(self.inputs, "cpu", flashpage)
        self.wrapper = self.runner.planned()
        self.q, self.kv = self.runner.q(), self.runner.kv()

    @property
    def copy(self) -> value_columns.Columns | None:
        found: value_columns.Columns | None = self.wrapper._planner.active[0].gathered
        return found

    @property
    def options(self) -> Options:
        found: Options = self.wrapper._planner.active[0].options
        return found

    @property
    def bound(self) -> Any:
        return self.wrapper._attention._local.bound

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self.wrapper.run(self.q, *self.kv, return_lse=True)
        return found

    def check(self) -> None:
        """That a run without a copy is right."""
        case = dataclasses.replace(self.case, outputs="returned")
        compare(case, Outputs(*self.run()), reference_states(self.inputs))

    def transpose(self) -> None:
        """Does the work of the launch before attention."""
        transpose(self.bound.gather, self.options)

    def found(self) -> torch.Tensor:
        """The copy, [heads, columns, positions], with tokens and columns in order."""
        copy, options = self.copy, self.options
        assert copy is not None
        heads, dim, positions = options.num_kv_heads, options.head_dim_vo, copy.views(options)["V"].head_dim
        memory = (ctypes.c_uint8 * (heads * dim * positions)).from_address(copy.v)
        found = torch.frombuffer(memory, dtype=torch.uint8).view(heads, dim, positions)
        return found[:, :, order(positions, TOKENS).argsort()][:, order(dim, COLUMNS).argsort()]

    def check_copy(self) -> None:
        """That each token of a request has the position of its page number, or of its row."""
        found = self.found()
        for request, v in enumerate(self.inputs.v):
            first = int(self.inputs.indptr[request]) * max(1, self.options.page_size)
            wanted = v.view(torch.uint8).permute(1, 2, 0)
            assert (found[:, :, first : first + len(v)] == wanted).all()


def transpose(params: native.ValueColumnsParams, options: Options) -> None:
    flags = traits_flags(value_columns.spec_of(options))
    library = ctypes.CDLL(str(shared_library("value_columns.cpp", first_include="hopper", flags=flags)))
    library.value_columns(ctypes.byref(params))


def order(count: int, of_sixteen: list[int]) -> torch.Tensor:
    return torch.arange(count) // 16 * 16 + torch.tensor(of_sixteen).repeat(count // 16)


# ---------------------------------------------------------------- the copy


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_v_lies_by_columns(as_on_hopper: None, case: Case) -> None:
    planned = Planned(case)
    assert isinstance(planned.copy, value_columns.Columns)
    assert value_columns.NOTE in planned.wrapper.last_plan.notes
    assert not planned.wrapper.last_plan.options.has_value_columns
    planned.run()
    planned.transpose()
    planned.check_copy()


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
def test_each_layers_v_is_transposed(as_on_hopper: None, case: Case) -> None:
    """Later runs point the kernel to their own V, by the call that C serves and by the other; K is read in place."""
    planned = Planned(case)
    is_ragged = case.entry == "ragged"
    q, kv = planned.q, planned.kv if is_ragged else planned.kv[0]
    for step in range(4):
        if step != 2:  # a run whose tensors alone are new
            q, kv = q.clone(), tuple(half.clone() for half in kv)
        planned.wrapper.run(q, *kv) if is_ragged else planned.wrapper.run(q, kv)
        params, copy = planned.bound.params, planned.copy
        assert copy is not None and planned.bound.gather.v.data == kv[1].data_ptr()
        assert (params.q, params.k.data, params.v.data) == (q.data_ptr(), kv[0].data_ptr(), copy.v)


def test_only_the_copy_is_written(as_on_hopper: None) -> None:
    """Nothing else of the workspace, and partial results have their own room."""
    for case in (CASES[0], CASES[3]):
        planned = Planned(dataclasses.replace(case, q_lens=(120,), kv_lens=(3001,)))
        copy, workspace = planned.copy, planned.wrapper._planner.workspaces.float_buffer
        assert copy is not None
        planned.run()
        before = workspace.clone()
        planned.transpose()
        planned.check_copy()
        begin, size = copy.v - workspace.data_ptr(), 2 * 128 * 3008
        assert copy.v % 128 == 0
        assert torch.equal(workspace[:begin], before[:begin])
        assert torch.equal(workspace[begin + size :], before[begin + size :])
        partial_out, partial_lse = planned.wrapper._planner.workspaces.partials(128)
        partial_rows = planned.wrapper._planner.result.num_partial_rows
        assert partial_rows and partial_out + partial_rows * 128 * 4 <= copy.k and copy.v + size <= partial_lse


def test_entries_of_no_page_are_zeros(as_on_hopper: None) -> None:
    """Given lengths leave numbers unused, which may be of no page on a card; memory that is no token's is NaN."""
    planned = Planned(CASES[0])
    inputs, entries = planned.inputs, 12
    indptr = torch.arange(3, dtype=torch.int32) * entries
    indices = torch.zeros(2 * entries, dtype=torch.int32)
    unused = torch.ones(2 * entries, dtype=torch.bool)
    for i in range(2):
        its = inputs.indices[inputs.indptr[i] : inputs.indptr[i + 1]]
        indices[i * entries :][: len(its)] = its
        unused[i * entries :][: len(its)] = False
    lengths = torch.tensor(inputs.case.kv_lens, dtype=torch.int32)
    types = dict.fromkeys(("q_data_type", "kv_data_type"), torch.float8_e4m3fn)
    planned.wrapper.plan(inputs.qo_indptr, indptr, indices, None, 4, 2, 128, 16, causal=True, seq_lens=lengths, **types)
    assert planned.copy is not None
    planned.run()
    indices[unused] = torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32).repeat(8)[: int(unused.sum())]
    planned.bound.gather.kv_indices = indices.data_ptr()
    planned.transpose()
    found = planned.found()
    for i, v in enumerate(inputs.v):
        begin, used = i * entries * 16, -(-len(v) // 16) * 16
        assert (found[:, :, begin : begin + len(v)] == v.view(torch.uint8).permute(1, 2, 0)).all()
        assert not found[:, :, begin + used : begin + entries * 16].any()


def test_numbers_of_pages_grow_with_the_cache(as_on_hopper: None) -> None:
    planned = Planned(CASES[0])
    for count in (1, 3, 1):
        larger = tuple(torch.cat([half] * count) for half in planned.kv[0])
        planned.wrapper.run(planned.q, larger)
        assert planned.bound.gather.num_pages == len(larger[0])
    assert len(planned.wrapper._attention._local.bindings) == 1


@pytest.mark.parametrize("is_paged", [True, False], ids=["paged", "ragged"])
def test_offsets_of_more_than_32_bits(is_paged: bool) -> None:
    """Products of strides with tokens, pages, heads and columns; the memory is used sparsely."""
    far, tokens, heads = 1 << 26, 144, 2
    sizes = heads * 128 * far + 4096, (tokens * far + 4096)
    maps = [mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE) for size in sizes]
    for memory in maps:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    to, source = (np.frombuffer(memory, np.uint8) for memory in maps)
    rng = np.random.default_rng(3)
    numbers = rng.permutation(tokens // 16).astype(np.int32)
    given = native.ValueColumnsParams(num_kv_heads=heads, column_stride=far, columns=to.ctypes.data)
    given.v.data, given.v.head_stride = source.ctypes.data, 128
    if is_paged:
        given.page, given.count, given.num_pages = native.make_fast_div(16), len(numbers), len(numbers)
        given.kv_indices, given.v.page_stride, given.v.token_stride = numbers.ctypes.data, 16 * far, far
    else:
        given.page, given.count, given.num_pages = native.make_fast_div(1), tokens, tokens
        given.v.token_stride = far
    values = rng.integers(0, 120, (tokens, heads * 128), dtype=np.uint8)
    for token in range(tokens):
        row = numbers[token // 16] * 16 + token % 16 if is_paged else token
        source[int(row) * far :][: heads * 128] = values[token]
    transpose(given, PAGED)
    columns = order(128, COLUMNS).numpy()
    for head, row in itertools.product(range(heads), range(128)):
        found = to[(head * 128 + row) * far :][:tokens]
        wanted = values[order(tokens, TOKENS).numpy(), head * 128 + int(columns[row])]
        assert (found == wanted).all(), (head, row)
    assert not to[tokens:4096].any()


def test_positions_are_limited() -> None:
    """Kernels count them in 32 bits; the copy's own bytes, and its strides, take more."""
    largest = (2**31 - 256) // 16
    for entries, may_be in ((largest, True), (largest + 1, False), (2**31 - 1, False)):
        batch: Any = SimpleNamespace(kv_begin=0, kv_end=entries)
        copy = value_columns.Columns.below(1 << 46, batch, PAGED)
        assert (copy is not None) is may_be
        if copy is not None:
            assert (1 << 46) - copy.k == entries * 16 * 8 * 128
            view = copy.views(PAGED)["V"]
            assert (view.token_stride, view.head_stride) == (entries * 16, entries * 16 * 128)


# ---------------------------------------------------------------- plans


def test_plans_in_turns(as_on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches with and without a copy, and of other lengths, over the same bound tensors."""
    case = dataclasses.replace(CASES[0], q_strides="fused_qkv")
    planned, other = Planned(case), Planned(dataclasses.replace(case, q_lens=(90, 40), kv_lens=(200, 47)))
    types = dict.fromkeys(("q_data_type", "kv_data_type"), torch.float8_e4m3fn)
    wrapper = planned.wrapper
    for one, has_copy in ((planned, True), (other, False), (other, True), (planned, False), (planned, True)):
        inputs, one.wrapper = one.inputs, wrapper
        with monkeypatch.context() as patch:
            if not has_copy:
                patch.setattr(gather_rows, "runs_on", lambda _: False)
            pages = (inputs.qo_indptr, inputs.indptr, inputs.indices, inputs.last_page_len)
            wrapper.plan(*pages, 4, 2, 128, 16, causal=True, **types)
        assert (one.copy is not None) is has_copy
        if has_copy:
            one.run()
            one.transpose()
            one.check_copy()
        else:
            one.check()
    assert len(wrapper._attention._local.bindings) == 1


NOT_PLANNED: dict[str, dict[str, Any]] = {
    "room": {},
    "graph": {},
    "mask": {"mask": "packed", "causal": False},
    "fixed split": {"fixed_split_size": 8},
    "dim 48": {"head_dim": 48},
    "dim 192": {"head_dim": 192},
    "page 8": {"page_size": 8},
    "alibi": {"position": "ALIBI"},
    "chunk": {"chunk": 50},
    "bf16 queries": {"q_dtype": "bfloat16", "entry": "ragged"},
    "e5m2": {"q_dtype": "float8_e5m2", "kv_dtype": "float8_e5m2"},
}


@pytest.mark.parametrize("what", NOT_PLANNED)
def test_batches_without_a_copy(as_on_hopper: None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels transpose V in the loop, if they have factors of e4m3."""
    if what == "room":
        monkeypatch.setitem(__import__("harness").WORKSPACE_BYTES, "cpu", 40_000)
    case = dataclasses.replace(CASES[0], **NOT_PLANNED[what])
    if what == "graph":
        buffers = {
            "qo_indptr_buf": torch.zeros(3, dtype=torch.int32),
            "paged_kv_indptr_buf": torch.zeros(3, dtype=torch.int32),
            "paged_kv_indices_buf": torch.zeros(300, dtype=torch.int32),
            "paged_kv_last_page_len_buf": torch.zeros(2, dtype=torch.int32),
        }
        monkeypatch.setattr(Runner, "_more_options", lambda _: {"use_cuda_graph": True, **buffers})
    planned = Planned(case)
    assert planned.copy is None and value_columns.NOTE not in planned.wrapper.last_plan.notes
    assert not planned.wrapper._planner.active[0].prepared.attention_options.has_value_columns
    planned.check()


def test_room_for_the_copy_but_not_for_partial_results(as_on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(CASES[0], q_lens=(120,), kv_lens=(3001,))
    copy_bytes, found = 2 * 128 * 3008, {}
    partial_bytes = Planned(case).wrapper._planner.result.num_partial_rows * 129 * 4
    for name, size in (
        ("copy", copy_bytes * 129 // 128 + 512),
        ("both", (copy_bytes + partial_bytes) * 129 // 128 + 512),
    ):
        monkeypatch.setitem(__import__("harness").WORKSPACE_BYTES, "cpu", size)
        planned = Planned(case)
        found[name] = planned.copy is not None
        if not found[name]:
            planned.check()
    assert found == {"copy": False, "both": True}


def test_plans_on_the_device_have_no_copy(as_on_hopper: None) -> None:
    """Also after a plan of the host with one, and before another."""
    planned = Planned(CASES[0])
    inputs = planned.inputs
    types = dict.fromkeys(("q_data_type", "kv_data_type"), torch.float8_e4m3fn)
    tables = torch.zeros(2, 20, dtype=torch.int32)
    for i in range(2):
        its = inputs.indices[inputs.indptr[i] : inputs.indptr[i + 1]]
        tables[i, : len(its)] = its
    lengths = torch.tensor(inputs.case.kv_lens, dtype=torch.int32)
    planned.run()
    planned.wrapper.plan_on_device(inputs.qo_indptr, lengths, tables, 4, 2, 128, 16, max_rows=160, causal=True, **types)
    assert planned.copy is None
    planned.check()
    pages = (inputs.qo_indptr, inputs.indptr, inputs.indices, inputs.last_page_len)
    planned.wrapper.plan(*pages, 4, 2, 128, 16, causal=True, **types)
    assert planned.copy is not None
    planned.run()
    planned.transpose()
    planned.check_copy()


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
def test_boxes_of_columns(as_on_hopper: None, case: Case) -> None:
    """V's tensor map has the copy's form, K's that of the cache, for lengths of any plan."""
    planned = Planned(case)
    q, kv = planned.q, planned.kv
    planned.run()
    bound = planned.bound
    read = value_columns.as_columns(planned.options)
    choice = choose_for_card(Problem(read, 4096), H200)
    prepared: Any = SimpleNamespace(choice=choice, attention_options=read, schedule=SimpleNamespace(tile_q=128))
    part = BoundPart(planned.options)
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
    assert planned.copy is not None and bound.params.v.data == planned.copy.v
    assert bound.params.k.data == k.data_ptr()
    v = kv[1] if case.entry == "ragged" else kv[0][1]
    assert bound.gather.v.data == v.data_ptr()
