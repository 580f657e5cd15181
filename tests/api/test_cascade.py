"""Cascade attention, compared with the reference on all tokens and with flat attention over the same pages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cascade_batch import (
    DECODE,
    GRAPH_CASES,
    WORKSPACE_BYTES,
    CascadeBatch,
    CascadeCase,
    buffers_for,
    graph_batches,
    indptr_of,
    planned,
    wrapper_for,
)

import flashpage
from flashpage import CapabilityError, PlanError, RunError
from flashpage.wrappers import merge, operators
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.usefixtures("quick_kernels")

THREE = (((9, 100),), ((3, 37), (6, 0)), ((1, 5), (2, 40), (0, 3), (4, 16), (2, 2)))
PREFILL = (((40, 130),), ((17, 17), (20, 65), (3, 40)))
GROUPS = (((3, 64), (2, 200)), ((1, 33), (1, 0), (1, 5), (1, 64), (1, 17)))
CASES = [
    CascadeCase("decode", DECODE),
    CascadeCase("decode-fp16-HND-pair", DECODE, dtype="float16", kv_layout="HND", cache="tuple"),
    CascadeCase("decode-page-1-e4m3", DECODE, page_size=1, kv_dtype="float8_e4m3fn"),
    CascadeCase("decode-soft-cap-scale", DECODE, soft_cap=8.0, sm_scale=0.3),
    CascadeCase("two-prefixes", GROUPS, num_q_heads=8, num_kv_heads=2, head_dim=128),
    CascadeCase("three-levels", THREE),
    CascadeCase("three-levels-causal", THREE, causal=True),
    CascadeCase("prefill-causal", PREFILL, causal=True),
    CascadeCase("prefill", PREFILL),
    CascadeCase("no-shared-tokens", (((5, 0),), DECODE[1])),
    CascadeCase("shared-tokens-alone", (((4, 77),), ((1, 0), (2, 0), (1, 0)))),
    CascadeCase("no-tokens", (((3, 0),), ((1, 0), (2, 0)))),
    CascadeCase("no-rows", (((0, 20),), ((0, 3), (0, 0)))),
    CascadeCase("one-level", (((1, 70), (3, 16)),), causal=True),
    CascadeCase("one-request", (((1, 64),), ((1, 33),))),
    CascadeCase("nothing-shared", (((3, 64), (2, 16), (1, 0)), ((3, 7), (2, 40), (1, 5))), causal=True),
    CascadeCase("nothing-shared-half-pages", (((1, 70), (1, 64)), ((1, 0), (1, 40)))),
    CascadeCase("half-a-page", (((1, 70),), ((1, 33),))),
    CascadeCase("rows-without-tokens", (((2, 64),), ((2, 0),)), causal=False),
    CascadeCase("folded-in-the-middle", (((2, 50),), ((1, 32), (1, 16)), ((1, 9), (1, 1))), page_size=1),
    CascadeCase("folded-above", (((5, 32),), ((5, 40),), DECODE[1]), window_left=100),
    CascadeCase("window-within-the-last-level", DECODE, window_left=0),
    CascadeCase("window-into-the-prefix", DECODE, window_left=90),
    CascadeCase("window-over-everything", DECODE, window_left=1000),
    CascadeCase("window-three-levels-causal", THREE, window_left=30, causal=True),
    CascadeCase("window-three-levels", THREE, window_left=44),
    CascadeCase("window-requests-without-rows", (((0, 9), (2, 70), (3, 0)), DECODE[1]), window_left=90),
    CascadeCase("chunk-decode", DECODE, chunk=128),
    CascadeCase("chunk-within-the-last-level", DECODE, chunk=310),
    CascadeCase("chunk-over-everything", DECODE, chunk=1000),
    CascadeCase("chunk-three-levels-causal", THREE, chunk=30, causal=True),
    CascadeCase("chunk-three-levels-page-1", THREE, chunk=30, causal=True, page_size=1),
    CascadeCase("chunk-window", THREE, chunk=60, window_left=44, causal=True),
    CascadeCase("chunk-prefill-causal", PREFILL, chunk=64, causal=True, soft_cap=20.0),
    CascadeCase("chunk-one-level", (((1, 70), (3, 16), (30, 100)),), causal=True, chunk=48),
    CascadeCase("chunk-folded", (((3, 64), (2, 16), (1, 0)), ((3, 7), (2, 40), (1, 5))), causal=True, chunk=20),
    CascadeCase("chunk-no-rows", (((0, 20),), ((0, 3), (0, 0))), chunk=7),
    CascadeCase("chunk-no-tokens", (((3, 0),), ((1, 0), (2, 0))), chunk=7, causal=True),
    CascadeCase("window-prefill-causal", PREFILL, window_left=50, causal=True, soft_cap=20.0),
]
FP32_CASES = [
    CascadeCase("fp32-decode", DECODE, dtype="float32"),
    CascadeCase("fp32-window", THREE, dtype="float32", window_left=30, causal=True),
]


@pytest.mark.parametrize("case", [*CASES, *FP32_CASES], ids=str)
def test_results(case: CascadeCase, device: str) -> None:
    if case.dtype == "float32" and device != "cpu":
        pytest.skip("fp32 queries are the CPU's")
    batch = CascadeBatch(case)
    q, cache = batch.q.to(device), batch.cache.argument(device)
    wrapper = planned(batch, device)
    out, lse = wrapper.run(q, cache, return_lse=True)
    batch.check(out, lse)
    given = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    assert wrapper.run(q, cache, out=given[0], lse=given[1]) is given[0]
    assert torch.equal(given[0], out) and torch.equal(given[1], lse)
    assert torch.equal(wrapper.run(q, cache), out)
    again = planned(batch, device, host_lengths=False).run(q, cache)
    assert torch.equal(again, out)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("decode", "prefill-causal", "window-three-levels")], ids=str
)
def test_flat_attention_gives_the_same(case: CascadeCase, device: str) -> None:
    """Flat attention over the same pages, if shared tokens fill them; a request's list has the pages of all levels."""
    tree = [[(rows, -(-n // case.page_size) * case.page_size) for rows, n in level] for level in case.tree[:-1]]
    batch = CascadeBatch(
        CascadeCase(case.name, (*tree, case.tree[-1]), causal=case.causal, window_left=case.window_left)
    )
    pages, last_page_len = [], []
    for i, (rows, _) in enumerate(batch.case.tree[-1]):
        begin, mine = int(batch.levels[-1][0][i]), []
        for q_indptr, indptr, indices, _ in batch.levels:
            owner = int((q_indptr[1:] <= begin).sum()) if rows else 0
            mine.append(indices[indptr[owner] : indptr[owner + 1]])
        pages.append(torch.cat(mine))
        own = batch.case.tree[-1][i][1]
        last_page_len.append((own - 1) % case.page_size + 1 if own else case.page_size)
    flat = flashpage.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), case.kv_layout
    )
    indptr, last = indptr_of([len(p) for p in pages]), torch.tensor(last_page_len)
    indices = torch.cat(pages).to(device)
    flat.plan(batch.levels[-1][0], indptr, indices, last, *batch.sizes(), **batch.options())
    q, cache = batch.q.to(device), batch.cache.argument(device)
    expected = flat.run(q, cache, return_lse=True)
    batch.check(*expected)
    found = planned(batch, device).run(q, cache, return_lse=True)
    torch.testing.assert_close(found[0], expected[0], rtol=2.0**-6, atol=2.0**-7)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- passes


@pytest.mark.parametrize(
    ("name", "runs", "merges"),
    [
        ("decode", 2, ["merge_state_in_place"]),
        ("three-levels", 3, ["merge_states_into"]),
        ("no-shared-tokens", 1, []),
        ("shared-tokens-alone", 1, []),
        ("no-tokens", 1, []),
        ("window-within-the-last-level", 2, ["merge_state_in_place"]),  # one request has no tokens of its own
        ("one-level", 1, []),
        ("one-request", 1, []),
        ("nothing-shared", 1, []),
        ("nothing-shared-half-pages", 1, []),
        ("half-a-page", 2, ["merge_state_in_place"]),
        ("folded-in-the-middle", 2, ["merge_state_in_place"]),
        ("folded-above", 2, ["merge_state_in_place"]),
    ],
)
def test_passes(name: str, runs: int, merges: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels without tokens are left out, levels that only one request uses are joined; any number of other levels is
    merged in one pass."""
    batch = CascadeBatch(next(case for case in CASES if case.name == name))
    wrapper = planned(batch)
    called: list[str] = []
    call = operators.call
    monkeypatch.setattr(merge.operators, "call", lambda name, *args: (called.append(name), call(name, *args))[1])
    wrapper.run(batch.q, batch.cache.argument("cpu"))
    assert (len(wrapper._active), called) == (runs, merges)


def test_a_level_that_the_window_hides_is_left_out() -> None:
    batch = CascadeBatch(CascadeCase("hidden", (((2, 300),), ((1, 70), (1, 40))), window_left=39))
    wrapper = planned(batch)
    assert len(wrapper._active) == 1
    batch.check(*wrapper.run(batch.q, batch.cache.argument("cpu"), return_lse=True))
    assert len(planned(batch, window_left=40)._active) == 2


def test_rows_without_tokens_are_not_joined() -> None:
    """If they were joined, causal would count from the wrong last token and hide part of the level above."""
    batch = CascadeBatch(CascadeCase("rows", (((2, 64),), ((2, 1),))))
    assert [len(planned(batch, causal=is_causal)._active) for is_causal in (False, True)] == [1, 2]


def test_one_level_is_the_prefill_wrapper() -> None:
    batch = CascadeBatch(next(case for case in CASES if case.name == "one-level"))
    cache = batch.cache.argument("cpu")
    paged = flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8))
    paged.plan(*batch.levels[0], *batch.sizes(), pos_encoding_mode="ALIBI", **batch.options())
    wrapper = planned(batch, pos_encoding_mode="ALIBI")
    assert torch.equal(wrapper.run(batch.q, cache), paged.run(batch.q, cache))


def test_planning_again() -> None:
    """Masks appear and disappear with the window; their tensors grow with the batch."""
    wrapper = wrapper_for(CascadeBatch(CASES[0]), "cpu")
    names = ("window-into-the-prefix", "prefill-causal", "window-prefill-causal", "decode", "window-into-the-prefix")
    for name in names:
        batch = CascadeBatch(next(case for case in CASES if case.name == name))
        wrapper.plan(*batch.arrays(), *batch.sizes(), **batch.options())
        batch.check(*wrapper.run(batch.q, batch.cache.argument("cpu"), return_lse=True))


@pytest.mark.parametrize("window_left", [-1, 90])
def test_torch_compile(window_left: int) -> None:
    batch = CascadeBatch(CascadeCase("compile", DECODE, window_left=window_left))
    wrapper, cache = planned(batch), batch.cache.argument("cpu")
    expected = wrapper.run(batch.q, cache, return_lse=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, kv: wrapper.run(q, kv, return_lse=True), fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(batch.q, cache), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("num_states", [1, 3])
def test_opcheck_of_the_merge(num_states: int) -> None:
    """States next to each other in memory, as levels leave them."""
    v = torch.randn(num_states, 9, 4, 64).transpose(0, 1)
    s = torch.randn(num_states, 9, 4).transpose(0, 1)
    out, lse = torch.empty(9, 4, 64), torch.empty(9, 4)
    operators.call("merge_states_into", v, s, out, lse)
    for found, expected in zip((out, lse), flashpage.merge_states(v.contiguous(), s.contiguous()), strict=True):
        assert torch.equal(found, expected)
    torch.library.opcheck(torch.ops.flashpage.merge_states_into.default, (v, s, out, lse))


# ---------------------------------------------------------------- graph buffers


@pytest.mark.parametrize("name", GRAPH_CASES)
def test_graph_mode_plans_every_level(name: str) -> None:
    """All batches use the same launches, as a captured run would (tests/card/test_card_cascade.py captures them)."""
    batches = graph_batches(**GRAPH_CASES[name])
    wrapper = wrapper_for(batches[0], "cpu", use_cuda_graph=True, **buffers_for(batches, "cpu"))
    assert wrapper.is_cuda_graph_enabled
    for batch in batches:
        wrapper.plan(*batch.arrays(), *batch.sizes(), **batch.options())
        assert len(wrapper._active) == 2
        batch.check(*wrapper.run(batch.q, batch.cache.argument("cpu"), return_lse=True))


# ---------------------------------------------------------------- hidden pages


def pages_of(attention: Attention, indices: torch.Tensor) -> set[int]:
    """The pages of the tokens in a plan's units, each clipped as kernels clip it."""
    options, plan = attention.options, attention.last_plan
    items, found = plan.work_items(), set()
    for item in items:
        rows = range(int(item["q_len"]))
        if item["num_units"] == 1:  # some of the rows
            first = int(item["first_packed_row"])
            rows = range(
                first // options.group_size,
                -(-min(first + plan.schedule.tile_q, len(rows) * options.group_size) // options.group_size),
            )
        for row in rows:
            position = int(item["kv_len"] - item["q_len"]) + row
            begin, end = int(item["kv_begin"]), int(item["kv_end"])
            if options.causal:
                end = min(end, position + 1)
            if options.window_left >= 0:
                begin = max(begin, position - options.window_left)
            for page in range(begin // options.page_size, -(-end // options.page_size) if end > begin else 0):
                found.add(int(indices[int(item["kv_offset"]) + page]))
    return found


HIDING = [case for case in CASES if (case.chunk or case.window_left >= 0) and len(case.tree) > 1]


def check_hidden_pages(wrapper: Any, batch: CascadeBatch) -> None:
    shown = batch.hide_pages()
    wrapper.plan(*batch.arrays(), *batch.sizes(), **batch.options())
    used = set()
    for attention in wrapper._active:
        indices = attention.session.indices.tensor
        used |= pages_of(attention, indices)
    assert used <= {int(page) for level in shown for page in level}
    batch.check(*wrapper.run(batch.q, batch.cache.argument("cpu"), return_lse=True))


@pytest.mark.parametrize("case", HIDING, ids=str)
def test_hidden_pages_are_not_read(case: CascadeCase) -> None:
    """No unit of a plan has a page of which no row sees a token, and these pages are NaN."""
    batch = CascadeBatch(case)
    check_hidden_pages(wrapper_for(batch, "cpu"), batch)


@pytest.mark.parametrize("name", [name for name in GRAPH_CASES if name != "plain"])
def test_captured_runs_do_not_read_hidden_pages(name: str) -> None:
    batches = graph_batches(**GRAPH_CASES[name])
    wrapper = wrapper_for(batches[0], "cpu", use_cuda_graph=True, **buffers_for(batches, "cpu"))
    for batch in batches:
        check_hidden_pages(wrapper, batch)


# ---------------------------------------------------------------- errors


def test_errors() -> None:
    batch = CascadeBatch(CASES[0])
    wrapper = wrapper_for(batch, "cpu")
    arrays, options = batch.arrays(), batch.options()
    with pytest.raises(RunError, match=r"no plan: call plan"):
        wrapper.run(batch.q, batch.cache.argument("cpu"))

    def refused(error: type[Exception], message: str, *changed: tuple[int, list[Any]], **values: Any) -> None:
        given = list(arrays)
        for i, array in changed:
            given[i] = array
        with pytest.raises(error, match=message):
            wrapper.plan(*given, *batch.sizes(), **(options | values))
        with pytest.raises(RunError, match="no plan"):
            wrapper.run(batch.q, batch.cache.argument("cpu"))

    wrapper.plan(*arrays, *batch.sizes(), **options)
    refused(PlanError, r"paged_kv_indices_arr has 1 entries but num_levels=2", (2, arrays[2][:1]))
    refused(PlanError, r"qo_indptr_arr\[0\] covers rows 0 to 4 but the last", (0, [torch.tensor([0, 4]), arrays[0][1]]))
    refused(PlanError, r"qo_indptr_arr\[0\] covers rows 1 to 5", (0, [torch.tensor([1, 5]), arrays[0][1]]))
    refused(PlanError, r"paged_kv_indptr_arr\[1\] has shape \(5,\)", (1, [arrays[1][0], arrays[1][1][1:]]))
    refused(PlanError, r"paged_kv_last_page_len\[0\]\[0\]=17 is outside", (3, [torch.tensor([17]), arrays[3][1]]))
    refused(CapabilityError, r"pos_encoding_mode='ALIBI' is not supported with num_levels=2", pos_encoding_mode="ALIBI")
    refused(CapabilityError, r"use_fp16_qk_reduction=True", use_fp16_qk_reduction=True)
    with pytest.raises(PlanError, match=r"num_levels=0 is out of range"):
        flashpage.MultiLevelCascadeAttentionWrapper(0, torch.empty(64, dtype=torch.uint8))
    with pytest.raises(PlanError, match=r"qo_indptr_buf_arr is None but num_levels=2"):
        wrapper_for(batch, "cpu", use_cuda_graph=True)
    wrapper.plan(*arrays, *batch.sizes(), **options)
    strided = torch.empty(len(batch.q), 4, 128, dtype=batch.q.dtype)[..., :64]
    with pytest.raises(RunError, match=r"out has strides"):
        wrapper.run(batch.q, batch.cache.argument("cpu"), out=strided)
    with pytest.raises(PlanError, match=r"int_workspace_buffers has 1 entries"):
        wrapper.reset_workspace_buffer(torch.empty(1 << 20, dtype=torch.uint8), [torch.empty(1, dtype=torch.uint8)])


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_errors_of_the_lse(levels: int) -> None:
    """Every number of levels refuses an LSE that it cannot write."""
    batch = CascadeBatch(CascadeCase(f"{levels}-levels", THREE[-levels:], dtype="float32"))
    wrapper, rows = planned(batch), batch.rows
    cache, shared = batch.cache.argument("cpu"), torch.empty(rows, 4, 64)
    for lse, says in (
        (torch.empty(4, rows).t(), "lse has strides"),
        (torch.empty(rows, 64)[:, :4], "lse has strides"),
        (torch.empty(4).expand(rows, 4), "lse has strides"),
        (torch.empty(rows + 1, 4), r"lse has shape \(\d+, 4\) and dtype torch.float32 but this run writes"),
        (torch.empty(rows, 4).half(), "lse has shape .* and dtype torch.float16 but this run writes"),
        (torch.empty(rows, 4, device="meta"), "lse is on meta"),
        (shared.flatten()[: rows * 4].view(rows, 4), "lse shares memory with out"),
    ):
        with pytest.raises(RunError, match=says):
            wrapper.run(batch.q, cache, out=shared, lse=lse, return_lse=True)


def test_errors_of_levels_that_could_be_joined() -> None:
    """Errors are found before levels are joined."""
    batch = CascadeBatch(next(case for case in CASES if case.name == "nothing-shared"))
    wrapper, arrays = wrapper_for(batch, "cpu"), batch.arrays()
    for i, change, says in (
        (2, lambda t: t[:-1], r"paged_kv_indices_arr\[\d\] has \d+ entries but paged_kv_indptr_arr\[\d\] ends at"),
        (2, lambda t: t.view(1, -1), r"paged_kv_indices_arr\[\d\] has shape"),
        (2, lambda t: t.float(), "dtype torch.float32"),
        (1, lambda t: t.flip(0), "an indptr never decreases"),
        (3, lambda t: t + 20, "is outside 1..16"),
    ):
        for level in range(2):
            given = [list(array) for array in arrays]
            given[i][level] = change(given[i][level])
            with pytest.raises(PlanError, match=says):
                wrapper.plan(*given, *batch.sizes(), **batch.options())


def test_other_workspaces() -> None:
    batch = CascadeBatch(CASES[0])
    wrapper = planned(batch)
    bytes_of = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(3)]
    wrapper.reset_workspace_buffer(bytes_of[0], bytes_of[1:])
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(batch.q, batch.cache.argument("cpu"))
    wrapper.begin_forward(*batch.arrays(), *batch.sizes(), **batch.options())
    batch.check(*wrapper.forward(batch.q, batch.cache.argument("cpu"), return_lse=True))
