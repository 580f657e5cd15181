"""The memory of graphs: every wrapper and option captured, planned again, run eagerly and replayed.

On the CPU a graph is the launches with their arguments as they were (tests/support/captured_runs.py). The rule is that
of flashpage/base/memory.py; tests/card/test_card_captured_memory.py walks the same list with graphs of a card.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captured_runs import CapturedRuns, churn, few_objects
from captured_subjects import DIM, HEADS, KV_HEADS, LENS, PAGE, Cascade, PagedPrefill, Subject, ints
from captured_walks import WALKS, Walk
from looking_kernels import look_for_tiles

from flashpage import PlanError
from flashpage.wrappers import planned_by_runs

pytestmark = pytest.mark.usefixtures("quick_kernels")


@pytest.fixture(scope="module", autouse=True)
def objects_before() -> Iterator[None]:
    with few_objects():
        yield


def captured(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> CapturedRuns:
    with monkeypatch.context() as patch:
        patch.setattr(planned_by_runs, "is_capturing", lambda _: True)
        return CapturedRuns(subject.run, keeps_tensors=True)


@pytest.mark.parametrize("walk", WALKS, ids=str)
def test_graphs_hold_memory_that_stays(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, fresh = walk.make("cpu"), walk.make("cpu").fresh()
    subject.plan(0)
    subject.run()  # as before every capture
    graph = captured(subject, monkeypatch)
    assert graph.addresses
    for i in (0, 1, 2, 0) if subject.is_graph else (0, 0):
        if subject.is_graph:
            subject.plan(i)
        churn("cpu")
        subject.run_others(i)
        churn("cpu")
        graph.check_memory()
        if subject.is_graph and not subject.plans_itself:
            assert CapturedRuns(lambda i=i: subject.run(i), keeps_tensors=True).addresses == graph.addresses
        if not subject.is_copied:
            for out in outputs(graph.out):
                out.fill_(math.nan)
        graph.replay()
        fresh.plan(i)
        for out, expected in zip(outputs(graph.out), outputs(fresh.run(i)), strict=True):
            torch.testing.assert_close(out[: subject.used(i)], expected[: subject.used(i)])


@pytest.mark.parametrize("as_variation", [False, True], ids=["of plan", "of a run"])
def test_captured_launches_keep_their_options(as_variation: bool) -> None:
    """Replays follow later plans of other options, with the options of the capture and in memory of their own."""
    subject = PagedPrefill("cpu", True, {"causal": True}, {"window_left": 11} if as_variation else {})
    fresh = subject.fresh()
    subject.plan(0)
    subject.run()
    graph = CapturedRuns(subject.run, keeps_tensors=True)
    for i in (0, 1, 2):
        for others in ({"window_left": 5}, {"causal": True, "window_left": 12}, {"causal": False}):
            subject.options = others
            subject.plan(i)
            subject.run_others(i)
        subject.out.fill_(math.nan)
        graph.check_memory()
        graph.replay()
        fresh.plan(i)
        torch.testing.assert_close(subject.out[: subject.used(i)], fresh.run(i)[: subject.used(i)])
    subject.options = {"causal": True}
    subject.plan(1)
    assert CapturedRuns(subject.run, keeps_tensors=True).addresses == graph.addresses


def test_captured_launches_whose_lengths_differ_stay_as_they_were() -> None:
    """A batch with pages of another size has no plan for them."""
    subject = PagedPrefill("cpu", True, {"causal": True}, {})
    subject.plan(0)
    subject.run()
    memory = subject.wrapper._planner.active[0].slot.memory
    before = memory.clone()
    lengths = ints(0, 2), ints(0, 3), ints(2, 1, 0), ints(5)
    subject.wrapper.plan(*lengths, HEADS, KV_HEADS, DIM, PAGE // 2, q_data_type=subject.dtype)
    assert torch.equal(memory, before)
    subject.plan(1)
    assert subject.wrapper._planner.active[0].slot.memory is memory and not torch.equal(memory, before)


@pytest.mark.parametrize("walk", [walk for walk in WALKS if "bits" in walk.name], ids=str)
def test_tiles_of_masks_stay_too(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    look_for_tiles(monkeypatch)
    test_graphs_hold_memory_that_stays(walk, monkeypatch)


@pytest.mark.parametrize("refused", ["pages", "rows", "requests"])
def test_a_level_that_is_refused_leaves_the_others(refused: str) -> None:
    """Mask tiles stay too: a graph that is replayed after the error reads the memory that it read before."""
    subject = Cascade("cpu", True, {"causal": True, "window_left": 20}, {})
    subject.plan(1)
    levels = subject.wrapper._levels
    read = [level.session.active[0].slot.memory for level in levels]
    read += [level.session.indices.buffer for level in levels]
    read += [tensor for mask in subject.wrapper._windows._masks for tensor in mask._variant.tensors.values()]
    before = [memory.clone() for memory in read]
    shared, own = subject.pages(0, (30,)), subject.pages(1)
    rows = [ints(0, 6), ints(0, 1, 4, 6)]
    if refused == "rows":
        rows = [ints(0, 7), ints(0, 1, 4, 7)]
    elif refused == "requests":
        rows, own = [ints(0, 6), ints(0, 1, 6)], subject.pages(1, LENS[1][:2])
    else:
        own = (ints(0, 1, 2, 60), ints(*range(48), *range(12)), ints(1, 1, 1))
    lists = zip(shared, own, strict=True)
    with pytest.raises(PlanError):
        subject.wrapper.plan(rows, *lists, 4, 2, 64, 16, causal=True, window_left=20, q_data_type=torch.float32)
    assert all(torch.equal(memory, kept) for memory, kept in zip(read, before, strict=True))


def outputs(found: Any) -> tuple[torch.Tensor, ...]:
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)
