"""Launches on a card: threads, streams, plans in flight, chains of dependent launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch
from comparison import Outputs
from reference import Options, attention
from steps import WORKSPACE_BYTES, Steps, decode_cases, prefill_cases

import flashpage

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
SLEEP_CYCLES = 1_000_000_000  # about half a second: hundreds of plans and runs of host time


@pytest.fixture(scope="module")
def decode_steps() -> Steps:
    return Steps(decode_cases(count=24, name="card"), DEVICE)


@pytest.fixture(scope="module")
def prefill_steps() -> Steps:
    return Steps(prefill_cases(count=12, name="card"), DEVICE)


def workspace() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)


def asleep() -> torch.cuda.Event:
    """Keeps the current stream busy; returns an event that is done when the stream wakes up."""
    torch.cuda._sleep(SLEEP_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


class Worker(threading.Thread):
    """A thread whose exception `finish` raises."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.join()
        if self.error is not None:
            raise self.error


# ---------------------------------------------------------------- threads, streams, cards


def current_context() -> int | None:
    """This thread's CUDA context, from the driver: a call to torch would create one."""
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


@pytest.mark.parametrize("where", ["planned in the thread", "made in the thread"])
def test_a_thread_without_a_context(where: str, decode_steps: Steps) -> None:
    steps, i = decode_steps, 0
    steps.load(i)
    buffer, wrappers = workspace(), [steps.wrapper()]
    torch.cuda.synchronize()
    contexts: list[int | None] = []

    def work() -> None:
        contexts.append(current_context())
        wrapper = wrappers[0] if where == "planned in the thread" else steps.wrapper(buffer)
        wrappers.append(wrapper)
        steps.plan(wrapper, i)
        steps.run_loaded(wrapper)

    thread = Worker(work)
    thread.start()
    thread.finish()
    assert contexts == [None]
    steps.check(i, Outputs(steps.out, steps.lse))
    steps.plan(wrappers[-1], 1)  # and back in this thread
    steps.check(1, steps.run(wrappers[-1], 1))


