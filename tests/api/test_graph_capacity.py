"""One wrapper for every batch up to a capacity: one captured launch serves each of them, whichever batch was captured.

On the CPU nothing is captured: the structs of one run are run again, as a replay does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capacity_steps import capture, decode_steps, prefill_steps
from cases.case import Case, decode
from comparison import Outputs
from steps import Steps

import flashpage
from flashpage import PlanError

POISON = 2**30  # no page has this number


@pytest.mark.parametrize("captured", [0, 1, 3])
@pytest.mark.parametrize("make", [decode_steps, prefill_steps], ids=["decode", "prefill"])
def test_one_launch_serves_every_batch(make: Callable[[str], Steps], captured: int, device: str) -> None:
    """Rows past the plan's stay unchanged, and page numbers past the batch's are not read."""
    steps = make(device)
    wrapper = steps.wrapper(use_cuda_graph=True, **steps.capacity)
    steps.load(captured)
    steps.plan(wrapper, captured)
    replay, places = capture(wrapper, steps), places_of(wrapper)
    for i in (*range(len(steps)), *reversed(range(len(steps)))):
        steps.load(i)
        wrapper._paged_kv_indices_buf.fill_(POISON)
        steps.plan(wrapper, i)
        replay()
        steps.check(i, Outputs(steps.out, steps.lse))
        assert bool(steps.out[steps.rows[i] :].isnan().all()) and bool(steps.lse[steps.rows[i] :].isnan().all())
        assert places_of(wrapper) == places, "something moved"


def places_of(wrapper: Any) -> tuple[Any, ...]:
    """The addresses and sizes that a captured launch holds."""
    planner = wrapper._planner
    option_plan = planner.active[0]
    part = option_plan.parts[0]
    return (
        option_plan.slot.memory.data_ptr(),
        planner.indices.address,
        planner.workspaces.partials(option_plan.options.head_dim_vo),
        part.num_ctas,
        part.cluster_size,
        part.num_merges,
        part.prepared.choice.spec,
    )


@pytest.mark.parametrize("place", ["host int32", "host int64", "the work's device"])
def test_page_numbers_come_from_anywhere(place: str, device: str) -> None:
    """The caller may overwrite its tensors on the host at once."""
    steps = decode_steps(device)
    wrapper, i = steps.wrapper(use_cuda_graph=True, **steps.capacity), 0
    steps.load(i)
    case, inputs = steps.cases[i], steps.inputs[i]
    indices = inputs.indices.to(device if "device" in place else "cpu", torch.int64 if "64" in place else torch.int32)
    indices = torch.cat(
        [indices.clone(), indices.new_full((9,), POISON)]
    )  # more than are in use, and more than the buffer holds
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    wrapper.plan(
        inputs.indptr, indices, inputs.last_page_len, *heads, q_data_type=steps.q.dtype, sm_scale=case.sm_scale
    )
    if "host" in place:
        indices.fill_(POISON)
    steps.check(i, steps.run_loaded(wrapper))


def test_the_kernel_follows_from_the_capacity() -> None:
    """The kernel depends on the capacity, not on the first batch."""
    steps = prefill_steps("cpu")
    specs = []
    for first in (0, 2):
        wrapper = steps.wrapper(use_cuda_graph=True, **steps.capacity)
        steps.plan(wrapper, first)
        specs.append((wrapper._planner.active[0].prepared.problem, wrapper._planner.active[0].prepared.choice.spec))
    assert specs[0] == specs[1]


def case(lens: tuple[int, ...]) -> Case:
    return decode("capacity-errors", "refused", lens, cache="fused")


@pytest.mark.parametrize(
    ("capacity", "says"),
    [
        ({"max_batch": 1, "max_pages": 99}, "has 2 requests but the wrapper has max_batch=1: make it larger"),
        ({"max_batch": 2, "max_pages": 4}, r"has \d+ pages but the wrapper has max_pages=4"),
        ({"max_batch": 2, "max_pages": 99, "max_rows": 1}, "has 2 rows but the wrapper has max_rows=1"),
    ],
)
def test_a_batch_beyond_the_capacity_is_refused(capacity: dict[str, int], says: str) -> None:
    steps = Steps([case((100, 200))], "cpu")
    wrapper = steps.wrapper(use_cuda_graph=True, **capacity)
    with pytest.raises(PlanError, match=says):
        steps.plan(wrapper, 0)
    with pytest.raises(flashpage.RunError, match="has no plan"):
        steps.run_loaded(wrapper)


def test_workspaces_are_judged_by_the_largest_batch() -> None:
    """Workspaces are checked at the first plan, for the whole capacity; then no batch within it can fail."""
    steps = Steps([case((5,))], "cpu")
    capacity = {"use_cuda_graph": True, "max_batch": 3000, "max_pages": 99999}
    small = torch.empty(1 << 10, dtype=torch.uint8)
    with pytest.raises(PlanError, match=r"float_workspace_buffer has 1024 bytes .* max_batch=3000 .* need \d+"):
        steps.plan(steps.wrapper(small, **capacity), 0)
    wrapper = steps.wrapper(**capacity)
    wrapper.reset_workspace_buffer(wrapper._float_workspace_buffer, small)
    steps.plan(wrapper, 0)
    assert wrapper._int_workspace_buffer.numel() > 1024, "no graph reads it before the first plan: it grows"


def workspace() -> torch.Tensor:
    return torch.empty(1 << 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_batch": 4, "max_pages": 9, "use_cuda_graph": False}, "max_batch with use_cuda_graph=False"),
        ({"max_batch": 4}, "max_pages=None but other capacities are given"),
        ({"max_pages": 4}, "max_batch=None but other capacities are given"),
        ({"max_batch": -1, "max_pages": 4}, "max_batch=-1 is out of range"),
        (
            {"max_batch": 1, "max_pages": 4, "paged_kv_indptr_buffer": torch.zeros(2, dtype=torch.int32)},
            "max_batch=1 and paged_kv_indptr_buffer both size the batch",
        ),
    ],
)
def test_bad_capacities(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace(), **({"use_cuda_graph": True} | given))


def test_ragged_capacity(device: str) -> None:
    torch.manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (torch.randn(300, heads, 64).to(device, dtype) for heads in (4, 2, 2))
    room = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    make = flashpage.BatchPrefillWithRaggedKVCacheWrapper
    capacity = {"max_batch": 3, "max_kv_rows": 300, "max_rows": 300}
    wrapper, eager = make(room, use_cuda_graph=True, **capacity), make(room.clone())
    for ends in ([0, 100, 290, 300], [0, 7], [0, 0, 33]):
        indptr = torch.tensor(ends, dtype=torch.int32)
        for planned in (wrapper, eager):
            planned.plan(indptr, indptr, 4, 2, 64, causal=True, q_data_type=dtype)
        found = wrapper.run(q, k, v)
        torch.testing.assert_close(found[: ends[-1]], eager.run(q[: ends[-1]], k, v), rtol=2e-3, atol=2e-3)
    with pytest.raises(PlanError, match="has 301 rows but the wrapper has max_rows=300"):
        over = torch.tensor([0, 301], dtype=torch.int32)
        wrapper.plan(over, over, 4, 2, 64, q_data_type=dtype)
