"""Attention on one device beside every peer that is installed: same tensors, same clock, one run.

Time of a call is the median between two events, each pair after the L2 was filled by reading another buffer, so that
nothing is warm and the host is ahead. Decode is a CUDA graph's replay, merge kernels included. `--small --device cpu`
runs tiny shapes with the host's clock: it shows that the program works, nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from peers import PEERS, Batch, Call, installed
from workloads import DECODE, FP8_PREFILL, MORE_DECODE, MORE_PREFILL, PREFILL, Case

Key = TypeVar("Key")
SECTIONS = {
    "decode": DECODE,
    "more-decode": MORE_DECODE,
    "prefill": PREFILL,
    "more-prefill": MORE_PREFILL,
    "fp8-prefill": FP8_PREFILL,
}


class GpuClock:
    """Seconds of a call on the GPU."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flush = torch.zeros(128 << 20, dtype=torch.float32, device="cuda")  # 512 MiB: more than any L2

    def capture(self, call: Call) -> Callable[[], object]:
        """The call as a CUDA graph."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def seconds(self, call: Callable[[], object]) -> float:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        pairs = []
        for _ in range(self.repeats):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flush.amax()
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
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
    """Microseconds of each, the median of its rounds and the least: all in every round, as clocks drift."""
    spent: dict[Key, list[float]] = {key: [] for key in replays}
    for _ in range(rounds):
        for key, replay in replays.items():
            spent[key].append(clock.seconds(replay) * 1e6)
    return {key: f"{statistics.median(us):.1f} ({min(us):.1f})" for key, us in spent.items()}


def work(case: Case) -> tuple[int, int]:
    """Bytes that must move and floating-point operations of a case."""
    element = case.kv_dtype.itemsize
    kv_bytes = sum(case.kv_lens) * 2 * case.num_kv_heads * case.head_dim * element
    q_bytes = sum(case.q_lens) * 2 * case.num_q_heads * case.head_dim * 2
    visible = sum(case.visible(q, kv) for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    return kv_bytes + q_bytes, 4 * case.num_q_heads * case.head_dim * visible


def measure(case: Case, label: str, batch: Batch, clock: GpuClock | HostClock) -> dict[str, object] | None:
    """One figure, or what the peer said; None where it has no such call."""
    row: dict[str, object] = {"case": case.name, "library": label}
    try:
        call = PEERS[label][1](batch)
        if call is None:
            return None
        row["error"] = batch.error(call())
        seconds = clock.seconds(clock.capture(call) if case.q_len == 1 else call)
    except Exception as failure:  # a peer's refusal is a result
        return row | {"failed": f"{type(failure).__name__}: {failure}".splitlines()[0][:200]}
    num_bytes, flops = work(case)
    return row | {"us": seconds * 1e6, "gb_per_s": num_bytes / seconds / 1e9, "tflop_per_s": flops / seconds / 1e12}


def show(row: dict[str, object], section: str) -> None:
    if "failed" in row:
        print(f"| {row['case']} | {row['library']} | {row['failed']} | | |", flush=True)
        return
    rate = f"{row['gb_per_s']:,.0f} GB/s" if section.endswith("decode") else f"{row['tflop_per_s']:,.0f} TFLOP/s"
    print(f"| {row['case']} | {row['library']} | {row['us']:,.1f} us | {rate} | {row['error']:.1e} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--libraries", help=f"comma-separated; default: those installed, here {', '.join(installed())}")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", help="file to write the rows to")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    libraries = arguments.libraries.split(",") if arguments.libraries else installed()
    if unknown := [label for label in libraries if label not in PEERS]:
        parser.error(f"no library {unknown[0]!r}: there are {', '.join(PEERS)}")
    rows = []
    for section in arguments.sections:
        print(f"\n| {section} | library | time | rate | error |\n| --- | --- | --- | --- | --- |")
        for case in SECTIONS[section]:
            if arguments.only not in case.name:
                continue
            case = case.shrunk() if arguments.small else case
            torch.manual_seed(0)
            batch = Batch(case, device)
            for label in libraries:
                if row := measure(case, label, batch, clock):
                    rows.append({"section": section} | row)
                    show(row, section)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 1 if any("failed" in row and row["library"] == "flashpage" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
