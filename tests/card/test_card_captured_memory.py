"""The memory of graphs, on a card: every wrapper and option captured, planned again, run eagerly and replayed.

The list is that of tests/support/captured_walks.py, as in tests/api/test_captured_memory.py.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_runs import CapturedRuns, churn
from captured_subjects import Decode, MixedBatch, PagedPrefill, RaggedPrefill, Subject
from captured_walks import WALKS, Walk

import flashpage

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
REPLAYS = 3


def outputs(found: Any) -> tuple[torch.Tensor, ...]:
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


class Graph:
    """A captured call, with its launches' arguments."""

    def __init__(self, call: Callable[[], Any]) -> None:
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=torch.cuda.Stream()):
            self.runs = CapturedRuns(call, keeps_tensors=False)

    def check(self, subject: Subject, fresh: Subject, i: int) -> None:
        """Compares a replay with another wrapper's result for the batch."""
        self.runs.check_memory()
        expected = outputs(fresh.run(i))
        for _ in range(REPLAYS):
            for out in outputs(self.runs.out):
                out.fill_(math.nan)
            self._graph.replay()
            torch.cuda.synchronize()
            for out, other in zip(outputs(self.runs.out), expected, strict=True):
                used = slice(0, subject.used(i))
                torch.testing.assert_close(out[used], other[used], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("walk", WALKS, ids=str)
def test_graphs_hold_memory_that_stays(walk: Walk) -> None:
    subject, fresh = walk.make(DEVICE), walk.make(DEVICE).fresh()
    subject.plan(0)
    subject.run()
    graph = Graph(subject.run)
    assert graph.runs.addresses
    for i in (0, 1, 2, 0) if subject.is_graph else (0, 0):
        if subject.is_graph:
            subject.plan(i)
        churn(DEVICE)
        subject.run_others(i)
        churn(DEVICE)
        if subject.is_graph and not subject.plans_itself:
            now = CapturedRuns(lambda i=i: subject.run(i), keeps_tensors=False)
            assert now.addresses == graph.runs.addresses
        fresh.plan(i)
        graph.check(subject, fresh, i)


CAPTURED_PLANS = [
    Walk("decode", Decode),
    Walk("decode, ALiBi", Decode, {"pos_encoding_mode": "ALIBI"}),
    Walk("paged prefill", PagedPrefill, {"causal": True}),
    Walk("ragged prefill, window", RaggedPrefill, {"causal": True, "window_left": 9}),
    Walk("mixed batch", MixedBatch),
]


@pytest.mark.parametrize("walk", CAPTURED_PLANS, ids=str)
def test_a_captured_plan_is_right_whatever_is_planned_between(walk: Walk) -> None:
    """Wrappers that are not for graphs: options, workspaces and run-time options change between replays."""
    subject, fresh = walk.make(DEVICE).fresh(), walk.make(DEVICE).fresh()

    def step() -> Any:
        subject.plan(0)
        return subject.run(0)

    step()
    graph = Graph(step)
    fresh.plan(0)
    for i in (1, 2, 0):
        subject.plan(i)
        subject.run_others(i)
        subject.run(i)
        churn(DEVICE)
        graph.check(subject, fresh, 0)


@pytest.mark.parametrize("warm", [True, False], ids=["after a run", "as the first call"])
def test_single_calls_of_a_thread_that_has_ended(warm: bool) -> None:
    import threading

    q, k, v = (torch.randn(60, heads, 64, device=DEVICE, dtype=torch.bfloat16) for heads in (4, 2, 2))
    expected = flashpage.single_prefill_with_kv_cache(q, k, v, causal=True)
    found: list[Any] = []

    def work() -> None:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            if warm:
                flashpage.single_prefill_with_kv_cache(q, k, v, causal=True)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                found.append(flashpage.single_prefill_with_kv_cache(q, k, v, causal=True))
        found.append(graph)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    out, graph = found
    for _ in range(REPLAYS):
        churn(DEVICE)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "for graphs"])
def test_reduce_overhead_follows_plans(is_graph: bool) -> None:
    """Inductor's graphs leave out runs whose launches hold the plan of their capture."""
    pytest.importorskip("triton")
    make = Walk("decode", Decode).make(DEVICE)
    subject, fresh = (make, make.fresh()) if is_graph else (make.fresh(), make.fresh())
    torch._dynamo.reset()
    q, cache = subject.q[:3].clone(), subject.cache

    def step(x: torch.Tensor) -> torch.Tensor:
        return subject.wrapper.run(x * 2, cache) + 1

    compiled = torch.compile(step, mode="reduce-overhead")
    for i in (1, 1, 1, 0, 2, 1):
        subject.plan(i)
        fresh.plan(i)
        churn(DEVICE)
        with torch.no_grad():
            found = compiled(q).clone()
        torch.testing.assert_close(found, fresh.wrapper.run(q * 2, cache) + 1, rtol=2e-2, atol=2e-2)
    gc.collect()


def test_page_numbers_of_the_kernel_before() -> None:
    """The launch directly before attention writes keys, which attention reads by read-only loads."""
    subject, fresh = Walk("decode", Decode).make(DEVICE).fresh(), Walk("decode", Decode).make(DEVICE).fresh()
    indptr, indices, last = subject.pages(0)
    other = (indices + 1) % 48
    numbers = indices.clone()
    subject.wrapper.plan(indptr, numbers, last, 4, 2, 64, 16, q_data_type=subject.dtype)
    expected = []
    for kept in (indices, other):
        fresh.wrapper.plan(indptr, kept, last, 4, 2, 64, 16, q_data_type=subject.dtype)
        expected.append(fresh.wrapper.run(subject.q[:3], subject.cache))
    outs = [torch.empty_like(expected[0]) for _ in range(200)]
    for number, out in enumerate(outs):
        torch.index_select((indices, other)[number % 2], 0, torch.arange(len(numbers), device=DEVICE), out=numbers)
        subject.wrapper.run(subject.q[:3], subject.cache, out=out)
    torch.cuda.synchronize()
    for number, out in enumerate(outs):
        assert torch.equal(out, expected[number % 2])


@pytest.mark.parametrize("rows", [1, 500], ids=["decode", "prefill"])
def test_heads_that_are_expanded(rows: int) -> None:
    """K and V of one head for all heads: strides of 0, also in tensor maps."""
    torch.manual_seed(0)
    kv = [torch.randn(64, 16, 1, 128, device=DEVICE, dtype=torch.float16).expand(64, 16, 4, 128) for _ in range(2)]
    q = torch.randn(rows, 8, 128, device=DEVICE, dtype=torch.float16)
    indptr, pages = torch.tensor([0, rows]).int(), torch.tensor([0, 64]).int()
    found = []
    for cache in (tuple(kv), tuple(t.contiguous() for t in kv)):
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace)
        indices, last = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int(), torch.tensor([16]).int()
        wrapper.plan(indptr, pages, indices.to(DEVICE), last, 8, 4, 128, 16, causal=True)
        found.append(wrapper.run(q, cache))
    torch.testing.assert_close(*found)
