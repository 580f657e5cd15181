"""CUDA graphs on a card: captured once, planned again, replayed; against eager runs and the fp64 reference."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from capacity_steps import decode_steps as capacity_steps
from comparison import Outputs
from graphs import capture
from latent_steps import LatentSteps, append_cases
from latent_steps import decode_cases as latent_cases
from on_device import OnDevice
from steps import Steps, assert_same_bits, decode_cases, prefill_cases

import flashpage
from flashpage import RunError

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
WINDOW = 33
ROUNDS = 1000
ROUNDS_ASLEEP = 40  # between two sleeps of a stream, in which the host plans ahead
NAP_CYCLES = 20_000_000  # about 10 ms: hundreds of plans of host time


@pytest.fixture(scope="module")
def decode_steps() -> Steps:
    return Steps(decode_cases(name="graphs"), DEVICE)


@pytest.mark.parametrize("plan_name", ["plan", "fast_decode_plan"])
@pytest.mark.parametrize("captured", [0, 1, 3], ids=["captured split", "captured short", "captured empty"])
def test_replays_follow_the_plan(plan_name: str, captured: int, decode_steps: Steps) -> None:
    """A capture of any step serves every later step: split or not, and with empty requests."""
    steps, graphed = decode_steps, decode_steps.wrapper(graph=True)
    eager = decode_steps.wrapper(graph=True)  # for equal plans; an eager wrapper may plan for more CTAs
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
    """Two layers in one graph, one of them with a window: every replay copies both new plans."""
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
    """Without graph buffers the plan stays the captured one; q and the cache are read again."""
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
    """The staging slot from which a graph copies is never reused by plans between its replays."""
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
    """Rows past the plan's stay unchanged."""
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
    """Captured on a stream of the second card, while the first card stays current outside."""
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
    """One graph for each of several inputs, as engines capture one for each size; a replay uses the newest plan."""
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


def test_a_graph_that_plans_beside_other_work() -> None:
    """The planning kernel takes one multiprocessor: on its own stream it overlaps the work before attention."""
    steps, side = capacity_steps(DEVICE), torch.cuda.Stream()
    wrapper, lengths = steps.wrapper(), OnDevice(steps)
    product = torch.randn(1024, 1024, device=DEVICE)
    other = torch.empty_like(product)

    def step() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            lengths.plan(wrapper, 0)
        torch.mm(product, product, out=other)
        torch.cuda.current_stream().wait_stream(side)
        steps.run_loaded(wrapper)

    steps.load(0)
    lengths.load(0)
    replay = capture(step)
    for i in (*range(len(steps)), *reversed(range(len(steps)))):
        steps.load(i)
        lengths.load(i)
        replay()
        steps.check(i, Outputs(steps.out, steps.lse))


# ---------------------------------------------------------------- latent rows


