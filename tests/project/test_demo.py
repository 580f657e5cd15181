"""The demo: its report, its requests, and that its check can fail. (tests/serving/test_engine.py has the engine.)"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from engine_runs import SMALL, prompts, small_model

from flashpage.demo.main import engine_config, make_requests, run_demo
from flashpage.demo.model import Llama
from flashpage.demo.reference import check_tokens
from flashpage.engine import Engine, Request
from flashpage.integrations import AttentionLayer, PagedAttention


@pytest.fixture(scope="module")
def model(device: str) -> Llama:
    return small_model(device)


@pytest.fixture(scope="module")
def finished(model: Llama) -> list[Request]:
    requests = [Request(prompt, 20) for prompt in prompts([1, 15, 16, 70])]
    Engine(model, engine_config(requests)).run(requests)
    return requests


def test_the_check_agrees(model: Llama, finished: list[Request]) -> None:
    verdict = check_tokens(model, finished)
    assert verdict.total == 80 and verdict.wrong == 0
    assert verdict.agree >= 76  # the rest are ties within rounding


class Indifferent(PagedAttention):
    """A model with nearly equal scores for all tokens."""

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *arguments: Any) -> Any:
        return super().forward(q, k, v, dataclasses.replace(layer, logits_soft_cap=0.01), *arguments)


def test_the_check_notices_wrong_attention(model: Llama, finished: list[Request]) -> None:
    requests = [Request(list(request.prompt), 20) for request in finished]
    Engine(model, engine_config(requests), Indifferent).run(requests)
    assert check_tokens(model, requests).wrong > 10


def test_the_check_notices_one_wrong_token(model: Llama, finished: list[Request]) -> None:
    changed = copy.deepcopy(finished[1])
    changed.tokens[-1] ^= 1
    assert check_tokens(model, [changed]).wrong == 1


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(12, 8, config=SMALL) == 0
    out, _ = capsys.readouterr()
    assert "tokens/s" in out and "checked against torch's attention" in out and "WRONG" not in out
    assert "\n0 prompt tokens" not in out and "prompt tokens were reused from the pool" in out
    assert "the plan of the first decode step" in out


def test_requests_have_different_lengths() -> None:
    requests = make_requests(12, 64, 4096)
    assert len({request.prompt_len for request in requests}) > 8
    assert len({request.max_new_tokens for request in requests}) > 6
    assert max(request.max_new_tokens for request in requests) <= 64
    beginnings = {tuple(request.prompt[:80]) for request in requests[::3]}
    assert len(beginnings) == 1
