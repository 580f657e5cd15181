"""Steps of many sizes for one wrapper with capacities, and the capture of its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases.case import decode, prefill
from steps import Steps

from flashpage import native

DECODE_LENS = ((3000, 7, 0, 64, 129), (900,), (17, 0, 5000), (1, 1, 1, 1, 1), (0,), (40, 2500))
PREFILL_LENS = (  # rows and tokens
    ((1, 40, 5, 64), (2000, 40, 900, 64)),
    ((70,), (2070,)),
    ((1, 1), (5, 1500)),
    ((0,), (0,)),
    ((0, 33, 100), (0, 33, 1000)),
)


def decode_steps(device: str) -> Steps:
    return Steps(
        [decode(f"capacity-{i}", "a batch", lens, cache="fused") for i, lens in enumerate(DECODE_LENS)], device
    )


def prefill_steps(device: str) -> Steps:
    cases = [
        prefill(f"capacity-prefill-{i}", "a batch", rows, lens, causal=True, cache="fused")
        for i, (rows, lens) in enumerate(PREFILL_LENS)
    ]
    return Steps(cases, device)


def capture(wrapper: Any, steps: Steps) -> Callable[[], None]:
    """Captures the loaded step's run as a graph; on the CPU, the launch alone without its Python code."""
    steps.run_loaded(wrapper)
    if not steps.q.is_cuda:
        return lambda: native.check(native.load().fp_run(wrapper._attention._local.bound.args_address))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        steps.run_loaded(wrapper)
    return graph.replay
