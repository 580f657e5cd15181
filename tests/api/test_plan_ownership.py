"""Ownership of plans: which options stay planned, and which memory stays."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from looking_kernels import look_for_tiles
from one_request import HEADS, KV, Q, ints, plan, plan_on_device, planned_options, prefill, with_buffers, workspace

import flashpage
from flashpage import PlanError
from flashpage.base.memory import GrowingMemory
from flashpage.kernels import choose
from flashpage.plan import option_plan
from flashpage.wrappers import single


def test_options_of_earlier_plans_are_not_planned_again() -> None:
    wrapper = prefill()
    for window in range(1, 20):
        plan(wrapper, window_left=window)
        wrapper.run(Q, KV)
    assert [options.window_left for options in planned_options(wrapper)] == [19]


def test_options_of_runs_stay_as_long_as_runs_use_them() -> None:
    wrapper = prefill()
    plan(wrapper)
    for window in range(1, 20):
        wrapper.run(Q, KV, window_left=window)
    assert len(planned_options(wrapper)) == 20
    plan(wrapper, tokens=310)  # all were used since the last plan
    assert len(planned_options(wrapper)) == 20
    wrapper.run(Q, KV, window_left=7)
    plan(wrapper, tokens=320)
    assert [options.window_left for options in planned_options(wrapper)] == [-1, 7]
    expected = prefill()
    plan(expected, tokens=320, window_left=7)
    torch.testing.assert_close(wrapper.run(Q, KV, window_left=7), expected.run(Q, KV))
    plan(wrapper, tokens=330)
    plan(wrapper, tokens=340)
    assert [options.window_left for options in planned_options(wrapper)] == [-1]


def test_a_graphs_options_stay() -> None:
    wrapper = prefill(use_cuda_graph=True, max_batch=2, max_pages=100, max_rows=16)
    plan(wrapper)
    wrapper.run(Q, KV)
    wrapper.run(Q, KV, window_left=7)
    places = [active.slot.memory.data_ptr() for active in wrapper._planner.active]
    for tokens in (310, 320, 330):
        plan(wrapper, tokens=tokens)
    assert [options.window_left for options in planned_options(wrapper)] == [-1, 7]
    plan(wrapper, causal=True)
    assert [options.window_left for options in planned_options(wrapper)] == [-1, 7, -1]
    first, *others = (active.slot.memory.data_ptr() for active in wrapper._planner.active)
    assert others == places[::-1] and first not in places
    plan(wrapper)  # no run has used the causal plan
    assert [options.window_left for options in planned_options(wrapper)] == [-1, 7]
    assert [active.slot.memory.data_ptr() for active in wrapper._planner.active] == places


def test_options_that_no_run_of_a_graph_used_take_no_memory() -> None:
    wrapper = prefill(use_cuda_graph=True, max_batch=2, max_pages=100, max_rows=16)
    for window in range(1, 20):
        plan(wrapper, window_left=window)
        assert wrapper._planner.active[0].slot.memory is wrapper._int_workspace_buffer
    wrapper.run(Q, KV)


def test_a_plan_does_not_fail_on_options_of_an_earlier_batch() -> None:
    few_heads, one_head = (4, 1, 64, 16), KV[:, :, :, :1]
    wrapper = prefill(1 << 14)
    plan(wrapper, heads=few_heads, causal=True)
    wrapper.run(Q, one_head)
    wrapper.run(Q, one_head, window_left=200)
    plan(wrapper, tokens=40000, heads=few_heads, causal=True, window_left=64)
    wrapper.run(Q, one_head)


def test_known_options_of_a_graph_are_never_forgotten() -> None:
    """Captured launches depend on the plans of their options."""
    wrapper = prefill(use_cuda_graph=True, max_batch=2, max_pages=100, max_rows=16)
    plan(wrapper)
    first = wrapper._planner.active[0]
    for window in range(100):
        plan(wrapper, window_left=window)
    plan(wrapper)
    assert wrapper._planner.active[0] is first


def test_a_larger_workspace_reaches_options_of_runs() -> None:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace(1 << 20))
    wrapper.reset_workspace_buffer(workspace(1 << 20), workspace(1 << 12))
    requests = 4

    def plan_decodes() -> torch.Tensor:
        arguments = (torch.arange(requests + 1).int(), torch.zeros(requests).int(), torch.ones(requests).int())
        wrapper.plan(*arguments, *HEADS, q_data_type=torch.float32)
        return torch.randn(requests, 4, 64)

    wrapper.run(plan_decodes(), KV, window_left=3)
    requests = 3000
    wrapper.reset_workspace_buffer(workspace(1 << 24), workspace(1 << 22))
    q = plan_decodes()
    torch.testing.assert_close(wrapper.run(q, KV, window_left=3), wrapper.run(q, KV))
    assert {found.call.capacity for found in wrapper._planner.active} == {1 << 22}


def test_the_int_workspace_grows() -> None:
    """For the planned options and for those of runs; a plan that a graph captured keeps its memory."""
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace(1 << 20))
    wrapper.reset_workspace_buffer(workspace(1 << 20), workspace(64))
    for requests in (4, 3000, 5):
        arguments = (torch.arange(requests + 1).int(), torch.zeros(requests).int(), torch.ones(requests).int())
        wrapper.plan(*arguments, *HEADS, q_data_type=torch.float32)
        q = torch.randn(requests, 4, 64)
        torch.testing.assert_close(wrapper.run(q, KV, window_left=3), wrapper.run(q, KV))
    first, other = wrapper._planner.active
    assert first.slot.memory is wrapper._int_workspace_buffer and other.slot.memory is not first.slot.memory
    captured = weakref.ref(first.slot.memory)
    first.call.was_captured = 1
    first.slot.grow(1 << 20)
    assert captured() is not None and first.call.capacity == 1 << 20


def test_the_int_workspace_does_not_grow_under_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace(1 << 20))
    wrapper.plan(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1]), *HEADS, q_data_type=torch.float32)
    batch, first = wrapper._planner.batch, wrapper._planner.active[0]
    batch.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not first._make_int_room(batch, 1 << 20)
    batch.device = torch.device("cpu")
    assert first._make_int_room(batch, 1 << 20)
    batch.is_graph, first.slot.is_used = True, True
    assert not first._make_int_room(batch, 1 << 21)


def test_plans_on_the_device_forget_options_that_no_run_uses() -> None:
    wrapper = prefill(20000)
    plan_on_device(wrapper)
    wrapper.run(Q, KV[:, :, :, :1])
    plan_on_device(wrapper, tokens=310)
    assert len(planned_options(wrapper)) == 2
    plan_on_device(wrapper, tokens=40000)
    assert len(planned_options(wrapper)) == 1


def test_plans_on_the_device_that_a_graph_captured_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay writes the plan there again, whatever was planned since."""
    wrapper = prefill()
    for captures in (False, True):
        monkeypatch.setattr(option_plan, "is_capturing", lambda _, captures=captures: captures)
        plan_on_device(wrapper)
        wrapper.run(Q, KV, window_left=7)
    memories = [weakref.ref(active.slot.memory) for active in wrapper._planner.active]
    monkeypatch.undo()
    for _ in range(2):
        plan(wrapper)
        plan(wrapper, causal=True)
    wrapper.reset_workspace_buffer(workspace(1 << 24), workspace(1 << 22))
    plan(wrapper)
    assert len(memories) == 2 and all(memory() is not None for memory in memories)