@pytest.mark.parametrize("form", ["csr", "dense"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_latent_replays_follow_the_plan(heads: int, form: str) -> None:
    """Decode by each of Hopper's kernels, and by lists of pages or tables."""
    steps = LatentSteps(latent_cases(heads), DEVICE)
    wrapper, batch = steps.wrapper(graph=True), steps.batch
    steps.load(0)
    steps.plan(wrapper, 0, form)
    replay = capture(lambda: steps.run(wrapper, batch))
    for i in (*range(len(steps)), *reversed(range(len(steps)))):
        steps.load(i)
        steps.plan(wrapper, i, form)
        replay()
        steps.check(i)


@pytest.mark.parametrize("captures_plan", [False, True], ids=["planned again", "plan captured"])
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_plans_made_on_the_card(heads: int, captures_plan: bool) -> None:
    """Tables and lengths that the host does not read: batches have fewer rows than max_q_len allows."""
    steps = LatentSteps(append_cases(heads), DEVICE)
    wrapper = steps.wrapper(graph=False)

    def step() -> None:
        steps.plan_on_device(wrapper)
        steps.run(wrapper)

    steps.load(0)
    call = capture(step) if captures_plan else step
    for i in (*range(len(steps)), *reversed(range(len(steps)))):
        steps.load(i)
        call()
        steps.check(i)


# ---------------------------------------------------------------- a thousand rounds, planned while others replay


class Rounds:
    """One wrapper's steps in random order on streams; the host never waits, and each round's output is kept."""

    def __init__(self, steps: Steps, seed: int, *, on_device: bool = False) -> None:
        self.steps, self.wrapper = steps, steps.wrapper(use_cuda_graph=True, **steps.capacity)
        self.lengths = OnDevice(steps) if on_device else None
        self.order = torch.randint(len(steps), (ROUNDS,), generator=torch.Generator().manual_seed(seed)).tolist()
        self.outs = torch.empty((ROUNDS, *steps.out.shape), dtype=steps.out.dtype, device=DEVICE)
        self.lses = torch.empty((ROUNDS, *steps.lse.shape), device=DEVICE)
        self.load(0)
        if self.lengths is None:
            steps.plan(self.wrapper, 0)
        self.replay = capture(self._captured)

    def _captured(self) -> None:
        if self.lengths is not None:
            self.lengths.plan(self.wrapper, 0)
        self.steps.run_loaded(self.wrapper)

    def load(self, i: int) -> None:
        self.steps.load(i)
        if self.lengths is not None:
            self.lengths.load(i)

    def go(self, number: int) -> None:
        """Runs one round on the current stream."""
        if number % ROUNDS_ASLEEP == 0:
            torch.cuda._sleep(NAP_CYCLES)
        i = self.order[number]
        self.load(i)
        if self.lengths is None:
            self.steps.plan(self.wrapper, i)
        self.replay()
        self.outs[number] = self.steps.out
        self.lses[number] = self.steps.lse

    def check(self) -> None:
        """Compares every round with an eager run of its step, bit by bit, and that run with the reference."""
        torch.cuda.synchronize()
        eager = self.steps.wrapper(use_cuda_graph=True, **self.steps.capacity)
        for i in range(len(self.steps)):
            self.load(i)
            if self.lengths is None:
                self.steps.plan(eager, i)
            else:
                self.lengths.plan(eager, i)
            found = self.steps.run_loaded(eager)
            self.steps.check(i, found)
            mine = torch.tensor([number for number in range(ROUNDS) if self.order[number] == i], device=DEVICE)
            for kept, expected, bits in (
                (self.outs, self.steps.out, torch.int16),
                (self.lses, self.steps.lse, torch.int32),
            ):
                differ = (kept[mine].view(bits) != expected.view(bits)).flatten(1).any(1)
                assert not bool(differ.any()), f"step {i}: rounds {mine[differ].tolist()[:10]} differ"


@pytest.mark.parametrize("on_device", [False, True], ids=["host plans", "device plans"])
def test_a_wrapper_a_stream(on_device: bool) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    rounds = [Rounds(capacity_steps(DEVICE), seed, on_device=on_device) for seed in range(len(streams))]
    torch.cuda.synchronize()
    for number in range(ROUNDS):
        for stream, mine in zip(streams, rounds, strict=True):
            with torch.cuda.stream(stream):
                mine.go(number)
    for mine in rounds:
        mine.check()


@pytest.mark.parametrize("on_device", [False, True], ids=["host plans", "device plans"])
def test_one_wrapper_on_two_streams(on_device: bool) -> None:
    """The streams alternate, ordered by the user's events; one graph is replayed on both of them."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    rounds = Rounds(capacity_steps(DEVICE), 7, on_device=on_device)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    done.record()
    for number in range(ROUNDS):
        stream = streams[number % 2]
        stream.wait_event(done)
        with torch.cuda.stream(stream):
            rounds.go(number)
        done = stream.record_event()
    rounds.check()


@pytest.mark.parametrize("where", ["host", "device"])
def test_plans_do_not_wait(where: str) -> None:
    """Lengths and a million page numbers lie in pageable host memory, or on the card."""
    pages = 1 << 20
    room = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
    capacity = {"max_batch": 8, "max_pages": pages}
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(room, use_cuda_graph=True, **capacity)
    heads, options = (32, 8, 128, 16), {"q_data_type": torch.bfloat16}
    indptr = torch.arange(9, dtype=torch.int32) * (pages // 8)
    indices, last = torch.zeros(pages, dtype=torch.int32), torch.full((8,), 16, dtype=torch.int32)
    lens, tables = last.to(DEVICE), indices.view(8, -1).to(DEVICE)

    def plan() -> None:
        if where == "host":
            wrapper.plan(indptr, indices, last, *heads, **options)
        else:
            wrapper.plan_on_device(lens, tables, *heads, **options)

    plan()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    awake = torch.cuda.Event()
    awake.record()
    for _ in range(5):
        plan()
    assert not awake.query(), "the host waited for the stream"
    torch.cuda.synchronize()
