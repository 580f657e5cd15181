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
from captured_subjects import LENS, Cascade, Subject, ints
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
