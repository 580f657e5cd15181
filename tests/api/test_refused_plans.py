"""Plans and runs that are refused: what they leave unchanged, for captured launches and for the next plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_request import HEADS, KV, Q, ints, plan, plan_on_device, planned_options, prefill, with_buffers, workspace

import flashpage
from flashpage import PlanError, RunError, native
from flashpage.run.bound_part import BoundPart


def test_a_run_that_fails_leaves_the_wrapper_as_it_was() -> None:
    few_heads, one_head = (4, 1, 64, 16), KV[:, :, :, :1]
    wrapper = prefill(1 << 14)
    for _ in range(2):
        plan(wrapper, tokens=40000, heads=few_heads, causal=True, window_left=64)
        expected = wrapper.run(Q, one_head)
        with pytest.raises(PlanError, match="float_workspace_buffer has 16384 bytes"):
            wrapper.run(Q, one_head, window_left=-1)
        assert len(planned_options(wrapper)) == 1
        torch.testing.assert_close(wrapper.run(Q, one_head), expected)


def test_a_run_whose_kernel_is_missing_leaves_the_wrapper_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = prefill()
    plan(wrapper)
    expected = wrapper.run(Q, KV)
    monkeypatch.setenv("FLASHPAGE_JIT", "off")
    with pytest.raises(flashpage.KernelMissingError):
        wrapper.forward(Q, KV, logits_soft_cap=7.0, pos_encoding_mode="ROPE_LLAMA", sm_scale=0.1234)
    monkeypatch.undo()
    plan(wrapper)
    torch.testing.assert_close(wrapper.run(Q, KV), expected)


def test_a_refused_plan_leaves_what_graphs_read() -> None:
    """Rows, pages and bounds are checked before anything is copied."""
    wrapper = prefill(use_cuda_graph=True, max_batch=2, max_pages=20, max_rows=16)
    plan(wrapper)
    memory, indices = wrapper._planner.active[0].slot.memory, wrapper._paged_kv_indices_buf
    before = memory.clone(), indices.clone()
    for options in ({"rows": 17}, {"tokens": 16 * 21}, {"max_token_per_sequence": 7}, {"max_sequence_kv": 100}):
        with pytest.raises(PlanError):
            plan(wrapper, **({"tokens": 200} | options))
        assert torch.equal(memory, before[0]) and torch.equal(indices, before[1]), options
    with pytest.raises(RunError):
        wrapper.run(Q, KV)


def test_rows_of_a_graph_with_buffers_are_judged_first() -> None:
    wrapper = with_buffers()
    plan(wrapper)
    memory = wrapper._planner.active[0].slot.memory
    before = memory.clone()
    with pytest.raises(PlanError, match="plan the largest batch first"):
        plan(wrapper, rows=9)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_plan_that_options_of_runs_refuse_leaves_what_graphs_read(dtype: torch.dtype) -> None:
    """Captured launches of all options see the same batch. int64: page numbers that one foreign call does not copy."""
    heads, one_head = (4, 1, 64, 16), KV[:, :, :, :1]

    def plan_window(wrapper: Any, tokens: int) -> None:
        pages = -(-tokens // 16)
        lengths = (ints(0, 8), ints(0, pages), torch.arange(pages, dtype=dtype).flip(0), ints((tokens - 1) % 16 + 1))
        wrapper.plan(*lengths, *heads, q_data_type=torch.float32, causal=True, window_left=64)

    wrapper = with_buffers(1 << 14)
    plan_window(wrapper, 300)
    wrapper.run(Q, one_head, window_left=-1)
    read = [active.slot.memory for active in wrapper._planner.active] + [wrapper._paged_kv_indices_buf]
    before = [memory.clone() for memory in read]
    with pytest.raises(PlanError, match="float_workspace_buffer has 16384 bytes"):
        plan_window(wrapper, 40000)
    assert all(torch.equal(memory, kept) for memory, kept in zip(read, before, strict=True))
    with pytest.raises(RunError):
        wrapper.run(Q, one_head)
    plan_window(wrapper, 310)
    fresh = prefill()
    plan_window(fresh, 310)
    for window in (64, -1):
        found, expected = (which.run(Q, one_head, window_left=window) for which in (wrapper, fresh))
        torch.testing.assert_close(found, expected)
    assert not any(torch.equal(memory, kept) for memory, kept in zip(read, before, strict=True))


def test_a_plan_on_the_device_that_options_of_runs_refuse_leaves_what_graphs_read() -> None:
    wrapper = with_buffers(20000)
    plan_on_device(wrapper)
    wrapper.run(Q, KV[:, :, :, :1])  # with one KV head, a batch has more partial results
    read = [active.slot.memory for active in wrapper._planner.active]
    before = [memory.clone() for memory in read]
    with pytest.raises(PlanError, match="float_workspace_buffer has 20000 bytes"):
        plan_on_device(wrapper, tokens=40000)
    assert all(torch.equal(memory, kept) for memory, kept in zip(read, before, strict=True))


def test_only_a_graphs_first_plan_on_the_device_limits_its_rows() -> None:
    wrapper = with_buffers(1 << 10)
    with pytest.raises(PlanError, match="float_workspace_buffer has 1024 bytes"):
        plan_on_device(wrapper, tokens=40000, rows=4)  # refused, so that nothing was captured
    wrapper.reset_workspace_buffer(workspace(1 << 24), workspace(1 << 23))
    for rows in (8, 4, 8):
        plan_on_device(wrapper, rows=rows)
    with pytest.raises(PlanError, match="plan the largest batch first"):
        plan_on_device(wrapper, rows=9)


def test_a_refused_plan_on_the_device_leaves_no_kernels() -> None:
    """The next plan of the host launches the kernels whose schedule it was made with."""
    wrapper = prefill(1 << 13)
    plan(wrapper)
    with pytest.raises(PlanError, match="float_workspace_buffer has 8192 bytes"):
        plan_on_device(wrapper, tokens=40000)
    plan(wrapper)
    first = wrapper._planner.active[0]
    assert first.call.schedule == first.prepared.schedule_address and not first._serves_every_plan


def test_launches_of_a_graph_have_the_shape_of_its_first_plan_that_succeeds() -> None:
    wrapper, fresh = with_buffers(), with_buffers()
    with pytest.raises(PlanError, match="outside 1..16"):
        wrapper.plan(ints(0, 1), ints(0, 5), torch.arange(5).int(), ints(99), *HEADS, q_data_type=torch.float32)
    for which in (wrapper, fresh):
        for rows in (4000, 1):
            plan(which, tokens=4000, rows=rows)
    found, expected = (which._planner.active[0].prepared for which in (wrapper, fresh))
    assert found.problem == expected.problem and found.problem.packed_rows >= 4000


def test_a_wrapper_without_memory_for_its_first_plan_plans_later(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = prefill()
    with monkeypatch.context() as patch:
        patch.setattr(native.load(), "fp_slots_create", lambda *_: None)
        with pytest.raises(flashpage.DeviceError):
            plan(wrapper)
    plan(wrapper)
    assert wrapper.run(Q, KV).isfinite().all()


@pytest.mark.parametrize(
    "refused",
    [
        {"block_tables": torch.zeros(1, 2).int()},
        {"custom_mask": torch.ones(2400).bool(), "packed_custom_mask": torch.ones(300).byte()},
        {"prefix_len_ptr": ints(3)},
    ],
    ids=["tables", "two masks", "items"],
)
def test_a_refused_plan_is_not_run_as_the_one_before(refused: dict[str, Any]) -> None:
    wrapper = prefill()
    plan(wrapper)
    with pytest.raises(PlanError):
        plan(wrapper, **refused)
    with pytest.raises(RunError, match="and again if it failed"):
        wrapper.run(Q, KV)


def test_a_refused_mask_leaves_what_graphs_read() -> None:
    given = {"custom_mask_buf": torch.zeros(300, dtype=torch.uint8), "mask_indptr_buf": ints(0, 0)}
    wrapper = prefill(use_cuda_graph=True, max_batch=2, max_pages=100, max_rows=16, **given)
    plan(wrapper, custom_mask=torch.ones(8 * 300).bool())
    read = [wrapper._planner.active[0].slot.memory, wrapper._paged_kv_indices_buf, given["custom_mask_buf"]]
    before = [memory.clone() for memory in read]
    for tokens, bits, says in ((301, 8 * 300, "has 2400 values"), (310, 8 * 310, "custom_mask_buf holds 300")):
        with pytest.raises(PlanError, match=says):
            plan(wrapper, tokens, custom_mask=torch.ones(bits).bool())
        assert all(torch.equal(memory, kept) for memory, kept in zip(read, before, strict=True))
        with pytest.raises(RunError):
            wrapper.run(Q, KV)
    two = (ints(0, 4, 8), ints(0, 1, 2), ints(3, 4), ints(16, 16))
    with pytest.raises(PlanError, match="mask_indptr_buf has 2 entries"):
        wrapper.plan(*two, *HEADS, q_data_type=torch.float32, custom_mask=torch.ones(8 * 16).bool())
    assert all(torch.equal(memory, kept) for memory, kept in zip(read, before, strict=True))
    with pytest.raises(RunError):
        wrapper.run(Q, KV)


def test_bounds_hold_for_one_plan() -> None:
    wrapper = prefill()
    with pytest.raises(PlanError, match="max_sequence_kv=100 but a request of the batch has 300"):
        plan(wrapper, max_sequence_kv=100)
    plan(wrapper, max_sequence_kv=300)
    plan(wrapper, tokens=400)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_level_whose_partial_results_do_not_fit_leaves_the_others(dtype: torch.dtype) -> None:
    """Captured launches of all levels of a cascade see the same batch."""

    def cascade(float_bytes: int) -> flashpage.MultiLevelCascadeAttentionWrapper:
        return flashpage.MultiLevelCascadeAttentionWrapper(
            2,
            workspace(float_bytes),
            use_cuda_graph=True,
            qo_indptr_buf_arr=[ints(0, 0), ints(0, 0, 0)],
            paged_kv_indptr_buf_arr=[ints(0, 0), ints(0, 0, 0)],
            paged_kv_indices_buf_arr=[torch.zeros(4096, dtype=torch.int32) for _ in range(2)],
            paged_kv_last_page_len_buf_arr=[ints(0), ints(0, 0)],
        )

    def plan_levels(wrapper: Any, shared: int, own: tuple[int, int]) -> None:
        tokens = torch.tensor([shared]), torch.tensor(own)
        indptrs = [torch.cat([lens.new_zeros(1), (-(-lens // 16)).cumsum(0)]) for lens in tokens]
        indices = [torch.arange(int(indptr[-1]), dtype=dtype).flip(0) for indptr in indptrs]
        last = [(lens - 1) % 16 + 1 for lens in tokens]
        rows = [ints(0, 2), ints(0, 1, 2)]
        wrapper.plan(rows, indptrs, indices, last, 4, 1, 64, 16, q_data_type=torch.float32)

    wrapper, fresh = cascade(1 << 13), cascade(1 << 20)
    plan_levels(wrapper, 30, (20, 30))
    sessions = [level.session for level in wrapper._levels]
    read = [memory for session in sessions for memory in (session.active[0].slot.memory, session.indices.buffer)]
    before = [memory.clone() for memory in read]
    with pytest.raises(PlanError, match="float_workspace_buffer has 8192 bytes"):
        plan_levels(wrapper, 40, (20, 30000))
    assert all(torch.equal(memory, kept) for memory, kept in zip(read, before, strict=True))
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(Q[:2], KV[:, :, :, :1])
    for which in (wrapper, fresh):
        plan_levels(which, 70, (2, 65))
    torch.testing.assert_close(*(which.run(Q[:2], KV[:, :, :, :1]) for which in (wrapper, fresh)))
    assert not any(torch.equal(memory, kept) for memory, kept in zip(read, before, strict=True))


def test_boxes_that_are_refused_are_bound_by_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the run before, whose fields a refused one may have overwritten."""
    bound: list[Any] = []

    def bind_boxes(_: BoundPart, prepared: Any, views: Any) -> None:
        bound.append(prepared)
        if prepared == "refused":
            raise RunError("no boxes")

    monkeypatch.setattr(BoundPart, "bind_boxes", bind_boxes)
    part: Any = BoundPart(SimpleNamespace(is_batch_invariant=False))  # type: ignore[arg-type]
    for prepared in ("first", "first", "refused", "refused", "first", "first"):
        try:
            part.use_boxes(prepared, {"V": SimpleNamespace(head_dim=64)}, None)
        except RunError:
            assert prepared == "refused"
    assert bound == ["first", "refused", "refused", "first"]