def test_another_workspace_forgets_a_graphs_options_of_runs() -> None:
    wrapper, fresh = with_buffers(), prefill()
    plan(wrapper)
    wrapper.run(Q, KV, window_left=3)
    wrapper.reset_workspace_buffer(workspace(1 << 24), workspace(1 << 23))
    for which in (wrapper, fresh):
        plan(which, causal=True)
    for window in (3, -1):
        torch.testing.assert_close(*(which.run(Q, KV, window_left=window) for which in (wrapper, fresh)))


def test_options_of_earlier_runs_take_no_memory() -> None:
    wrapper = prefill()
    for window in range(200):
        plan(wrapper)
        wrapper.run(Q, KV, window_left=window)
    assert len(wrapper._planner._of_overrides) <= 2


def test_plans_that_a_graph_captured_stay() -> None:
    """Their options are never forgotten, and another workspace leaves the first one alone."""
    wrapper = prefill()
    plan(wrapper)
    first, memory = wrapper._planner.active[0], weakref.ref(wrapper._planner.workspaces.int_buffer)
    first.call.was_captured = 1  # as after a plan inside of a capture
    for window in range(100):
        plan(wrapper, window_left=window)
    wrapper.reset_workspace_buffer(workspace(1 << 24), workspace(1 << 22))
    plan(wrapper)
    assert wrapper._planner.active[0] is first and memory() is not None


