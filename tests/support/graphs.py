"""Calls captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(call: Callable[[], object], device: str = "cuda:0") -> Callable[[], object]:
    """The call as a graph; it has run once before, as engines do. On the CPU: the call."""
    call()
    if device == "cpu":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A stream of the current card: torch keeps the one it makes by itself for every later capture, on whichever card.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        call()
    return graph.replay
