"""The engine under random arrivals, cancellations and shared prefixes: sampled outputs equal the model's own, and
memory does not grow. Short in CI; 10,000 steps on a card."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from pathlib import Path

import pytest
import torch
from engine_runs import SMALL, check, check_idle, check_pool, small_model

from flashpage.demo.model import Llama
from flashpage.engine import Engine, EngineConfig, Request, State

CONFIG = EngineConfig(num_blocks=1 + 60, max_requests=12, max_context=320, max_step_tokens=96, use_graphs=True)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of the process and of the card. Pinned memory is resident, so a leak of it shows in the first number."""

    resident: int
    torch_allocated: int
    torch_reserved: int

    @staticmethod
    def now(device: torch.device) -> Memory:
        ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system, as it would hide later allocations
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if device.type != "cuda":
            return Memory(pages * 4096, 0, 0)
        torch.cuda.synchronize(device)
        # The card's free memory is no measure, because other processes take some of it at the same time.
        return Memory(pages * 4096, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


class Traffic:
    """Arrivals in bursts; half of the prompts begin with one of a few common texts; some requests are cancelled."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self._random = engine, random.Random(seed)
        self._texts = [self._tokens(n) for n in (32, 100, 200)]
        self.open: list[Request] = []
        self.steps = self.arrived = self.cancelled = 0
        self.sample: list[Request] = []  # one in twenty of the finished requests
        self.longest_queue = 0

    def step(self) -> None:
        rng, engine = self._random, self.engine
        if rng.random() < 0.25:
            for _ in range(rng.choice((1, 1, 1, 2, 2, 4, 8)) if len(self.open) < 40 else 0):
                self._arrive()
        if self.open and rng.random() < 0.02:
            request = rng.choice(self.open)
            engine.cancel(request)
            self.cancelled += 1
            assert request.state is State.CANCELLED
        for request in engine.step():
            assert request.state is State.FINISHED and len(request.generated) == request.max_new_tokens
            if rng.random() < 0.05:
                self.sample.append(request)
        self.open = [r for r in self.open if r.state in (State.WAITING, State.RUNNING)]
        self.steps += 1
        if self.steps % 25 == 0:
            check_pool(engine)
        self.longest_queue = max(self.longest_queue, len(engine.scheduler.waiting))
        assert len(self.open) == len(engine.scheduler.waiting) + len(engine.scheduler.running)

    def drain(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def _arrive(self) -> None:
        rng = self._random
        prompt = self._tokens(rng.choice((1, 3, 15, 16, 17, 40, 90)))
        if rng.random() < 0.5:
            prompt = (rng.choice(self._texts) + prompt)[:240]
        request = Request(prompt, rng.choice((1, 2, 8, 20, 60)))
        self.engine.add(request)
        self.open.append(request)
        self.arrived += 1

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(SMALL.vocabulary) for _ in range(count)]


def run(model: Llama, steps: int, warm_up: int) -> tuple[Engine, Traffic, Memory, Memory]:
    """Memory after `warm_up` steps, and after all steps."""
    engine = Engine(model, CONFIG)
    traffic = Traffic(engine, seed=steps)
    for _ in range(warm_up):
        traffic.step()
    before = Memory.now(model.device)
    for _ in range(steps - warm_up):
        traffic.step()
    after = Memory.now(model.device)
    traffic.drain()
    return engine, traffic, before, after


def check_run(model: Llama, engine: Engine, traffic: Traffic, least_sample: int) -> None:
    done = engine.statistics
    assert done.preemptions > 10 and done.reused_tokens > 1000 and traffic.cancelled > 3 and traffic.longest_queue > 3
    assert done.steps // 4 < done.captured_steps < done.steps
    check_idle(engine)
    known = engine.blocks
    assert len(known._block_of) == len(known._hash_of) < CONFIG.num_blocks
    assert len(traffic.sample) >= least_sample
    check(model, traffic.sample, least=least_sample)


def test_stress_on_the_cpu() -> None:
    model = small_model("cpu")
    engine, traffic, before, after = run(model, steps=700, warm_up=300)
    check_run(model, engine, traffic, least_sample=5)
    assert after.resident - before.resident < 32 << 20


@pytest.mark.cuda
def test_ten_thousand_steps_on_a_card() -> None:
    """Device memory does not grow by a byte that torch counts, and the process only by its heap's noise."""
    model = small_model("cuda")
    engine, traffic, before, after = run(model, steps=10_000, warm_up=2_000)
    check_run(model, engine, traffic, least_sample=50)
    print(f"{traffic.arrived} requests, {traffic.cancelled} cancelled, {len(traffic.sample)} compared", end="; ")
    print(f"{engine.statistics}; before {before}; after {after}")
    assert after.torch_allocated <= before.torch_allocated + (1 << 20)
    assert after.torch_reserved <= before.torch_reserved + (16 << 20)
    assert after.resident <= before.resident + (48 << 20)


def test_a_leak_would_show() -> None:
    """Memory that is pinned or merely touched counts as resident, also where the heap had room for it."""
    freed = [bytearray(100 << 10) for _ in range(1000)]  # small enough for the heap
    del freed[:-1]  # the last one keeps the heap from shrinking
    before = Memory.now(torch.device("cpu"))
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert Memory.now(torch.device("cpu")).resident - before.resident > 48 << 20
    assert held[0] == 1
