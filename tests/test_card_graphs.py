"""CUDA graphs on a card: captured once, planned again, replayed; against eager runs and the fp64 reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import Outputs
from steps import Steps, assert_same_bits, decode_cases, prefill_cases

import flashpage
from flashpage import RunError

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
WINDOW = 33


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a graph; it has run once before, as engines do."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A stream of the current card: torch keeps the one it makes by itself for every later capture, on whichever card.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        call()
    return graph.replay


@pytest.fixture(scope="module")
def decode_steps() -> Steps:
    return Steps(decode_cases(name="graphs"), DEVICE)


@pytest.mark.parametrize("plan_name", ["plan", "fast_decode_plan"])
@pytest.mark.parametrize("captured", [0, 1, 3], ids=["captured split", "captured short", "captured empty"])
def test_replays_follow_the_plan(plan_name: str, captured: int, decode_steps: Steps) -> None:
    """One capture, of whichever step, serves every later one: split or not, and with requests that are empty."""
    steps, graphed, eager = decode_steps, decode_steps.wrapper(graph=True), decode_steps.wrapper()
    fast = functools.partial(flashpage.fast_decode_plan, graphed)
    plan = fast if plan_name == "fast_decode_plan" else graphed.plan
    steps.load(captured)
    steps.plan(graphed, captured, plan)
    replay = capture(lambda: steps.run_loaded(graphed))
    for i in (*range(len(steps)), *reversed(range(len(steps)))):
        steps.load(i)
        steps.plan(graphed, i, plan)
        replay()
        steps.plan(eager, i)
        assert_same_bits(Outputs(steps.out, steps.lse), steps.run(eager, i))
        steps.check(i, Outputs(steps.out, steps.lse))


def test_options_of_a_run_are_captured_too(decode_steps: Steps) -> None:
    """Two layers in one graph, one of them with a window: both plans are made anew for every replay."""
    steps, wrapper = decode_steps, decode_steps.wrapper(graph=True)
    local = Outputs(torch.empty_like(steps.out), torch.empty_like(steps.lse))

    def layers() -> None:
        steps.run_loaded(wrapper)
        wrapper.run(steps.q, steps.cache, out=local.out, lse=local.lse, window_left=WINDOW)

    steps.load(0)
    steps.plan(wrapper, 0)
    replay = capture(layers)
    for i in range(len(steps)):
        steps.load(i)
        local.out.fill_(math.nan)
        steps.plan(wrapper, i)
        replay()
        steps.check(i, Outputs(steps.out, steps.lse))
        steps.check(i, local, window_left=WINDOW)


def test_an_option_that_is_new_in_a_capture_is_refused(decode_steps: Steps) -> None:
    steps, wrapper = decode_steps, decode_steps.wrapper(graph=True)
    steps.load(0)
    steps.plan(wrapper, 0)
    steps.run_loaded(wrapper)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RunError, match=f"window_left={WINDOW}"):
            steps.run_loaded(wrapper, window_left=WINDOW)
        steps.run_loaded(wrapper)  # the capture goes on
    steps.load(0)
    graph.replay()
    steps.check(0, Outputs(steps.out, steps.lse))


def test_an_eager_wrappers_run_is_captured(decode_steps: Steps) -> None:
    """Without graph buffers the plan is the captured one; q and the cache are read anew."""
    steps, wrapper, i = decode_steps, decode_steps.wrapper(), 2
    steps.load(i)
    steps.plan(wrapper, i)
    replay = capture(lambda: steps.run_loaded(wrapper))
    steps.load(i)
    replay()
    steps.check(i, Outputs(steps.out, steps.lse))
    steps.q.mul_(2)
    replay()
    steps.check(i, Outputs(steps.out, steps.lse), sm_scale=2 * steps.cases[i].head_dim ** -0.5)


def test_a_captured_plan_is_copied_at_every_replay(decode_steps: Steps) -> None:
    """The staging slot that a graph copies from is never written again, whatever is planned between the replays."""
    steps, wrapper = decode_steps, decode_steps.wrapper()

    def step(i: int) -> None:
        steps.plan(wrapper, i)
        steps.run_loaded(wrapper)

    steps.load(0)
    replay = capture(lambda: step(0))
    for other in (1, 2, 4, 5, 1, 2):
        steps.load(other)
        step(other)
        steps.check(other, Outputs(steps.out, steps.lse))
        steps.load(0)
        replay()
        steps.check(0, Outputs(steps.out, steps.lse))


@pytest.mark.parametrize("mask", ["", "dense"], ids=["causal", "custom mask"])
def test_prefill_replays_with_fewer_rows(mask: str) -> None:
    """Rows past the plan's are left alone."""
    steps = Steps(prefill_cases(name=f"graphs{mask}", mask=mask), DEVICE)
    graphed, eager = steps.wrapper(graph=True), steps.wrapper()
    largest = steps.rows.index(max(steps.rows))
    steps.load(largest)
    steps.plan(graphed, largest)
    replay = capture(lambda: steps.run_loaded(graphed))
    for i in range(len(steps)):
        steps.load(i)
        steps.plan(graphed, i)
        replay()
        steps.check(i, Outputs(steps.out, steps.lse))
        assert bool(steps.out[steps.rows[i] :].isnan().all()) and bool(steps.lse[steps.rows[i] :].isnan().all())
        steps.plan(eager, i)
        steps.check(i, steps.run(eager, i))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
def test_graphs_on_the_second_card() -> None:
    """Captured on a stream of that card, while the first one stays current outside."""
    steps = Steps(decode_cases(name="graphs"), "cuda:1")
    wrapper = steps.wrapper(graph=True)
    steps.load(0)
    steps.plan(wrapper, 0)
    with torch.cuda.device(1):
        replay = capture(lambda: steps.run_loaded(wrapper))
    for i in range(len(steps)):
        steps.load(i)
        steps.plan(wrapper, i)
        with torch.cuda.device(1):
            replay()
        steps.check(i, Outputs(steps.out, steps.lse))
    assert torch.cuda.current_device() == 0


def test_many_graphs_share_one_wrapper(decode_steps: Steps) -> None:
    """A graph for each of several inputs, as engines capture one a size; the newest plan serves whichever is next."""
    steps, wrapper = decode_steps, decode_steps.wrapper(graph=True)
    steps.load(0)
    steps.plan(wrapper, 0)
    replays: list[Any] = []
    outputs = [Outputs(torch.empty_like(steps.out), torch.empty_like(steps.lse)) for _ in range(3)]
    for found in outputs:
        replays.append(capture(lambda found=found: wrapper.run(steps.q, steps.cache, out=found.out, lse=found.lse)))
    for i in range(len(steps)):
        steps.load(i)
        steps.plan(wrapper, i)
        found = outputs[i % 3]
        found.out.fill_(math.nan)
        replays[i % 3]()
        steps.check(i, found)
