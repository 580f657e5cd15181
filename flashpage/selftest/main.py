"""The selftest's run: kernels compiled or found, checked, timed and judged."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from ..base.errors import FlashpageError
from ..jit import process
from ..jit.progress import Bar
from . import rates
from .cases import DECODE, LAYERS, LONG, PREFILL, QUICK, WORKSPACE_BYTES, Batch, Case, Layer

MOST_LSE_ERROR = 2e-2
# A result's error is small if all of a long request is wrong, next to short ones whose values are larger. So the error
# of each row and head has a limit, too: so many times that of all.
MOST_OF_A_HEAD = 4.0
FULL = "too little memory is free"
# The least fraction of torch's read and matmul rate that a kernel has on a machine without other work. Half of what
# kernels reach where they were measured.
LEAST_SHARE = {"cuda": {"decode": 0.5, "prefill": 0.25}, "cpu": {"decode": 0.1, "prefill": 0.1}}
# The batches that are timed, by device and kind.
TIMED = {
    "cuda": (Batch("decode", (1,) * 64, (4096,) * 64), Batch("prefill", (4096,) * 4, (4096,) * 4)),
    "cpu": (Batch("decode", (1,) * 4, (8192,) * 4), Batch("prefill", (512,), (512,))),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the table. `share`: of the machine's own rate; None: not timed."""

    name: str
    error: float | None = None
    most_error: float = 0.0
    lse_error: float | None = None
    head_error: float = 0.0  # the largest one of a row and head, relative to its own reference
    failure: str = ""  # why there is no result
    skipped: str = ""  # why it was not run
    rate: float | None = None
    unit: str = ""  # GB/s | TFLOP/s
    share: float | None = None
    is_slow: bool = False

    @property
    def is_right(self) -> bool:
        if self.failure or self.error is None:
            return not self.failure
        is_near = self.error < self.most_error and not self.has_wrong_head
        return is_near and (self.lse_error or 0.0) < MOST_LSE_ERROR

    @property
    def has_wrong_head(self) -> bool:
        return self.head_error >= MOST_OF_A_HEAD * self.most_error > 0.0


@dataclasses.dataclass(frozen=True)
class Report:
    """All results of a device, and the rates that torch has there; None: they could not be measured."""

    device: str
    read_gbps: float | None
    matmul_tflops: float | None
    seconds: float
    results: tuple[Result, ...]

    @property
    def verdict(self) -> str:
        """right | slow | partial | unchecked | wrong"""
        if not all(result.is_right for result in self.results):
            return "wrong"
        if all(result.error is None for result in self.results):
            return "unchecked"
        if any(result.is_slow for result in self.results):
            return "slow"
        return "partial" if any(result.skipped for result in self.results) else "right"

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
    try:
        workspace = torch.empty(WORKSPACE_BYTES[device.type], dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        bar.close()
        skipped = tuple(Result(case.name, skipped=FULL) for case in cases)
        return Report(str(device), None, None, time.perf_counter() - start, skipped)
    _compile([*cases, *timed], workspace, bar)
    results = []
    for case in cases:
        results.append(_result(case.name, _checked, case, workspace))
        bar.advance(case.name, failed=not results[-1].is_right)
    bounds = {}
    for kind, measure in (("decode", rates.read_gbps), ("prefill", rates.matmul_tflops)):
        bounds[kind] = _rate(measure, device, least_s)
        bar.advance(f"rate for {kind}")
    for case in timed:
        name = f"{case.name}, {len(case.batch.rows)} x {case.batch.tokens[0]}"
        bound = bounds[case.batch.kind]
        results.append(_result(name, _timed, case, workspace, bound, least_s))
    bar.close()
    return Report(str(device), bounds["decode"], bounds["prefill"], time.perf_counter() - start, tuple(results))


def _batches(layer: Layer) -> tuple[Batch, ...]:
    if layer.tail:
        return (DECODE,)  # latent rows serve decodes
    return (DECODE, LONG, PREFILL) if layer is LAYERS[0] else (DECODE, PREFILL)


def _compile(cases: list[Case], workspace: Tensor, bar: Bar) -> None:
    """Plans all cases, several at a time, as most of the time goes to compilers. They share the workspace, so none can
    be run; each is planned again later, and what fails fails again."""

    def plan(case: Case) -> None:
        with contextlib.suppress(Exception):
            case.plan(workspace)
        bar.advance(f"kernel for {case.name}")

    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        wait([pool.submit(plan, case) for case in cases])
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        with process.stopped():  # else the threads, and so the program, would end after their compilers
            pool.shutdown()
        raise
    pool.shutdown()


def _result(name: str, measure: Callable[..., Result], *arguments: Any) -> Result:
    """The result of `measure`, under this name; or why it failed. Then its tensors are freed."""
    try:
        return dataclasses.replace(measure(*arguments), name=name)
    except (torch.OutOfMemoryError, MemoryError):
        return Result(name, skipped=FULL)
    except Exception as error:  # the report is written, whatever fails; after an illegal access all that follows does
        if "can't allocate memory" in str(error):  # torch on the CPU
            return Result(name, skipped=FULL)
        is_known = isinstance(error, FlashpageError | OSError | RuntimeError)
        return Result(name, failure=str(error) if is_known else f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _rate(measure: Callable[[torch.device, float], float], device: torch.device, least_s: float) -> float | None:
    with contextlib.suppress(RuntimeError):
        return measure(device, least_s)
    return None


def _checked(case: Case, workspace: Tensor) -> Result:
    """Compares a run with the reference."""
    q, cache = case.tensors()
    found = case.plan(workspace)(q.to(case.device), cache.to(case.device))
    out, lse = (tensor.float().cpu() for tensor in found)
    expected, expected_lse = case.expected(q, cache)
    difference, norm = (out - expected).norm(dim=-1), expected.norm(dim=-1)
    error, head_error = (difference.norm() / norm.norm()).item(), (difference / norm).max().item()
    lse_error = (lse - expected_lse).abs().max().item()
    if not all(map(math.isfinite, (error, head_error, lse_error))):
        return Result(case.name, failure="the result has NaN or infinite numbers")
    return Result(case.name, error, case.layer.most_error, lse_error, head_error)


def _timed(case: Case, workspace: Tensor, bound: float | None, least_s: float) -> Result:
    """The rate of a run: bytes of K and V, or operations, a second."""
    if bound is None:
        return Result(case.name, skipped="torch's own rate could not be measured")
    kind, run = case.batch.kind, case.plan(workspace)
    q, cache = (tensor.to(case.device) for tensor in case.tensors())
    spent = rates.seconds(lambda: run(q, cache), case.device, least_s)
    rate = case.kv_bytes / spent * 1e-9 if kind == "decode" else case.flops / spent * 1e-12
    is_slow = rate < LEAST_SHARE[case.device.type][kind] * bound
    unit = "GB/s" if kind == "decode" else "TFLOP/s"
    return Result(case.name, rate=rate, unit=unit, share=rate / bound, is_slow=is_slow)
