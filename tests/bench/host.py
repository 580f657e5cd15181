"""Host time of `plan` and `run` in microseconds: medians, with the device idle and lengths on the host.

A missed target stands in parentheses. On a CPU `run` uses one thread and one token of context, to time the host's part.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from record import Recorder
from workloads import Paged, indptr

import flashpage
from flashpage import native
from flashpage.cli.values import distribution

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
HEADS = (NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE)
# Microseconds by batch: the required time, and the goal.
ONE_ROW: dict[int, tuple[int, int | None]] = {1: (15, 10), 64: (18, 12), 256: (22, 15), 4096: (80, None)}
PLAN_TARGETS: dict[str, dict[int, tuple[int, int | None]]] = {
    "decode": ONE_ROW,
    "prefill, 1 row a request": ONE_ROW,
    "prefill, 1,024 rows a request": {1: (18, 12), 64: (25, 15), 256: (40, 20)},
}
RUN_TARGET = (6, 5)


def median_us(call: Callable[[], object], repeats: int, synchronize: Callable[[], None]) -> float:
    """Median wall time of `call`, microseconds; the device is idle when it starts."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def report(recorder: Recorder, what: str, batch: int, us: float, targets: tuple[int, int | None]) -> bool:
    """Prints and records one line; returns whether the required time was reached."""
    recorder.add("host", what, batch=batch, us={"flashpage": round(us, 2)}, must=targets[0], goal=targets[1])
    must, goal = ("" if n is None else f"({n})" if us > n else f"{n}" for n in targets)
    print(f"| {what} | {batch} | {us:.1f} | {must} | {goal} |", flush=True)
    return us <= targets[0]


class Subject:
    """The wrappers under test, on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self.decode = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        self.prefill = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self.dtype = torch.bfloat16

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, call: Callable[[], object]) -> float:
        return median_us(call, self.repeats, self.synchronize)

    def plan_decode(self, table: Paged) -> Callable[[], object]:
        pages = (table.indptr, table.indices, table.last_page_len)
        return lambda: self.decode.plan(*pages, *HEADS, q_data_type=self.dtype)

    def plan_prefill(self, table: Paged, rows: int) -> Callable[[], object]:
        q_indptr = indptr([rows] * table.batch)
        pages = (table.indptr, table.indices, table.last_page_len)
        return lambda: self.prefill.plan(q_indptr, *pages, *HEADS, causal=True, q_data_type=self.dtype)

    def time_run(self, wrapper_name: str) -> float:
        """Median time of one call with `out=`."""
        length = 1 if self.device.type == "cpu" else 1024
        table = Paged([length], PAGE_SIZE, self.device)
        (self.plan_decode(table) if wrapper_name == "decode" else self.plan_prefill(table, 1))()
        wrapper = getattr(self, wrapper_name)
        q = torch.randn(1, NUM_Q_HEADS, HEAD_DIM, device=self.device, dtype=self.dtype)
        cache = table.cache(NUM_KV_HEADS, HEAD_DIM, self.dtype)
        out = torch.empty_like(q)
        library = native.load()
        library.fp_cpu_set_threads(1)
        try:
            return self.time(lambda: wrapper.run(q, cache, out=out))
        finally:
            library.fp_cpu_set_threads(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a required time is missed")
    parser.add_argument("--json", help="append one line for each figure to this file (docs/figures.py reads it)")
    arguments = parser.parse_args()
    recorder = Recorder(arguments.json)
    subject = Subject(torch.device(arguments.device), arguments.repeats)
    print(f"on {arguments.device}\n\n| what | batch | us | must | goal |\n| --- | --- | --- | --- | --- |")
    good = True
    for what, targets in PLAN_TARGETS.items():
        for batch, limits in targets.items():
            rows = 1024 if "1,024" in what else 1
            lens = [1024] * batch if rows > 1 else distribution("lognormal", batch, 1024)
            table = Paged(lens, PAGE_SIZE, subject.device)
            plan = subject.plan_decode(table) if what == "decode" else subject.plan_prefill(table, rows)
            good &= report(recorder, f"plan, {what}", batch, subject.time(plan), limits)
    for name in ("decode", "prefill"):
        good &= report(recorder, f"run, {name}, out= given", 1, subject.time_run(name), RUN_TARGET)
    return 1 if arguments.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
