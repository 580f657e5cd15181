"""The engine's steps over slots that note their tokens: whatever is preempted, cancelled, shared, cut into chunks or
fails, each request reads its own tokens, and the engine comes to an end."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Sequence

import torch
from engine_runs import check_idle, check_pool, small_model

from flashpage.demo.model import Llama
from flashpage.engine import Engine, EngineConfig, Request, State
from flashpage.serving.batch import make_batch
from flashpage.serving.runner import LaunchedStep
from flashpage.serving.scheduler import Work

VOCABULARY, MAX_CONTEXT, ARRIVALS = 40, 64, 250
SEEDS = range(40)


class Failure(Exception):
    """What a step raises at random."""


def next_token(tokens: Sequence[int]) -> int:
    """It depends on each token and its place."""
    return int.from_bytes(hashlib.blake2b(bytes(tokens), digest_size=4).digest(), "big") % VOCABULARY


def greedy(request: Request) -> list[int]:
    """What follows its prompt."""
    tokens: list[int] = []
    while len(tokens) < request.max_new_tokens and not request.stop_tokens.intersection(tokens[-1:]):
        tokens.append(next_token([*request.prompt, *tokens]))
    return tokens


class NotedRunner:
    """In place of ModelRunner: a slot holds its token alone, and the next token follows from those in all slots of a
    request, which the table lists.

    Args:
        failures: the share of launches, and of waits for a step, that raise.
    """

    graphs = None

    def __init__(self, config: EngineConfig, failures: float, rng: random.Random) -> None:
        self._block_size, self._failures, self._random = config.block_size, failures, rng
        self._slots: dict[int, int] = {}
        self._table: dict[tuple[int, int], int] = {}
        self._newest = [-1] * (1 + config.max_requests)
        self.num_failures = 0

    def launch(self, works: list[Work]) -> LaunchedStep:
        """Computes the step, and may fail before or after it."""
        self._fail()
        batch, writes = make_batch(works, self._block_size)
        rows, positions, slots = (numbers.tolist() for numbers in writes)
        self._table.update(zip(zip(rows, positions, strict=True), slots, strict=True))
        tokens = [max(token, self._newest[max(-token, 0)]) for token in batch.tokens.tolist()]
        assert min(tokens) >= 0
        self._slots.update(zip(batch.out_slots.tolist(), tokens, strict=True))
        found = [
            next_token([self._slots[self._table[row, position]] for position in range(length)])
            for row, length in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True)
        ]
        self._newest[1 : 1 + len(found)] = found
        self._fail()
        return LaunchedStep(works, torch.tensor(found), self)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        """As that of the event at a step's end."""
        self._fail()

    def _fail(self) -> None:
        if self._random.random() < self._failures:
            self.num_failures += 1
            raise Failure


class Traffic:
    """Arrivals, cancellations and steps of one engine, all drawn from one seed."""

    def __init__(self, model: Llama, seed: int) -> None:
        self._random = rng = random.Random(seed)
        block_size = rng.choice((1, 2, 4, 16))
        config = EngineConfig(
            num_blocks=1 + rng.choice((-(-40 // block_size), -(-70 // block_size), 400 // block_size)),
            block_size=block_size,
            max_requests=rng.choice((1, 2, 5, 8)),
            max_context=MAX_CONTEXT,
            max_step_tokens=rng.choice((1, 3, 8, 64)),
            reuse_prefixes=rng.random() < 0.8,
            use_graphs=False,
        )
        self.engine = Engine(model, config)
        self.runner = NotedRunner(config, rng.choice((0, 0.05, 0.15)), rng)
        self.engine.runner = self.runner  # type: ignore[assignment]
        self._beginning = self._tokens(20)
        self._longest = min(MAX_CONTEXT, (config.num_blocks - 1) * block_size)
        self.requests: list[Request] = []
        self.ended: list[Request] = []

    def run(self) -> None:
        for _ in range(ARRIVALS):
            if self._random.random() < 0.2:
                self._arrive()
            self._step()
        for _ in range(10_000):
            if not self.engine.has_work:
                return
            self._step()
        raise AssertionError("the engine does not come to an end")

    def check(self) -> None:
        for request in self.requests:
            expected, found = greedy(request), request.generated
            assert found == (expected if request.state is State.FINISHED else expected[: len(found)])
        finished = [request for request in self.requests if request.state is State.FINISHED]
        assert len(self.ended) == len(finished) and set(self.ended) == set(finished)
        assert all(request.state is State.CANCELLED for request in set(self.requests) - set(finished))
        check_idle(self.engine)

    def _step(self) -> None:
        if self.requests and self._random.random() < 0.03:
            self.engine.cancel(self._random.choice(self.requests))
        with contextlib.suppress(Failure):
            self.ended += self.engine.step()
        check_pool(self.engine)

    def _arrive(self) -> None:
        rng = self._random
        prompt = self._beginning[: rng.randrange(20)] + self._tokens(rng.randrange(1, 12))
        stops = frozenset(rng.sample(range(VOCABULARY), rng.choice((0, 1, 8))))
        request = Request(prompt, rng.choice((1, 2, 5, 20)), stops)
        if request.max_len <= self._longest:
            self.engine.add(request)
            self.requests.append(request)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]


def test_each_request_reads_its_own_tokens() -> None:
    model, preemptions, reused, failures, finished = small_model("cpu"), 0, 0, 0, 0
    for seed in SEEDS:
        traffic = Traffic(model, seed)
        try:
            traffic.run()
            traffic.check()
        except AssertionError as error:
            raise AssertionError(f"{seed=}") from error
        statistics = traffic.engine.statistics
        preemptions, reused = preemptions + statistics.preemptions, reused + statistics.reused_tokens
        failures, finished = failures + traffic.runner.num_failures, finished + len(traffic.ended)
    print(f"{preemptions=} {reused=} {failures=} {finished=}")
    assert preemptions > 20 and reused > 5000 and failures > 300 and finished > 800
