"""`plan_on_device`: plans from lengths on the device, compared with the host's plans and the reference, also in graphs.

On the CPU nothing is captured: the calls that a graph would replay are called again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from capacity_steps import decode_steps, prefill_steps
from cluster_sizes import GENERAL, chosen_for_all
from comparison import Outputs
from graphs import capture
from on_device import UNUSED, OnDevice
from steps import WORKSPACE_BYTES, Steps

import flashpage
from flashpage import PlanError, Variant
from flashpage.plan.session import Planner

MAKE = pytest.mark.parametrize("make", [decode_steps, prefill_steps], ids=["decode", "prefill"])


@MAKE
@pytest.mark.parametrize("captured", [0, 3])
@pytest.mark.parametrize("is_graph", [False, True], ids=["eager wrapper", "capacity"])
def test_a_graph_that_plans_itself(make: Callable[[str], Steps], captured: int, is_graph: bool, device: str) -> None:
    """Captured once with any lengths; each replay uses the lengths that the tensors hold then."""
    steps = make(device)
    wrapper = steps.wrapper(use_cuda_graph=True, **steps.capacity) if is_graph else steps.wrapper()
    lengths = OnDevice(steps)

    def step() -> None:
        lengths.plan(wrapper, captured)
        steps.run_loaded(wrapper)

    steps.load(captured)
    lengths.load(captured)
    replay = capture(step, device)
    for i in (*range(len(steps)), *reversed(range(len(steps)))):
        steps.load(i)
        lengths.load(i)
        replay()
        steps.check(i, Outputs(steps.out, steps.lse))
        assert bool(steps.out[steps.rows[i] :].isnan().all()) and bool(steps.lse[steps.rows[i] :].isnan().all())


@MAKE
def test_it_is_the_hosts_plan(make: Callable[[str], Steps], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal item by item, except for the places of page numbers; a run with another window makes a second plan. The
    device gives no unit its own CTAs."""
    chosen_for_all(monkeypatch, GENERAL)
    steps = make(device)
    ours, usual, lengths = steps.wrapper(), steps.wrapper(), OnDevice(steps)
    for i in range(len(steps)):
        steps.load(i)
        lengths.load(i)
        lengths.plan(ours, i)
        steps.plan(usual, i)
        for options in ({}, {"window_left": 33}):
            usual.run(steps.own_q[i], steps.own_cache[i], **options)
            steps.run_loaded(ours, **options)
            steps.check(i, Outputs(steps.out, steps.lse), **options)
            if make is decode_steps:  # a prefill's kernel and tile depend on the number of rows that may occur
                assert ours.resolved_backend == usual.resolved_backend
                found, expected = ours.last_plan, usual.last_plan
                names = [name for name in found.work_items().dtype.names if name != "kv_offset"]
                np.testing.assert_array_equal(found.work_items()[names], expected.work_items()[names])
                np.testing.assert_array_equal(found.merge_items(), expected.merge_items())
                assert found.explain() == expected.explain()


def test_requests_all_there_and_lengths_in_64_bits(device: str) -> None:
    steps, i = decode_steps(device), 0
    lengths, wrapper = OnDevice(steps), steps.wrapper()
    steps.load(i)
    lengths.load(i)
    lengths.seq_lens = lengths.seq_lens.long()
    lengths.plan(wrapper, i, num_requests=None)
    steps.check(i, steps.run(wrapper, i))


@MAKE
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_a_pools_table(make: Callable[[str], Steps], dtype: torch.dtype, device: str) -> None:
    """Requests use any rows of one table; rows of no request hold numbers that would be noticed."""
    steps, i = make(device), 0
    lengths, wrapper = OnDevice(steps), steps.wrapper()
    lengths.load(i)
    rows = torch.tensor([6, 0, 3, 8, 5][: len(lengths.seq_lens)], device=device)
    pool = torch.full((9, lengths.block_tables.shape[1]), UNUSED, dtype=torch.int32, device=device)
    pool[rows] = lengths.block_tables
    lengths.block_tables = pool
    steps.load(i)
    lengths.plan(wrapper, i, table_rows=rows.to(dtype))
    steps.run_loaded(wrapper)
    steps.check(i, Outputs(steps.out, steps.lse))


def test_plans_of_host_and_device_take_turns(device: str) -> None:
    """A run uses the latest plan of either kind; reading a device plan's arrays copies them to the host."""
    steps = decode_steps(device)
    lengths, wrapper = OnDevice(steps), steps.wrapper()
    for i in (0, 2, 5):
        lengths.load(i)
        lengths.plan(wrapper, i)
        assert wrapper._block_tables is lengths.block_tables
        assert wrapper._paged_kv_last_page_len_buf.tolist() == steps.inputs[i].last_page_len.tolist()
        steps.load(i)
        steps.run_loaded(wrapper)
        steps.check(i, Outputs(steps.out, steps.lse))
        other = (i + 1) % len(steps)
        steps.plan(wrapper, other)
        assert wrapper._block_tables is None and wrapper._batch_size == len(steps.cases[other].kv_lens)
        steps.check(other, steps.run(wrapper, other))


