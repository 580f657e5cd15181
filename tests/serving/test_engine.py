"""The engine's greedy tokens equal the model's own, with shared prefixes, chunks, preemption and captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine_runs import alone, check, check_idle, prompts, small_model

from flashpage import FlashpageError
from flashpage.demo.model import Llama
from flashpage.demo.reference import check_tokens
from flashpage.engine import Engine, EngineConfig, Request, State
from flashpage.integrations import PagedAttention
from flashpage.serving.runner import LaunchedStep

ROOT = Path(__file__).resolve().parents[2]
LENS = [1, 15, 16, 17, 70, 33]
NEW = [20, 9, 9, 1, 30, 24]


@pytest.fixture(scope="module")
def model(device: str) -> Llama:
    return small_model(device)


@pytest.fixture(scope="module")
def expected(model: Llama) -> list[list[int]]:
    return [alone(model, prompt, new) for prompt, new in zip(prompts(LENS), NEW, strict=True)]


def requests_of(lens: list[int], new: list[int], **options: Any) -> list[Request]:
    return [Request(prompt, n) for prompt, n in zip(prompts(lens, **options), new, strict=True)]


ENGINES = {
    "at once": EngineConfig(64, use_graphs=False),
    "two at a time": EngineConfig(64, max_requests=2, use_graphs=False),
    "chunks of 7 tokens": EngineConfig(64, max_step_tokens=7, use_graphs=False),
    "blocks of one token": EngineConfig(400, block_size=1, use_graphs=False),
    "a pool that is too small": EngineConfig(1 + 10, use_graphs=False),
    "small pool, chunks": EngineConfig(1 + 10, max_step_tokens=24, use_graphs=False),
    "captured": EngineConfig(64, max_requests=6, use_graphs=True),
    "captured, some fit": EngineConfig(1 + 10, max_requests=6, max_step_tokens=40, use_graphs=True),
}


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_the_model_alone(name: str, model: Llama, expected: list[list[int]]) -> None:
    config = ENGINES[name]
    engine, requests = Engine(model, config), requests_of(LENS, NEW)
    engine.run(requests)
    assert all(request.state is State.FINISHED for request in requests)
    if model.dtype is torch.float32:
        assert [request.generated for request in requests] == expected
    check(model, requests, least=sum(NEW))
    done = engine.statistics
    assert (done.preemptions > 0) == (config.num_blocks < 64)
    assert (done.captured_steps > 0) == bool(config.use_graphs)
    assert done.steps > done.captured_steps  # prompts are not captured
    assert done.computed_tokens + done.reused_tokens >= sum(LENS) + sum(NEW) - len(NEW)
    check_idle(engine)


def test_the_tokens_are_worth_comparing(expected: list[list[int]]) -> None:
    assert len({token for tokens in expected for token in tokens}) > 60
    assert all(len(set(tokens)) > len(tokens) // 2 for tokens in expected)


@pytest.mark.parametrize("block_size", [1, 16])
def test_prefixes_are_reused(block_size: int, model: Llama) -> None:
    """The second request reuses blocks of the first one's prompt and of its generated tokens."""
    engine = Engine(model, EngineConfig(800 // block_size, block_size=block_size, use_graphs=False))
    first = Request(prompts([50])[0], 30)
    engine.run([first])
    again, longer = Request(list(first.prompt), 30), Request([*first.tokens[:75], 3, 4, 5], 10)
    other = Request([7, *first.prompt[1:]], 5)  # no block is equal, as a block's hash covers all tokens before it
    engine.run([again])
    assert engine.statistics.reused_tokens == 49 // block_size * block_size
    engine.run([longer])
    assert engine.statistics.reused_tokens == (49 // block_size + 75 // block_size) * block_size
    before = engine.statistics.reused_tokens
    engine.run([other])
    assert engine.statistics.reused_tokens == before
    assert again.generated == first.generated or model.dtype is not torch.float32
    check(model, [first, again, longer, other], least=75)
    check_idle(engine)


def test_requests_that_run_share_their_blocks(model: Llama) -> None:
    """Five requests with 64 common tokens and one of their own, in a pool that cannot hold five separate copies."""
    lens = [65] * 5
    engine = Engine(model, EngineConfig(1 + 4 + 5 * 2, max_requests=5, use_graphs=False))
    first, *others = [Request([*prompts([64])[0], i], 12) for i in range(len(lens))]
    engine.add(first)
    engine.step()
    engine.run(others)
    assert engine.statistics.reused_tokens == 4 * 64 and engine.statistics.preemptions == 0
    check(model, [first, *others], least=60)
    check_idle(engine)


def test_without_reuse(model: Llama) -> None:
    engine = Engine(model, EngineConfig(64, reuse_prefixes=False, use_graphs=False))
    for _ in range(2):
        engine.run(requests_of([40], [4]))
    assert engine.statistics.reused_tokens == 0


def test_blocks_that_were_overwritten_are_not_found(model: Llama) -> None:
    engine = Engine(model, EngineConfig(1 + 6, use_graphs=False))
    first, other = requests_of([60, 80], [4, 4])
    for request in (first, other):
        engine.run([request])
    again = Request(list(first.prompt), 4)
    engine.run([again])
    assert engine.statistics.reused_tokens < 48
    check(model, [first, other, again], least=12)


def test_cancelled_requests_leave_no_trace(model: Llama, expected: list[list[int]]) -> None:
    """Cancels a waiting request, one with a prompt in chunks, one that decodes, and one that has ended."""
    engine = Engine(model, EngineConfig(64, max_requests=4, max_step_tokens=24, use_graphs=False))
    requests = requests_of(LENS, NEW)
    for request in requests:
        engine.add(request)
    ended = []
    for step in range(9):
        ended += engine.step()
        if step == 1:
            engine.cancel(requests[5])
        if step == 4:
            assert 0 < requests[4].num_computed < 70
            engine.cancel(requests[4])
        if step == 6:
            assert len(requests[1].generated) > 2
            engine.cancel(requests[1])
    assert requests[3] in ended
    engine.cancel(requests[3])
    engine.run()
    states = [request.state for request in requests]
    assert [state is State.CANCELLED for state in states] == [False, True, False, False, True, True]
    for i in (0, 2, 3):
        assert requests[i].generated == expected[i] or model.dtype is not torch.float32
    check(model, [requests[0], requests[1], requests[2]], least=31)
    check_idle(engine)


def test_a_step_that_fails_is_computed_again(model: Llama) -> None:
    """Also the first step of a request whose first blocks another one has computed: the table must get their slots."""
    engine, (first, other, second) = Engine(model, EngineConfig(64)), requests_of([40, 37, 41], [8, 8, 8], shared=32)
    engine.run([first])
    engine.run([Request(prompts([37], seed=5)[0], 8)])  # the table's row has other slots now
    engine.add(second)
    engine.add(other)
    launch, failures = engine.runner.launch, iter([True, False, True])

    def failing(works: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("out of memory")
        return launch(works)

    engine.runner.launch = failing  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            while True:
                engine.step()
    engine.run()
    assert engine.statistics.reused_tokens == 64
    check(model, [first, second, other], least=24)
    check_idle(engine)


def test_an_interrupt_while_tokens_are_read_loses_none(
    model: Llama, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, requests, read = Engine(model, EngineConfig(64)), requests_of(LENS, NEW), LaunchedStep.read
    calls = iter(range(100))

    def interrupted(step: LaunchedStep) -> list[int]:
        if next(calls) in (0, 5, 6):
            raise KeyboardInterrupt
        return read(step)

    monkeypatch.setattr(LaunchedStep, "read", interrupted)
    for request in requests:
        engine.add(request)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    for _ in range(100):
        engine.step()
    assert all(request.state is State.FINISHED for request in requests)
    if model.dtype is torch.float32:
        assert [request.generated for request in requests] == expected
    check(model, requests, least=sum(NEW))
    check_idle(engine)


def test_a_request_that_ended_while_a_launch_failed_is_returned() -> None:
    """Its stop token was read next to the launch that failed, and nothing is left to launch."""
    model, (request,) = small_model("cpu"), requests_of([5], [9])
    engine = Engine(model, EngineConfig(64))
    request.stop_tokens = frozenset({alone(model, request.prompt, 3)[2]})
    engine.add(request)
    for _ in range(3):
        assert engine.step() == []
    engine.runner.launch = Mock(side_effect=RuntimeError("out of memory"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert request.state is State.FINISHED and engine.has_work
    assert engine.step() == [request]
    check_idle(engine)


def test_a_request_is_added_once(model: Llama) -> None:
    engine, (request, other) = Engine(model, EngineConfig(64)), requests_of([5, 6], [3, 3])
    engine.cancel(other)  # no engine has it
    assert other.state is State.CANCELLED
    engine.add(request)
    for state in ("waiting", "running", "finished", "cancelled"):
        with pytest.raises(FlashpageError, match=f"the request is {state}: add a new Request"):
            engine.add(other if state == "cancelled" else request)
        engine.run() if state == "running" else engine.step()
    check_idle(engine)


def test_requests_that_come_later_join_the_batch(model: Llama) -> None:
    engine = Engine(model, EngineConfig(64, use_graphs=False))
    requests = requests_of(LENS, NEW)
    for request in requests:
        engine.add(request)
        engine.step()
    assert len(engine.scheduler.running) > 3
    engine.run()
    check(model, requests, least=sum(NEW))


@pytest.mark.parametrize("name", ENGINES)
def test_stop_tokens(name: str, model: Llama, expected: list[list[int]]) -> None:
    """A step that was launched before the stop token was read adds no token. In some engines requests are preempted
    then, and others get the blocks."""
    engine, requests = Engine(model, ENGINES[name]), requests_of(LENS, NEW)
    stops = [tokens[len(tokens) // 2] for tokens in expected]
    for request, stop in zip(requests, stops, strict=True):
        request.stop_tokens = frozenset({stop})
    engine.run(requests)
    if model.dtype is torch.float32:
        cut = [tokens[: tokens.index(stop) + 1] for tokens, stop in zip(expected, stops, strict=True)]
        assert [request.generated for request in requests] == cut
    assert all(request.state is State.FINISHED for request in requests)
    engine.step()  # what was launched for requests that have ended
    check_idle(engine)


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(model: Llama) -> None:
    engine, order = Engine(model, EngineConfig(64)), []
    launch, commit = engine.runner.launch, engine.scheduler.commit

    def noted(call: Any, name: str) -> Any:
        return lambda *arguments: (order.append(name), call(*arguments))[1]

    engine.runner.launch = noted(launch, "launch")  # type: ignore[method-assign]
    engine.scheduler.commit = noted(commit, "commit")  # type: ignore[method-assign]
    (request,) = requests_of([5], [4])
    engine.run([request])
    assert order == ["launch", *["launch", "commit"] * 3, "commit"]
    assert len(request.generated) == 4 and engine.statistics.computed_tokens == 5 + 3


@pytest.mark.parametrize("use_graphs", [False, True])
def test_backends_see_tokens_in_forward(use_graphs: bool) -> None:
    """Those that the host has not read are known by then."""
    least = []

    class Noted(PagedAttention):
        def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *others: Any) -> torch.Tensor:
            least.append(int(batch.tokens.min()))
            return super().forward(q, k, v, layer, batch, *others)

    engine = Engine(small_model("cpu"), EngineConfig(64, use_graphs=use_graphs), Noted)
    engine.run(requests_of(LENS, NEW))
    assert min(least) >= 0 and len(least) >= 2 * max(NEW)


def test_a_wrong_page_makes_the_check_fail(model: Llama) -> None:
    """For one step, an entry of the request table points at another request's page."""
    engine = Engine(model, EngineConfig(64, use_graphs=False))
    requests = requests_of([70, 70], [30, 30], seed=3)
    for request in requests:
        engine.add(request)
    engine.step()
    slots = engine.table.slots
    slots[requests[0].row, :16] = slots[requests[1].row, :16].clone()
    engine.run()
    assert check_tokens(model, requests[:1]).wrong > 0
    assert check_tokens(model, requests[1:]).wrong == 0


@pytest.mark.parametrize(
    ("prompt_len", "new"), [(0, 4), (4, 0), (30, 80), (100, 1)], ids=["no prompt", "nothing", "context", "pool"]
)
def test_requests_that_cannot_run_are_reported(prompt_len: int, new: int) -> None:
    engine = Engine(small_model("cpu"), EngineConfig(1 + 6, max_context=100))
    with pytest.raises(FlashpageError, match=f"{prompt_len} prompt tokens and max_new_tokens={new}"):
        engine.add(Request(list(range(prompt_len)), new))


def test_tokens_that_no_vocabulary_has_are_reported() -> None:
    engine = Engine(small_model("cpu"), EngineConfig(8))
    with pytest.raises(FlashpageError, match="the request's prompt has token -2: pass tokens of the vocabulary, 0 or"):
        engine.add(Request([5, -2, -1], 3))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"num_blocks": 1}, "num_blocks=1 is out of range: pass at least 2"),
        ({"block_size": 0}, "block_size=0 is out of range: pass at least 1"),
        ({"max_step_tokens": 0}, "max_step_tokens=0"),
        ({"max_requests": "many"}, "max_requests='many' is of type str: pass an integer"),
    ],
)
def test_a_config_that_cannot_run_is_reported(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(FlashpageError, match=told):
        EngineConfig(**{"num_blocks": 8, **wrong})


def test_chunks_stay_within_the_steps_size(model: Llama) -> None:
    """Decodes go on next to a long prompt's chunks."""
    engine = Engine(model, EngineConfig(64, max_step_tokens=16, use_graphs=False))
    short, long = requests_of([5, 120], [20, 4])
    engine.add(short)
    engine.step()
    engine.add(long)
    sizes, launch = [], engine.runner.launch

    def noted(works: Any) -> Any:
        sizes.append([work.end - work.begin for work in works])
        return launch(works)

    engine.runner.launch = noted  # type: ignore[method-assign]
    engine.run()
    assert sizes[:8] == [[1, 15]] * 8  # 120 tokens of the prompt
    assert all(sum(step) <= 16 for step in sizes)
    check(model, [short, long], least=24)


def test_steps_are_filled_with_several_prompts_and_no_further() -> None:
    engine = Engine(small_model("cpu"), EngineConfig(64, max_step_tokens=40))
    for request in requests_of([30, 30, 30], [2, 2, 2]):
        engine.add(request)
    assert [work.end - work.begin for work in engine.scheduler.schedule()] == [30, 10]


def test_who_made_room_comes_back_before_those_who_never_ran() -> None:
    """Two requests fill the pool; the later one is preempted, and waits in front of the third."""
    engine = Engine(small_model("cpu"), EngineConfig(1 + 4))
    first, second, third = requests_of([31, 31, 31], [20, 20, 20])
    for request in (first, second, third):
        engine.add(request)
    while not engine.statistics.preemptions:
        engine.step()
    assert engine.scheduler.running == [first] and list(engine.scheduler.waiting) == [second, third]
    assert second.num_preemptions == 1 and second.state is State.WAITING and not second.blocks


@pytest.mark.parametrize(
    ("lens", "new"), [([28, 30], [4, 12]), ([15, 50, 1], [1, 5, 4])], ids=["for a decode", "before a waiting request"]
)
def test_a_request_that_is_ending_makes_room(lens: list[int], new: list[int]) -> None:
    """The second request lacks blocks while the first one's last token is not read. It misses a step, and no block
    that is free goes to the third one, which would be preempted for it."""
    engine = Engine(small_model("cpu"), EngineConfig(1 + 4, max_step_tokens=32, reuse_prefixes=False))
    requests = requests_of(lens, new)
    engine.run(requests)
    assert engine.statistics.preemptions == 0
    assert [len(request.generated) for request in requests] == new
    check_idle(engine)


def test_ragged_extends_give_the_same_tokens(model: Llama) -> None:
    """The other kind of extend: attention to new tokens as given, merged with that over the pool."""

    def ragged(*arguments: Any) -> PagedAttention:
        return PagedAttention(*arguments, ragged_extend=True)

    engine = Engine(model, EngineConfig(64, max_step_tokens=20, use_graphs=False), ragged)
    requests = requests_of(LENS, NEW)
    engine.run(requests)
    check(model, requests, least=sum(NEW))