@pytest.mark.parametrize("is_graph", [True, False])
def test_workspaces_of_graphs_stay(is_graph: bool) -> None:
    capacity: dict[str, Any] = {"use_cuda_graph": True, "max_batch": 2, "max_pages": 20, "max_rows": 16}
    wrapper = prefill(**(capacity if is_graph else {}))
    plan(wrapper)
    memory = weakref.ref(wrapper._planner.workspaces.int_buffer)
    wrapper.reset_workspace_buffer(workspace(1 << 24), workspace(1 << 22))
    plan(wrapper)
    assert (memory() is not None) == is_graph


def test_memory_of_a_wrapper_is_written_in_any_mode() -> None:
    """Tensors made inside of inference mode may not be written outside of it."""
    rows = ints(0, 2), ints(0, 2)
    for modes in ((True, False), (False, True)):
        with torch.inference_mode(modes[0]):
            wrapper = prefill(use_cuda_graph=True, max_batch=2, max_pages=20, max_rows=16)
            ragged = flashpage.BatchPrefillWithRaggedKVCacheWrapper(
                workspace(1 << 22), use_cuda_graph=True, max_batch=2, max_kv_rows=20, max_rows=16
            )
        for mode in modes:
            with torch.inference_mode(mode):
                plan(wrapper, tokens=200)
                items = {"prefix_len_ptr": ints(1), "token_pos_in_items_ptr": ints(0), "token_pos_in_items_len": 1}
                ragged.plan(*rows, 4, 4, 64, q_data_type=torch.float32, **items)


