"""The stream that plans each group of vLLM's layers, and the streams that wait for it, without a card."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashpage.engines.vllm.plugin.plan_streams import PlanStreams


class FakeStream:
    """Notes what it waits for."""

    current: FakeStream

    def __init__(self, name: str = "own") -> None:
        self.name, self.waits = name, list[str]()

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append(other.name)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    @contextlib.contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        before, FakeStream.current = FakeStream.current, stream
        yield
        FakeStream.current = before

    FakeStream.current = main = FakeStream("main")
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream.current)
    return main


def config(ubatching: bool = False, drafts: Any = None) -> Any:
    return SimpleNamespace(speculative_config=drafts, parallel_config=SimpleNamespace(use_ubatching=ubatching))


def test_the_last_group_waits_for_the_others(main: FakeStream) -> None:
    streams = PlanStreams()
    groups = [streams.add() for _ in range(3)]
    for _ in range(2):  # steps
        found = [streams.plan(group, lambda: FakeStream.current) for group in groups]
        assert [stream.name for stream in found] == ["own", "own", "main"] and found[0] is not found[1]
        assert main.waits == ["own", "own"]
        main.waits.clear()
    assert found[0].waits == ["main", "main"], "lengths of the second step, too"


def test_a_plan_that_fails_leaves_no_stream_behind(main: FakeStream) -> None:
    streams = PlanStreams()
    first, last = streams.add(), streams.add()
    streams.plan(first, lambda: None)
    with pytest.raises(ZeroDivisionError):
        streams.plan(last, lambda: 1 / 0)
    assert main.waits == ["own"]
    streams.plan(last, lambda: None)
    assert main.waits == ["own"]


def test_one_group_needs_no_stream(main: FakeStream) -> None:
    streams = PlanStreams()
    assert streams.plan(streams.add(), lambda: FakeStream.current) is main and not main.waits


def test_engines_in_which_the_last_group_may_have_no_plan_have_none() -> None:
    card, usual = torch.device("cuda", 0), config()
    found = PlanStreams.of(usual, card)
    assert found is not None and PlanStreams.of(usual, card) is found
    refused = (usual, torch.device("cpu")), (config(ubatching=True), card), (config(drafts=object()), card)
    assert all(PlanStreams.of(*given) is None for given in refused)
