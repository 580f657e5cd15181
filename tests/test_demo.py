"""The demo: its tokens are torch's, its check can fail, and its pages are given back."""

from __future__ import annotations

import copy

import pytest
import torch

from flashpage.demo.engine import Engine, Request
from flashpage.demo.main import make_requests, num_pages, run_demo
from flashpage.demo.model import Config, Llama
from flashpage.demo.reference import check_tokens

SMALL = Config(vocabulary=512, hidden=128, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=32, intermediate=256)


@pytest.fixture(scope="module")
def model() -> Llama:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Llama(SMALL, device, torch.float16 if device.type == "cuda" else torch.float32)


@pytest.fixture(scope="module")
def finished(model: Llama) -> tuple[Engine, list[Request]]:
    """Lengths on both sides of a page's end; one request is done after its first token."""
    requests = [Request(list(range(1, n + 1)), new) for n, new in ((1, 20), (15, 9), (16, 9), (17, 1), (70, 30))]
    engine = Engine(model, num_pages(requests))
    engine.generate(requests)
    return engine, requests


def test_tokens_are_those_of_torch(model: Llama, finished: tuple[Engine, list[Request]]) -> None:
    _, requests = finished
    assert [len(request.generated) for request in requests] == [20, 9, 9, 1, 30]
    verdict = check_tokens(model, requests)
    assert verdict.total == 69
    assert verdict.wrong == 0
    assert verdict.agree >= 66  # the rest are ties within rounding


def test_tokens_are_not_trivial(finished: tuple[Engine, list[Request]]) -> None:
    _, requests = finished
    assert len(set(requests[4].generated)) > 15


def test_pages_are_given_back(finished: tuple[Engine, list[Request]]) -> None:
    engine, requests = finished
    assert sorted(engine.free_pages) == list(range(num_pages(requests)))


def test_one_plan_a_step(finished: tuple[Engine, list[Request]]) -> None:
    engine, _ = finished
    assert len(engine.decode_plans) == 29  # the first of 30 tokens comes from the prefill
    assert engine.first_decode_plan is not None
    items = engine.first_decode_plan.work_items()
    assert {item["kv_len"] for item in items} == {2, 16, 17, 71}


def test_the_check_notices_wrong_attention(model: Llama, finished: tuple[Engine, list[Request]]) -> None:
    """The same engine, blind to all but the last 16 tokens: its tokens must not pass."""
    _, requests = finished
    blind = [Request(list(request.tokens[: request.prompt_len]), request.max_new_tokens) for request in requests]
    engine = Engine(model, num_pages(blind))
    plan = engine.decode_wrapper.plan
    engine.decode_wrapper.plan = lambda *a, **k: plan(*a, **k, window_left=15)  # type: ignore[method-assign]
    engine.generate(blind)
    assert check_tokens(model, blind).wrong > 10


def test_the_check_notices_one_wrong_token(model: Llama, finished: tuple[Engine, list[Request]]) -> None:
    _, requests = finished
    changed = copy.deepcopy(requests[1])
    changed.tokens[-1] ^= 1
    assert check_tokens(model, [changed]).wrong == 1


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(3, 4, config=SMALL) == 0
    out, _ = capsys.readouterr()
    assert "tokens/s" in out and "checked against torch's attention" in out and "WRONG" not in out
    assert "the plan of the first decode step" in out


def test_requests_have_different_lengths() -> None:
    requests = make_requests(12, 64, 4096)
    assert len({request.prompt_len for request in requests}) > 8
    assert len({request.max_new_tokens for request in requests}) > 6
    assert max(request.max_new_tokens for request in requests) <= 64
