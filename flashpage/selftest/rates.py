"""This machine's rates as torch reaches them: the bound that a kernel's own rate is compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

DTYPES = (torch.bfloat16, torch.float32)


def seconds(call: Callable[[], object], device: torch.device, least_s: float) -> float:
    """Median seconds of a call, over as many calls as take `least_s`, at least three."""
    call()
    spent: list[float] = []
    begin = time.perf_counter()
    while len(spent) < 3 or time.perf_counter() - begin < least_s:
        spent.append(_seconds(call, device))
    return statistics.median(spent)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The time of one call. On a card it is the mean of eight between two events, so that none waits for the host."""
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    for _ in range(8):
        call()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) * 1e-3 / 8


def read_gbps(device: torch.device, least_s: float) -> float:
    """The faster one of a sum and a copy, over memory that no cache holds."""
    mib = 1024 if device.type == "cuda" else 256
    values = torch.ones(mib << 18, dtype=torch.float32, device=device)
    target = torch.empty_like(values)
    of_sum = values.nbytes / seconds(values.sum, device, least_s)
    of_copy = 2 * values.nbytes / seconds(lambda: target.copy_(values), device, least_s)
    return max(of_sum, of_copy) * 1e-9


def matmul_tflops(device: torch.device, least_s: float) -> float:
    """bf16, which the timed kernels have; on a CPU fp32, too, as one without bf16 products multiplies it faster."""
    size, dtypes = (8192, DTYPES[:1]) if device.type == "cuda" else (1024, DTYPES)
    return max(_matmul_tflops(device, size, dtype, least_s) for dtype in dtypes)


def _matmul_tflops(device: torch.device, size: int, dtype: torch.dtype, least_s: float) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / seconds(lambda: a @ a, device, least_s) * 1e-12
