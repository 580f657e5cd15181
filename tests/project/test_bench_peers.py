"""The peers of tests/bench/peers.py: what each is not given, and how those that take other arguments are called."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import peers

    return peers


@pytest.fixture
def case(peers: Any) -> Any:
    """A decode of two requests, one of which ends inside of a page."""
    from workloads import Case

    return Case("one", 2, 1, 40, "lognormal", num_q_heads=4, num_kv_heads=2, head_dim=64)


LEFT_OUT = [  # columns, rows of a request, tokens of a page, whether FlashInfer's fa2 is left out
    (96, 1, 16, True),
    (112, 1, 16, True),
    (128, 1, 16, False),
    (80, 1, 16, False),
    (96, 16, 0, True),
    (112, 16, 0, False),
    (96, 16, 16, False),
]


@pytest.mark.parametrize(("columns", "rows", "page_size", "is_left_out"), LEFT_OUT)
def test_calls_that_end_the_process_are_left_out(
    columns: int, rows: int, page_size: int, is_left_out: bool, peers: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(peers, "wrapper_call", lambda *_, **options: calls.append(options) or "a call")
    changed = dataclasses.replace(case, head_dim=columns, q_len=rows, page_size=page_size)
    found = peers.flashinfer_call(types.SimpleNamespace(case=changed), "fa2")
    assert (found, len(calls)) == ((None, 0) if is_left_out else ("a call", 1))