def test_a_captured_single_call_outlives_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "_captured", set())
    kept = []

    def call(captures: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(single, "is_capturing", lambda _: captures)
            flashpage.single_prefill_with_kv_cache(Q, KV[0, 0], KV[0, 1])
        (attention,) = single._local.attention.values()
        kept.append(weakref.ref(attention))

    for captures in (True, False):
        thread = threading.Thread(target=call, args=(captures,))
        thread.start()
        thread.join()
    gc.collect()
    assert kept[0]() is not None and kept[1]() is None


@pytest.mark.parametrize("capacity", [True, False], ids=["capacity", "buffers"])
def test_graphs_read_the_items_of_the_newest_plan(capacity: bool) -> None:
    """Captured launches keep the addresses of the first plan: later plans that succeed write there."""
    given: dict[str, Any] = {"qo_indptr_buf": ints(0, 0), "kv_indptr_buf": ints(0, 0)}
    given = {"max_batch": 2, "max_kv_rows": 64, "max_rows": 64} if capacity else given
    graph = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace(1 << 24), use_cuda_graph=True, **given)
    k, v = torch.randn(2, 64, 4, 64).unbind()

    def score(wrapper: Any, prefix: int, positions: list[int]) -> torch.Tensor:
        tokens = prefix + len(positions)
        wrapper.plan(
            qo_indptr=ints(0, tokens),
            kv_indptr=ints(0, tokens),
            num_qo_heads=4,
            num_kv_heads=4,
            head_dim_qk=64,
            q_data_type=torch.float32,
            prefix_len_ptr=ints(prefix),
            token_pos_in_items_ptr=torch.tensor(positions, dtype=torch.int16),
            token_pos_in_items_len=len(positions),
        )
        return wrapper.run(torch.ones(tokens, 4, 64), k[:tokens], v[:tokens])

    score(graph, 40, [0, 1, 2, 3, 4, 0, 1, 2])
    read = dict(graph._options.variant.tensors)
    for prefix, positions in ((4, [0, 1, 2, 0, 1]), (20, [0, 1, 0, 1, 2, 3, 0, 1])):
        fresh = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace(1 << 24))
        torch.testing.assert_close(score(graph, prefix, positions), score(fresh, prefix, positions))
        assert all(graph._options.variant.tensors[name] is tensor for name, tensor in read.items())
        assert int(read["prefix_len"][0]) == prefix
    before = {name: tensor.clone() for name, tensor in read.items()}
    for prefix, positions in ((4, [0, 1] * 5), (62, [0, 1, 2])):  # more positions, or more rows, than were captured
        with pytest.raises(PlanError):
            score(graph, prefix, positions)
        assert all(torch.equal(read[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_arrays_of_items_may_change_after_the_plan(dtype: torch.dtype) -> None:
    """Also those of int32 on the wrapper's device; a plan that is refused writes nothing."""
    wrapper, kv = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace(1 << 24)), torch.randn(8, 4, 64)
    q, prefix, positions = torch.ones(8, 4, 64), torch.tensor([4], dtype=dtype), torch.tensor([0, 1, 2, 0], dtype=dtype)
    rows, heads = ints(0, 8), {"num_qo_heads": 4, "num_kv_heads": 4, "head_dim_qk": 64, "q_data_type": torch.float32}
    items = {"prefix_len_ptr": prefix, "token_pos_in_items_ptr": positions, "token_pos_in_items_len": 4}
    wrapper.plan(rows, rows, **heads, **items)
    expected = wrapper.run(q, kv, kv)
    prefix.fill_(1), positions.fill_(0)
    assert torch.equal(wrapper.run(q, kv, kv), expected)
    read = dict(wrapper._options.variant.tensors)
    with pytest.raises(PlanError):
        wrapper.plan(rows, ints(0, -8), **heads, **items)
    assert read["prefix_len"].tolist() == [4] and read["token_pos"].tolist() == [[0, 1, 2, 0]]
    wrapper.plan(rows, rows, **heads, **items)
    assert not torch.equal(wrapper.run(q, kv, kv), expected)


# ---------------------------------------------------------------- what captured launches read


def test_slopes_of_alibi_stay_where_they_are() -> None:
    """A captured launch holds the slopes' address."""
    wrapper, found = prefill(), set()
    for tokens in (300, 400, 500):
        plan(wrapper, tokens, pos_encoding_mode="ALIBI")
        wrapper.run(Q, KV)
        found.add(wrapper._attention._local.bound.variant.tensors[0].data)
    assert len(found) == 1


@pytest.fixture
def looks_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    look_for_tiles(monkeypatch)


def masked(wrapper: Any, tokens: int, **options: Any) -> Any:
    """Plans one request with a mask, and returns its mask tiles."""
    wrapper.plan(ints(0, tokens), ints(0, tokens), 6, 2, 64, q_data_type=torch.float32, **options)
    return wrapper._planner.active[0].mask_tiles


@pytest.mark.parametrize("kind", ["bits", "bits of a graph", "function"])
def test_memory_for_mask_tiles_is_made_with_the_plan(
    kind: str, looks_for_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run may be captured: zeros written by that run would be written by each replay, and by no eager run."""
    options: dict[str, Any] = {"custom_mask": torch.ones(300 * 300).bool()}
    given: dict[str, Any] = {}
    if kind == "function":
        monkeypatch.setattr(choose, "_mask_source", lambda *_: "function")
        options = {"variant": flashpage.Variant(mask_mod=lambda b, h, q, kv: q >= kv)}
    elif kind == "bits of a graph":
        given = {name: torch.zeros(2).int() for name in ("qo_indptr_buf", "kv_indptr_buf", "mask_indptr_buf")}
        given |= {"use_cuda_graph": True, "custom_mask_buf": torch.zeros(20000, dtype=torch.uint8)}
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace(1 << 20), **given)
    tiles = masked(wrapper, 300, **options)
    assert tiles.params.cells and tiles.params.plan == wrapper._planner.active[0].slot.memory.data_ptr()
    assert (tiles.params.custom_mask == wrapper._planner.mask.address) and not tiles.cells.tensor.any()
    before = bytes(tiles.params)
    wrapper.run(torch.zeros(300, 6, 64), torch.zeros(300, 2, 64), torch.zeros(300, 2, 64))
    assert bytes(tiles.params) == before, "a run binds nothing"


def test_memory_for_mask_tiles_stays(looks_for_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured runs of earlier plans write there, and a wrapper does not know about captures."""
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace(1 << 20))
    tiles, memories = None, []
    for tokens in (100, 300, 700, 1500, 200):
        tiles = masked(wrapper, tokens, custom_mask=torch.ones(tokens**2).bool())
        memories.append(weakref.ref(tiles.cells.tensor))
    assert tiles is not None and len(set(memories)) > 2
    assert all(memory() is not None for memory in memories) and memories[-1]() is memories[-2]()
    assert sum(cells.numel() for cells in tiles.cells.outgrown) <= tiles.cells.tensor.numel()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(PlanError, match="plan the largest batch once before the capture"):
        GrowingMemory(torch.int64, torch.device("cuda"), "this mask").at_least(100)