def test_threads_side_by_side(decode_steps: Steps, prefill_steps: Steps) -> None:
    """All threads at once, each with its own wrapper and stream."""
    barrier = threading.Barrier(4)
    found: list[list[Outputs]] = [[] for _ in range(4)]
    kinds = [decode_steps, prefill_steps] * 2
    torch.cuda.synchronize()

    def work(number: int) -> None:
        steps = kinds[number]
        barrier.wait(60)
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            wrapper = steps.wrapper()
            for i in range(len(steps)):
                steps.plan(wrapper, i)
                found[number].append(steps.run(wrapper, i))

    threads = [Worker(lambda number=number: work(number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.finish()
    torch.cuda.synchronize()
    for steps, outputs in zip(kinds, found, strict=True):
        for i, output in enumerate(outputs):
            steps.check(i, output)


def test_a_side_stream_does_not_wait(prefill_steps: Steps) -> None:
    """Copies of plans and launches go to the current stream, so another stream that sleeps does not delay them."""
    steps, wrapper, i = prefill_steps, prefill_steps.wrapper(), 2
    steps.plan(wrapper, i)
    found = steps.run(wrapper, i)
    found.out.zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    awake = asleep()
    with torch.cuda.stream(side):
        steps.plan(wrapper, i)
        wrapper.run(steps.own_q[i], steps.own_cache[i], out=found.out, lse=found.lse)
    side.synchronize()
    assert not awake.query()
    torch.cuda.synchronize()
    steps.check(i, found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
def test_two_cards_in_turns(prefill_steps: Steps) -> None:
    """The host never waits, and the first card stays the current one."""
    both = (prefill_steps, Steps(prefill_steps.cases, "cuda:1"))
    wrappers = [steps.wrapper() for steps in both]
    found = []
    for i in range(len(prefill_steps)):
        for steps, wrapper in zip(both, wrappers, strict=True):
            steps.plan(wrapper, i)
            found.append((steps, i, steps.run(wrapper, i)))
            assert torch.cuda.current_device() == 0
    for steps, i, outputs in found:
        assert str(outputs.out.device) == steps.device
        steps.check(i, outputs)


# ---------------------------------------------------------------- plans in flight


def test_plans_in_flight(decode_steps: Steps, prefill_steps: Steps) -> None:
    """The device sleeps while the host plans and runs dozens of batches of two wrappers that share a workspace.

    No staging slot may be written before its copy is done. In the second round there are enough slots, so the host must
    not wait at all.
    """
    buffer = workspace()
    kinds = [(steps, steps.wrapper(buffer)) for steps in (decode_steps, prefill_steps)]
    for steps, wrapper in kinds:
        steps.plan(wrapper, 0)
        steps.run(wrapper, 0)
    for round_number in range(2):
        torch.cuda.synchronize()
        awake, found = asleep(), []
        for i in range(max(len(steps) for steps, _ in kinds)):
            for steps, wrapper in kinds:
                steps.plan(wrapper, i % len(steps))
                found.append((steps, i % len(steps), steps.run(wrapper, i % len(steps))))
        if round_number == 1:
            assert not awake.query()
        torch.cuda.synchronize()
        for steps, i, outputs in found:
            steps.check(i, outputs)


def test_lengths_may_be_reused_at_once(decode_steps: Steps) -> None:
    """The caller may overwrite its host tensors when plan returns, even if a later run makes another plan from them."""
    steps, wrapper, i = decode_steps, decode_steps.wrapper(), 0
    inputs, case = steps.inputs[i], steps.cases[i]
    indptr, last_page_len = inputs.indptr.clone(), inputs.last_page_len.clone()
    asleep()
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    wrapper.plan(indptr, steps.indices[i], last_page_len, *sizes, q_data_type=steps.q.dtype)
    indptr.fill_(2**30)
    last_page_len.fill_(-1)
    found, local = steps.run(wrapper, i), steps.run(wrapper, i, window_left=20)
    steps.check(i, found)
    steps.check(i, local, window_left=20)


def test_nothing_is_allocated_where_outputs_are_given(decode_steps: Steps) -> None:
    steps, wrapper = decode_steps, decode_steps.wrapper()
    steps.load(0)
    steps.plan(wrapper, 0)
    steps.run_loaded(wrapper)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        steps.plan(wrapper, 0)
        steps.run_loaded(wrapper)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# ---------------------------------------------------------------- chains of dependent launches


class Chain:
    """A decode loop of two layers in which every launch reads the output of the launch before it."""

    heads, kv_heads, dim, page, steps = 4, 2, 64, 16, 60
    begin = (1, 15, 700, 130, 2500)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        rows = torch.randn(self.steps, len(self.begin), self.heads, self.dim, generator=generator)
        self.rows = rows.to(DEVICE, torch.bfloat16)
        counts = [-(-(n + self.steps) // self.page) for n in self.begin]
        self.table = torch.randperm(sum(counts), generator=generator).to(torch.int32).split(counts)
        shape = (2, sum(counts), 2, self.page, self.kv_heads, self.dim)
        self.prompt = torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)
        self.requests = torch.arange(len(self.begin), dtype=torch.int32, device=DEVICE)
        self.lengths = [self.lengths_of(step) for step in range(self.steps)]

    def lengths_of(self, step: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Arguments of plan (indptr, pages, last_page_len) and of append (positions, pages, indptr, last_page_len). All
        are made beforehand, as copies from the host would wait."""
        lens = torch.tensor(self.begin) + step + 1
        counts = (lens + self.page - 1) // self.page
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
        last = (lens - (counts - 1) * self.page).to(torch.int32)
        pages = torch.cat([own[:n] for own, n in zip(self.table, counts.tolist(), strict=True)]).to(DEVICE)
        positions = (lens - 1).to(torch.int32)
        return (indptr, pages, last), (positions.to(DEVICE), pages, indptr.to(DEVICE), last.to(DEVICE))

    def run(self, enable_pdl: bool | None, wait: bool) -> torch.Tensor:
        """Outputs of the second layer, [steps, batch, heads, dim]; `wait`: the host waits after every call."""
        self.caches = self.prompt.clone()
        wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
        pause = torch.cuda.synchronize if wait else lambda: None
        outs: list[torch.Tensor] = []
        for step, (lengths, (positions, *pages)) in enumerate(self.lengths):
            q = self.rows[step] + outs[-1] if outs else self.rows[step]
            if step % 2:
                self.plan(wrapper, lengths)
                pause()
            for cache in self.caches:
                new = q[:, : self.kv_heads]
                flashpage.append_paged_kv_cache(new, new, self.requests, positions, cache, *pages)
                pause()
            if not step % 2:
                self.plan(wrapper, lengths)
                pause()
            self.between = wrapper.run(q, self.caches[0], enable_pdl=enable_pdl)
            pause()
            outs.append(wrapper.run(self.between, self.caches[1], enable_pdl=enable_pdl))
            pause()
        return torch.stack(outs)

    def plan(self, wrapper: flashpage.BatchDecodeWithPagedKVCacheWrapper, lengths: tuple[torch.Tensor, ...]) -> None:
        wrapper.plan(*lengths, self.heads, self.kv_heads, self.dim, self.page, q_data_type=torch.bfloat16)

    def exact(self) -> torch.Tensor:
        """The last step's second layer in fp64, from the first layer's output and the cache's contents."""
        outs = []
        for request, begin in enumerate(self.begin):
            pages = self.caches[1].cpu()[self.table[request].long()]
            k, v = (pages[:, i].flatten(0, 1)[: begin + self.steps] for i in (0, 1))
            q = self.between[request : request + 1].cpu()
            outs.append(attention(q, k, v, Options(sm_scale=self.dim**-0.5)).out)
        return torch.cat(outs)


def test_dependent_launches() -> None:
    """Append, plan, run, run, with and without programmatic dependent launch: bitwise equal to a chain that waits."""
    chain = Chain()
    expected = chain.run(enable_pdl=False, wait=True)
    exact = chain.exact()
    assert (expected[-1].cpu().double() - exact).norm() < 2**-7 * exact.norm()
    for enable_pdl in (True, None, False):
        for _ in range(5):
            assert torch.equal(chain.run(enable_pdl, wait=False), expected), f"enable_pdl={enable_pdl}"