@MAKE
@pytest.mark.parametrize(
    "options", [{}, {"variant": Variant(logit="score * 0.5f"), "window_left": 40}], ids=["", "variant"]
)
def test_host_and_device_share_the_options(
    make: Callable[[str], Steps], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two share one key of options: alternating plans configure the wrapper once."""
    steps = make("cpu")
    lengths, wrapper = OnDevice(steps), steps.wrapper()
    configured = []
    configure = Planner.configure
    monkeypatch.setattr(Planner, "configure", lambda *given: (configured.append(given[1]), configure(*given)))
    for i in (0, 2, 0):
        steps.plan(wrapper, i, **options)
        lengths.load(i)
        lengths.plan(wrapper, i, **options)
    assert len(configured) == 1
    steps.plan(wrapper, 0, **(options | {"window_left": 7}))
    assert len(configured) == 2, "other options"


def arguments(**changed: Any) -> dict[str, Any]:
    given = {
        "seq_lens": torch.tensor([20, 5], dtype=torch.int32),
        "block_tables": torch.tensor([[0, 1], [2, UNUSED]], dtype=torch.int32),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
        "q_data_type": torch.float32,
    }
    return given | changed


ERRORS = [
    ({"seq_lens": None}, "seq_lens=None"),
    ({"seq_lens": torch.tensor([20, 33], dtype=torch.int32)}, "seq_lens has 33 for request 1, which is outside 0..32"),
    ({"seq_lens": torch.tensor([-1, 3], dtype=torch.int32)}, "seq_lens has -1 for request 0"),
    (
        {"seq_lens": torch.tensor([20.0, 5.0])},
        "dtype torch.float32: pass a contiguous tensor of one dimension, int32 or int64",
    ),
    ({"seq_lens": torch.zeros((2, 1), dtype=torch.int32)}, "one dimension"),
    ({"block_tables": torch.zeros((1, 2), dtype=torch.int32)}, r"block_tables has shape \(1, 2\) .* \[2, pages\]"),
    ({"block_tables": torch.zeros((2, 2), dtype=torch.int64)}, "block_tables has dtype torch.int64 .* pass int32"),
    ({"block_tables": torch.zeros((2, 2), dtype=torch.int32).t()}, "contiguous rows"),
    ({"block_tables": torch.tensor([[0, -7], [2, 0]], dtype=torch.int32)}, "block_tables has page -7 in use"),
    ({"num_requests": torch.zeros(2, dtype=torch.int32)}, r"num_requests has shape \(2,\): pass one number"),
    (
        {"table_rows": torch.zeros(3, dtype=torch.int32)},
        "table_rows has 3 entries but seq_lens 2: pass one for each request",
    ),
    ({"table_rows": torch.tensor([0, 2])}, r"table_rows reaches 2 \(least 0\) but block_tables has 2 rows"),
    ({"num_qo_heads": 5}, "num_qo_heads=5 is not a multiple"),
]


@pytest.mark.parametrize(("changed", "says"), ERRORS)
def test_bad_arguments(changed: dict[str, Any], says: str) -> None:
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace)
    with pytest.raises(PlanError, match=says):
        wrapper.plan_on_device(**arguments(**changed))


def test_bad_rows() -> None:
    make = flashpage.BatchPrefillWithPagedKVCacheWrapper
    wrapper = make(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8))
    given = arguments(head_dim_qk=64, qo_indptr=torch.tensor([0, 3, 4], dtype=torch.int32))
    del given["head_dim"]
    with pytest.raises(PlanError, match="max_rows=None: pass the rows of q"):
        wrapper.plan_on_device(**given)
    with pytest.raises(PlanError, match="qo_indptr has 4 for request 2, which is negative or beyond max_rows=3"):
        wrapper.plan_on_device(**given, max_rows=3)
    given["qo_indptr"] = torch.tensor([0, 3, 1], dtype=torch.int32)
    with pytest.raises(PlanError, match="qo_indptr has 1 for request 1, which is smaller than the entry before it"):
        wrapper.plan_on_device(**given, max_rows=4)
    given["qo_indptr"] = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(PlanError, match=r"qo_indptr has 2 entries but seq_lens 2: pass \[batch \+ 1\]"):
        wrapper.plan_on_device(**given, max_rows=4)


def test_workspaces_too_small() -> None:
    """Workspaces are checked for the largest plan of any lengths."""
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8))
    columns = {"block_tables": torch.zeros((2, 400), dtype=torch.int32)}
    with pytest.raises(PlanError, match=r"float_workspace_buffer has 64 bytes but .* may need \d+"):
        wrapper.plan_on_device(**arguments(**columns))
    wrapper.reset_workspace_buffer(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8), torch.empty(64, dtype=torch.uint8))
    wrapper.plan_on_device(**arguments(**columns))  # the int workspace grows by itself
    assert wrapper._int_workspace_buffer.numel() > 64


def test_tensors_may_change_after_the_plan_on_the_cpu() -> None:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8))
    given = arguments()
    wrapper.plan_on_device(**given)
    q, cache = torch.randn(2, 4, 64), torch.randn(3, 2, 16, 2, 64)
    expected = wrapper.run(q, cache)
    for name in ("seq_lens", "block_tables"):
        given[name].fill_(2**30)
    assert torch.equal(wrapper.run(q, cache), expected)
    torch.testing.assert_close(wrapper.run(q, cache, window_left=1000), expected)  # another plan, of the same lengths


def test_page_numbers_beyond_the_cache_are_refused() -> None:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8))
    wrapper.plan_on_device(**arguments())
    with pytest.raises(flashpage.RunError, match="has 2 pages but the plan's block_tables reach 2"):
        wrapper.run(torch.zeros(2, 4, 64), torch.zeros(2, 2, 16, 2, 64))
