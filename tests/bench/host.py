"""Host time of `plan` and `run` in microseconds, with the device idle and lengths on the host.

FlashInfer, if it is installed, makes the same calls in turns with flashpage: a round has the median of each library's
calls, and the median of the rounds counts. A missed target stands in parentheses. On a CPU `run` uses one thread and
one token of context, to time the host's part.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from command_line import Parser
from gpu import HostClock, rounds_of
from latent_peers import LatentBatch, latent_plan
from record import Recorder
from workloads import LatentCase, Paged, indptr

from flashpage import native
from flashpage.cli.values import distribution

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
HEADS = (NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE)
OWN, PEER = "flashpage", "flashinfer"
LATENT_OPTIONS: dict[str, dict[str, Any]] = {OWN: {}, PEER: {"backend": "fa3"}}
Call = Callable[[], object]
Targets = tuple[float, float | None]  # microseconds: the required time, and the goal
PLAN_TARGETS: dict[str, dict[int, Targets]] = {  # by batch
    "decode": {1: (9, None), 64: (11, None), 256: (15, None), 4096: (80, None)},
    "prefill, 1 row a request": {1: (15, 10), 64: (18, 12), 256: (22, 15), 4096: (80, None)},
    "prefill, 1,024 rows a request": {1: (12, None), 64: (16, None), 256: (22, None)},
}
RUN_TARGETS: Targets = (4.5, None)
LATENT_PLAN_TARGETS: dict[int, Targets] = {1: (9, None), 64: (11, None), 256: (15, None)}  # as decode


class IdleClock(HostClock):
    """Seconds of a call on the host; the device is idle when a call starts."""

    def __init__(self, repeats: int, device: torch.device) -> None:
        super().__init__(repeats)
        self.device = device

    def seconds(self, call: Call) -> float:
        for _ in range(5):
            call()
        times = []
        for _ in range(self.repeats):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


class Subject:
    """The wrappers of one library on one device."""

    def __init__(self, module_name: str, device: torch.device) -> None:
        module, self.device, self.dtype = importlib.import_module(module_name), device, torch.bfloat16
        workspace = torch.empty(512 << 20 if device.type == "cuda" else 64 << 20, dtype=torch.uint8, device=device)
        options = {"use_tensor_cores": True} if module_name == PEER else {}
        self.decode: Any = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **options)
        self.prefill: Any = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, what: str, table: Paged, rows: int) -> Call:
        """A plan of the decode wrapper, or of the prefill wrapper for `rows` a request."""
        pages = (table.indptr, table.indices, table.last_page_len)
        if what == "decode":
            return lambda: self.decode.plan(*pages, *HEADS, q_data_type=self.dtype)
        q_indptr = indptr([rows] * table.batch)
        return lambda: self.prefill.plan(q_indptr, *pages, *HEADS, causal=True, q_data_type=self.dtype)

    def run(self, what: str, q: torch.Tensor, cache: torch.Tensor) -> Call:
        wrapper, out = getattr(self, what), torch.empty_like(q)
        return lambda: wrapper.run(q, cache, out=out)


class Report:
    """Times a call of each library, and prints and records the line."""

    def __init__(self, recorder: Recorder, clock: IdleClock, rounds: int) -> None:
        self.recorder, self.clock, self.rounds = recorder, clock, rounds
        self.is_good = True  # whether every required time was reached

    def line(self, what: str, batch: int, calls: dict[str, Call], targets: Targets) -> None:
        spent = rounds_of(calls, self.rounds, self.clock)
        us = {label: statistics.median(times) for label, times in spent.items()}
        own, peer = us[OWN], us.get(PEER)
        ratio = round(peer / own, 4) if peer else None
        rounded = {label: round(value, 2) for label, value in us.items()}
        self.recorder.add("host", what, batch=batch, us=rounded, ratio=ratio, must=targets[0], goal=targets[1])
        limits = ["" if n is None else f"({n:g})" if own > n else f"{n:g}" for n in targets]
        peer_cells = [f"{peer:.1f}", f"{ratio:.2f}"] if peer else ["", ""]
        print("| " + " | ".join([what, str(batch), f"{own:.1f}", *peer_cells, *limits]) + " |", flush=True)
        self.is_good &= own <= targets[0]


def usable(calls: dict[str, Call], what: str) -> dict[str, Call]:
    """flashpage's call, and the peer's where it does not refuse."""
    found = {}
    for label, call in calls.items():
        try:
            call()
        except Exception as failure:
            if label == OWN:
                raise
            print(f"{label} refuses {what}: {failure}".splitlines()[0][:200], file=sys.stderr)
        else:
            found[label] = call
    return found


def time_plans(subjects: dict[str, Subject], report: Report, device: torch.device) -> None:
    for what, targets in PLAN_TARGETS.items():
        for batch, limits in targets.items():
            rows = 1024 if "1,024" in what else 1
            lens = [1024] * batch if rows > 1 else distribution("lognormal", batch, 1024)
            table = Paged(lens, PAGE_SIZE, device)
            calls = {label: subject.plan(what, table, rows) for label, subject in subjects.items()}
            report.line(f"plan, {what}", batch, usable(calls, f"{what}, batch {batch}"), limits)


def time_latent(labels: list[str], report: Report, device: torch.device) -> None:
    """Decode over latent rows (MLA) of 16 heads."""
    for batch, limits in LATENT_PLAN_TARGETS.items():
        mean = 1 if device.type == "cpu" else 1024
        tensors = LatentBatch(LatentCase("host", batch, 1, mean, "lognormal", num_q_heads=16), device)
        found = {label: latent_plan(label, tensors, **LATENT_OPTIONS[label]) for label in labels}
        calls = usable({label: plan for label, (_, plan) in found.items()}, f"latent rows, batch {batch}")
        report.line("plan, decode over latent rows", batch, calls, limits)
        if batch == 1:
            out = torch.empty(1, 16, 512, device=device, dtype=torch.bfloat16)
            parts = (*tensors.split(tensors.q), *tensors.split(tensors.cache))
            runs = {label: partial(found[label][0].run, *parts, out=out) for label in calls}
            report.line("run, decode over latent rows, out= given", 1, usable(runs, "run"), RUN_TARGETS)


def time_runs(subjects: dict[str, Subject], report: Report, device: torch.device) -> None:
    """Calls with `out=`, of one request."""
    table = Paged([1 if device.type == "cpu" else 1024], PAGE_SIZE, device)
    q = torch.randn(1, NUM_Q_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    cache = table.cache(NUM_KV_HEADS, HEAD_DIM, torch.bfloat16)
    library = native.load()
    library.fp_cpu_set_threads(1)
    try:
        for what in ("decode", "prefill"):
            plans = usable(
                {label: subject.plan(what, table, 1) for label, subject in subjects.items()}, f"plan, {what}"
            )
            calls = {label: subjects[label].run(what, q, cache) for label in plans}
            report.line(f"run, {what}, out= given", 1, usable(calls, f"run, {what}"), RUN_TARGETS)
    finally:
        library.fp_cpu_set_threads(0)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls of each library in a round")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, in each of which all libraries are timed")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a required time is missed")
    parser.add_argument("--json", help="append one line for each figure to this file (docs/figures.py reads it)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    has_peer = device.type == "cuda" and importlib.util.find_spec(PEER) is not None
    subjects = {name: Subject(name, device) for name in ([OWN, PEER] if has_peer else [OWN])}
    report = Report(Recorder(arguments.json), IdleClock(arguments.repeats, device), arguments.rounds)
    columns = ("what", "batch", "us", "FlashInfer us", "FlashInfer / flashpage", "must", "goal")
    print(f"on {arguments.device}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    time_plans(subjects, report, device)
    time_runs(subjects, report, device)
    time_latent(list(subjects), report, device)
    return 1 if arguments.check and not report.is_good else 0


if __name__ == "__main__":
    sys.exit(main())
