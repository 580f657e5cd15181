"""How many Python frames of the package and foreign calls a call takes; small batches to plan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashpage
from flashpage import native

PACKAGE = str(Path(flashpage.__file__).parent)
MOST_FRAMES = 5


def lengths(tokens: list[int]) -> tuple[torch.Tensor, ...]:
    lens = torch.tensor(tokens)
    pages = -(-lens // 16)
    indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0)])
    return indptr.int(), torch.arange(int(indptr[-1])).int(), ((lens - 1) % 16 + 1).int()


def indptr(rows: list[int]) -> torch.Tensor:
    return torch.tensor([0, *rows]).cumsum(0).int()


def workspace() -> torch.Tensor:
    return torch.empty(16 << 20, dtype=torch.uint8)


def count(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Counts the package's frames and the foreign calls."""
    frames: list[str] = []
    foreign: list[str] = []
    library = native.load()

    def counted(name: str, function: Any) -> Callable[..., Any]:
        def call_it(*arguments: Any) -> Any:
            foreign.append(name)
            return function(*arguments)

        return call_it

    with monkeypatch.context() as patched:
        for name, function in list(vars(library).items()):
            if name.startswith("fp_"):
                patched.setitem(vars(library), name, counted(name, function))

        def watch(frame: Any, event: str, what: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(PACKAGE):
                frames.append(f"{Path(code.co_filename).name}:{code.co_name}")
            elif event == "c_call" and getattr(what, "__name__", "").startswith("fp_py_"):
                foreign.append(what.__name__)

        sys.setprofile(watch)
        try:
            call()
        finally:
            sys.setprofile(None)
    return frames, foreign


def check(
    first: Callable[[], Any], again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, most: int = MOST_FRAMES
) -> None:
    first()
    frames, foreign = count(again, monkeypatch)
    assert foreign == ["fp_py_plan"], frames
    assert len(frames) <= most, frames
