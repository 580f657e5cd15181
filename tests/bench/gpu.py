"""Attention on one device, compared with every installed peer: same tensors, same clock, one run.

The time of a call is the median between two events. Before each call another buffer is read to flush the L2, which also
keeps the device busy while the host goes ahead. Libraries alternate, as the card's clock falls with heat. Decode is a
CUDA graph's replay, merge kernels included. `--small --device cpu` runs tiny shapes with the host's clock: it only
shows that the program works.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from board import SAMPLES
from command_line import Parser
from latent_peers import LATENT_PEERS, LatentBatch
from peers import ALONE, PEERS, Batch, Call, installed
from record import Recorder
from workloads import (
    CONTEXTS,
    DECODE,
    EXPANDED,
    FP8_KV,
    FP8_PREFILL,
    MLA,
    MLA_FP8,
    MORE_DECODE,
    MORE_MLA,
    MORE_PREFILL,
    OPTIONS,
    PREFILL,
    SMALL_PREFILL,
    Case,
    LatentCase,
)

Key = TypeVar("Key")
SECTIONS: dict[str, Sequence[Case]] = {
    "decode": DECODE,
    "more-decode": MORE_DECODE,
    "contexts": CONTEXTS,
    "prefill": PREFILL,
    "more-prefill": MORE_PREFILL,
    "small-prefill": SMALL_PREFILL,
    "options": OPTIONS,
    "fp8-kv": FP8_KV,
    "fp8-prefill": FP8_PREFILL,
    "mla": MLA,
    "more-mla": MORE_MLA,
    "mla-fp8": MLA_FP8,
    "expanded": EXPANDED,
}
LIBRARIES: dict[str, Any] = {**PEERS, **LATENT_PEERS}  # of all sections


class GpuClock:
    """Seconds of a call on the GPU."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flush = torch.zeros(128 << 20, dtype=torch.float32, device="cuda")  # 512 MiB: larger than any L2

    def capture(self, call: Call) -> Callable[[], object]:
        """The call as a CUDA graph."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

        def replay(keep: Call = call) -> None:  # the graph reads tensors that only the call keeps alive
            graph.replay()

        return replay

    def prepare(self) -> None:
        """Before each timed call."""
        self.flush.amax()

    def seconds(self, call: Callable[[], object]) -> float:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        pairs = []
        for _ in range(self.repeats):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.prepare()
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
        SAMPLES.read()  # while the card computes what was launched
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e-3


class HostClock:
    """Seconds of a call on the CPU."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats

    def capture(self, call: Call) -> Callable[[], object]:
        return call

    def seconds(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def in_turns(replays: Mapping[Key, Callable[[], object]], rounds: int, clock: GpuClock | HostClock) -> dict[Key, str]:
    """Median and least microseconds of each call over its rounds. All calls run in every round, as clocks drift."""
    spent = rounds_of(replays, rounds, clock)
    return {key: f"{statistics.median(us):.1f} ({min(us):.1f})" for key, us in spent.items()}


def rounds_of(
    replays: Mapping[Key, Callable[[], object]], rounds: int, clock: GpuClock | HostClock
) -> dict[Key, list[float]]:
    """Microseconds of each call in each round. Every second round is reversed, as later calls run on a hotter card."""
    spent: dict[Key, list[float]] = {key: [] for key in replays}
    for i in range(rounds):
        for key in list(replays)[:: -1 if i % 2 else 1]:
            spent[key].append(clock.seconds(replays[key]) * 1e6)
    return spent


def work(case: Case) -> tuple[int, int]:
    """Bytes that a case must move, and its floating-point operations."""
    kv_bytes = sum(case.kv_lens) * case.token_bytes
    q_bytes = sum(case.q_lens) * case.num_q_heads * case.columns * 2
    visible = sum(case.visible(q, kv) for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    return kv_bytes + q_bytes, 2 * case.num_q_heads * case.columns * visible


def tensors(case: Case, device: torch.device) -> tuple[Any, Mapping[str, Any]]:
    """The tensors of a case, and the libraries that take such."""
    if isinstance(case, LatentCase):
        return LatentBatch(case, device), LATENT_PEERS
    return Batch(case, device), PEERS


def measure(
    case: Case, libraries: Sequence[str], device: torch.device, clock: GpuClock | HostClock, rounds: int
) -> list[dict[str, Any]]:
    """One row for each library, all libraries alternating; if a library refuses, the row has its message."""
    batch, peers = tensors(case, device)
    rows: dict[str, dict[str, Any]] = {}
    replays: dict[str, Callable[[], object]] = {}
    for label in libraries:
        if label not in peers:
            continue
        try:
            call = peers[label][1](batch)
            if call is None:  # the library does not support the case
                continue
            rows[label] = {"library": label, "error": batch.error(call())}
            replays[label] = clock.capture(call) if case.is_decode else call
        except Exception as failure:
            rows[label] = {"library": label, "failed": f"{type(failure).__name__}: {failure}".splitlines()[0][:200]}
    num_bytes, flops = work(case)
    for label, times in rounds_of(replays, rounds, clock).items():
        us = statistics.median(times)
        rows[label] |= {"us": us, "gb_per_s": num_bytes / us / 1e3, "tflop_per_s": flops / us / 1e6}
    return list(rows.values())


def show(case: Case, row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"| {case.name} | {row['library']} | {row['failed']} | | |", flush=True)
        return
    rate = f"{row[case.unit]:,.0f} {'GB/s' if case.unit == 'gb_per_s' else 'TFLOP/s'}"
    print(f"| {case.name} | {row['library']} | {row['us']:,.1f} us | {rate} | {row['error']:.1e} |", flush=True)


def figures(case: Case, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A case as a record: times of all libraries, the best peer, and its time divided by flashpage's."""
    timed = {row["library"]: row for row in rows if "us" in row}
    unit = case.unit
    peers = {label: row["us"] for label, row in timed.items() if not label.startswith("flashpage")}
    best = min(peers, key=peers.__getitem__, default="")
    own = timed.get("flashpage") or timed.get("flashpage sm80")
    return {
        "context": case.kv_len,
        "bytes": work(case)[0],
        "us": {label: round(row["us"], 2) for label, row in timed.items()},
        "errors": {label: float(f"{row['error']:.2g}") for label, row in timed.items()},
        "refused": {row["library"]: row["failed"] for row in rows if "failed" in row},
        "unit": unit,
        "rate": round(own[unit], 1) if own else None,
        "best_peer": best,
        "ratio": round(peers[best] / own["us"], 4) if best and own else None,
    }


class Session:
    """The device, its clock and the file of records, for one case after another."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, torch.device(arguments.device)
        self.clock = GpuClock(arguments.repeats) if self.device.type == "cuda" else HostClock(arguments.repeats)
        self.libraries = named(arguments)
        self.recorder = Recorder(arguments.json)
        if "flashpage sm80" in self.libraries and "flashpage" not in self.libraries:
            self.recorder.run["card"] += ", by the kernels for sm_80"

    def has_failed(self, section: str, index: int) -> bool:
        """Times, prints and records a case; whether it failed on flashpage."""
        case = SECTIONS[section][index]
        case = case.shrunk() if self.arguments.small else case
        torch.manual_seed(0)
        rows = measure(case, self.libraries, self.device, self.clock, self.arguments.rounds)
        for row in rows:
            show(case, row)
        self.recorder.add(section, case.name, **figures(case, rows))
        return any("failed" in row and row["library"].startswith("flashpage") for row in rows)


def named(arguments: argparse.Namespace) -> list[str]:
    """The libraries to time."""
    return arguments.libraries.split(",") if arguments.libraries else installed(LIBRARIES)


def in_a_process(arguments: argparse.Namespace, section: str, index: int) -> None:
    sys.exit(Session(arguments).has_failed(section, index))


def has_failed_apart(arguments: argparse.Namespace, section: str, index: int) -> bool:
    """The same in a process of its own, which may end."""
    process = multiprocessing.get_context("spawn").Process(target=in_a_process, args=(arguments, section, index))
    process.start()
    process.join()
    if process.exitcode:
        print(f"| {SECTIONS[section][index].name} | | its process ended with {process.exitcode} | | |", flush=True)
    return bool(process.exitcode)


def main(words: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS))
    parser.add_argument(
        "--libraries", help=f"comma-separated; default: those installed, here {', '.join(installed(LIBRARIES))}"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each library in a round")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, in each of which all libraries are timed")
    parser.add_argument("--apart", action="store_true", help="a process for each case, which xqa needs")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", help="append one line for each case to this file (docs/figures.py reads it)")
    arguments = parser.parse_args(words)
    libraries = named(arguments)
    if unknown := [label for label in libraries if label not in LIBRARIES]:
        parser.error(f"no library {unknown[0]!r}: there are {', '.join(LIBRARIES)}")
    chosen = {s: [i for i, case in enumerate(SECTIONS[s]) if arguments.only in case.name] for s in arguments.sections}
    if not arguments.apart and set(libraries) & set(ALONE) and sum(map(len, chosen.values())) > 1:
        parser.error(f"{', '.join(ALONE)} ends a process in which it computes several cases: pass --apart")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: torch finds no GPU here")
        return 0
    has_failed = partial(has_failed_apart, arguments) if arguments.apart else Session(arguments).has_failed
    failed = 0
    for section, indices in chosen.items():
        print(f"\n| {section} | library | time | rate | error |\n| --- | --- | --- | --- | --- |", flush=True)
        failed += sum(has_failed(section, index) for index in indices)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
