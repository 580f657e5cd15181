"""Calls captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(call: Callable[[], object], device: str = "cuda:0") -> Callable[[], object]:
    """The call as a graph, after one eager run, as engines do; on the CPU the call itself."""
    call()
    if device == "cpu":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Uses a stream of the current card: torch's own capture stream stays on the card of the first capture.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        call()
    return graph.replay
