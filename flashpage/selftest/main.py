"""The selftest's run: kernels compiled or found, checked, timed and judged."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..base.errors import FlashpageError
from ..jit.progress import Bar
from . import rates
from .cases import DECODE, LAYERS, PREFILL, QUICK, Batch, Case, Layer

MOST_ERROR = 1e-2  # of the output, relative to the reference's norm; results have bf16
MOST_LSE_ERROR = 2e-2
# The least fraction of torch's read and matmul rate that a kernel has on a machine without other work. Half of what
# kernels reach where they were measured.
LEAST_SHARE = {"cuda": {"decode": 0.5, "prefill": 0.25}, "cpu": {"decode": 0.1, "prefill": 0.1}}
# The batches that are timed, by device and kind.
TIMED = {
    "cuda": (Batch("decode", (1,) * 64, (4096,) * 64), Batch("prefill", (4096,) * 4, (4096,) * 4)),
    "cpu": (Batch("decode", (1,) * 4, (8192,) * 4), Batch("prefill", (512,), (512,))),
}
Run = Callable[[], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the table. `share`: of the machine's own rate; None: not timed."""

    name: str
    error: float | None = None
    lse_error: float | None = None
    failure: str = ""  # why there is no result
    rate: float | None = None
    unit: str = ""  # GB/s | TFLOP/s
    share: float | None = None
    is_slow: bool = False

    @property
    def is_right(self) -> bool:
        return not self.failure and (
            self.error is None or (self.error < MOST_ERROR and (self.lse_error or 0.0) < MOST_LSE_ERROR)
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """All results of a device, and the rates that torch has there."""

    device: str
    read_gbps: float
    matmul_tflops: float
    seconds: float
    results: tuple[Result, ...]

    @property
    def verdict(self) -> str:
        """right | slow | wrong"""
        if not all(result.is_right for result in self.results):
            return "wrong"
        return "slow" if any(result.is_slow for result in self.results) else "right"

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"verdict": self.verdict}


def choose_device(name: str) -> torch.device:
    """The torch device of `auto`, `cpu` or `cuda`."""
    if name == "cuda" and not torch.cuda.is_available():
        raise FlashpageError("--device cuda: torch finds no GPU here; pass cpu, or nothing")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def run_selftest(device: torch.device, is_quick: bool = False) -> Report:
    start, layers = time.perf_counter(), QUICK if is_quick else LAYERS
    cases = [Case(layer, batch, device) for layer in layers for batch in _batches(layer)]
    timed = [Case(layer, batch, device) for layer in QUICK[: 1 if is_quick else 2] for batch in TIMED[device.type]]
    least_s = 0.2 if is_quick else 1.0
    bar = Bar(2 * len(cases) + len(timed) + 2, "selftest")
    runs = _planned([*cases, *timed], bar)
    results = []
    for case, planned in zip(cases, runs, strict=False):
        results.append(_checked(case, planned))
        bar.advance(case.name, failed=not results[-1].is_right)
    read_gbps = rates.read_gbps(device, least_s)
    bar.advance("read rate")
    matmul_tflops = rates.matmul_tflops(device, least_s)
    bar.advance("matmul rate")
    bounds = {"decode": read_gbps, "prefill": matmul_tflops}
    for case, planned in zip(timed, runs[len(cases) :], strict=True):
        results.append(_timed(case, planned, bounds[case.batch.kind], least_s))
    bar.close()
    return Report(str(device), read_gbps, matmul_tflops, time.perf_counter() - start, tuple(results))


def _batches(layer: Layer) -> tuple[Batch, ...]:
    return (DECODE,) if layer.tail else (DECODE, PREFILL)  # latent rows serve decodes


def _planned(cases: list[Case], bar: Bar) -> list[Run | Exception]:
    """Plans all cases, several at a time, because most of the time goes to compilers."""

    def plan(case: Case) -> Run | Exception:
        try:
            return case.plan()
        except (FlashpageError, RuntimeError) as error:
            return error
        finally:
            bar.advance(f"kernel for {case.name}")

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(plan, cases))


def _checked(case: Case, run: Run | Exception) -> Result:
    """Compares a run with the reference."""
    try:
        if isinstance(run, Exception):
            raise run
        out, lse = (tensor.float().cpu() for tensor in run())
    except (FlashpageError, RuntimeError) as failure:
        return Result(case.name, failure=str(failure))
    expected, expected_lse = case.expected()
    error = ((out - expected).norm() / expected.norm()).item()
    lse_error = (lse - expected_lse).abs().max().item()
    if not (error == error and lse_error == lse_error):
        return Result(case.name, failure="the result has NaN")
    return Result(case.name, error, lse_error)


def _timed(case: Case, run: Run | Exception, bound: float, least_s: float) -> Result:
    """The rate of a run: bytes of K and V, or operations, a second."""
    kind, name = case.batch.kind, f"{case.name}, {len(case.batch.rows)} x {case.batch.tokens[0]}"
    try:
        if isinstance(run, Exception):
            raise run
        spent = rates.seconds(run, case.device, least_s)
    except (FlashpageError, RuntimeError) as error:
        return Result(name, failure=str(error))
    rate = case.kv_bytes / spent * 1e-9 if kind == "decode" else case.flops / spent * 1e-12
    is_slow = rate < LEAST_SHARE[case.device.type][kind] * bound
    unit = "GB/s" if kind == "decode" else "TFLOP/s"
    return Result(name, rate=rate, unit=unit, share=rate / bound, is_slow=is_slow)
