"""Cases that no table lists, against the best peer in turns: drawn heads, head dims, pages, batches, lengths, options.

A seed always draws the same cases. A run times cases that the file of `--json` does not have yet, until its seconds are
over, so a sweep can be run in parts; kernels of the next cases compile meanwhile. It ends with a report of all lines of
the file: the cases in which the best peer takes less than 1.02 of flashpage's time. `--small --device cpu` runs tiny
shapes with the host's clock: it only shows that the program works.

A new option is a word of OPTIONS, its field of `Case` (workloads.py), which `draw` sets, and its words in `name_of`,
which docs/sweep_causes.py reads. In peers.py `planned`, `reference` and the call of each peer must honour it, or return
None: a peer that ignores it would count as the best one, and only its recorded error would tell. Each change of what is
drawn gives every seed other cases, so it begins a new file of `--json`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from command_line import Parser
from gpu import GpuClock, HostClock, figures, measure
from peers import PEERS, Lengths, installed, planned
from record import Recorder
from workloads import Case

SECTION = "sweep"
# The best peer's time over flashpage's: what a case should reach, and what hardly any may miss.
ENOUGH, EQUAL = 1.02, 1.0
MOST_KV_BYTES, MOST_FLOPS = 8e9, 6e12  # of a case: some 8 ms
LEAST_TOKENS, MOST_TOKENS = 64, 131072
AHEAD = 24  # cases whose kernels compile while others run

WORK = {"decode": 9, "prefill": 7, "append": 4}  # weights
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
DIMS = {64: 4, 80: 1, 96: 2, 112: 1, 128: 10, 192: 1, 256: 3}
PAGES = {1: 2, 16: 5, 32: 1, 64: 2, 128: 1}
KINDS = ("uniform", "lognormal", "zipf", "one-long")
OPTIONS = {"plain": 14, "window": 2, "soft cap": 2, "not causal": 1, "e4m3": 1}


def drawn(seed: int, count: int) -> list[Case]:
    """The first `count` cases of a seed."""
    source = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        case = draw(source)
        if is_sensible(case):
            cases.append(dataclasses.replace(case, name=f"{seed}.{len(cases):03} {name_of(case)}"))
    return cases


def draw(source: random.Random) -> Case:
    kind_of_work, option = choose(source, WORK), choose(source, OPTIONS)
    num_kv_heads = source.choice((1, 2, 4, 8, 8, 16, 32))
    kv_len = size(source, LEAST_TOKENS, MOST_TOKENS)
    is_decode = kind_of_work == "decode"
    q_len = {"decode": 1, "prefill": kv_len}.get(kind_of_work) or size(source, 2, 4096)
    is_ragged = kind_of_work == "prefill" and source.random() < 0.5
    changes: dict[str, Any] = {}
    if option == "window":
        changes["window_left"] = source.choice((127, 511, 1023, 4095))
    elif option == "soft cap":
        changes["soft_cap"] = source.choice((30.0, 50.0))
    elif option == "not causal" and not is_decode:
        changes["causal"] = False
    elif option == "e4m3" and not is_decode:
        changes["q_dtype"] = changes["kv_dtype"] = torch.float8_e4m3fn
    return Case(
        name="",
        batch=size(source, 1, 256),
        q_len=q_len,
        kv_len=kv_len,
        kind=source.choice(KINDS),
        num_q_heads=num_kv_heads * source.choice(GROUPS),
        num_kv_heads=num_kv_heads,
        head_dim=choose(source, DIMS),
        page_size=0 if is_ragged else choose(source, PAGES),
        **changes,
    )


def choose(source: random.Random, weights: dict[Any, int]) -> Any:
    return source.choices(list(weights), list(weights.values()))[0]


def size(source: random.Random, least: int, most: int) -> int:
    """Any order of magnitude is as likely as another."""
    return round(math.exp(source.uniform(math.log(least), math.log(most))))


def is_sensible(case: Case) -> bool:
    """Whether a server could have the batch, and a card computes it in milliseconds."""
    if case.num_q_heads > 128 or case.batch * case.kv_len * case.num_kv_heads > MOST_KV_BYTES / 64:
        return False
    lengths = list(zip(case.q_lens, case.kv_lens, strict=True))
    if any(q > kv for q, kv in lengths):
        return False
    pairs = sum(q * kv - case.causal * (q * (q - 1) // 2) for q, kv in lengths)
    num_bytes = 2 * case.num_kv_heads * case.head_dim * case.kv_dtype.itemsize * sum(kv for _, kv in lengths)
    return num_bytes <= MOST_KV_BYTES and 4 * case.num_q_heads * case.head_dim * pairs <= MOST_FLOPS


def name_of(case: Case) -> str:
    rows = "decode" if case.q_len == 1 else "prefill" if case.q_len == case.kv_len else f"append {case.q_len}"
    words = [rows, f"b{case.batch} c{case.kv_len} {case.kind}", f"{case.num_q_heads}/{case.num_kv_heads}"]
    words += [f"d{case.head_dim}", f"page {case.page_size}" if case.page_size else "ragged"]
    words += [f"window {case.window_left + 1}"] if case.window_left >= 0 else []
    words += [f"cap {case.soft_cap:g}"] if case.soft_cap else []
    words += [] if case.causal else ["not causal"]
    words += [] if case.q_dtype == torch.bfloat16 else ["e4m3"]
    return ", ".join(words)


class Compiler:
    """Compiles flashpage's kernels of the next cases while others run: plans of them do. They are made in another
    process, so that its threads do not delay the launches that are timed."""

    def __init__(self, arguments: Sequence[str], cases: Sequence[Case]) -> None:
        self.cases = cases
        command = (sys.executable, __file__, *arguments, "--only-compile")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.write("\n" * AHEAD)

    def __iter__(self) -> Iterator[Case]:
        assert self.process.stdout is not None
        for case in self.cases:
            self.process.stdout.readline()  # waits for its kernels; an empty line if the process has failed
            self.write("\n")
            yield case

    def write(self, asked: str) -> None:
        """Asks for one case more for each line."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(asked)
            self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def compile_when_asked(cases: Iterable[Case], device: torch.device) -> None:
    """The other process of a Compiler: begins with a case for each line that it reads, and prints a line for each that
    is done, in their order."""
    with ThreadPoolExecutor(8) as pool:
        futures: queue.Queue[Future[object] | None] = queue.Queue()

        def plan(case: Case) -> None:
            planned("flashpage", Lengths(case, device))

        def tell() -> None:
            while (future := futures.get()) is not None:
                future.exception()  # the measurement reports what is refused
                print(flush=True)

        teller = threading.Thread(target=tell)
        teller.start()
        for case, _ in zip(cases, sys.stdin, strict=False):
            futures.put(pool.submit(plan, case))
        futures.put(None)
        teller.join()


def timed(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of a file by case; a later line replaces an earlier one."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["case"]: line for line in lines if line["section"] == SECTION}


def report(lines: Iterable[dict[str, Any]]) -> None:
    lines = list(lines)
    compared = [line for line in lines if line["ratio"]]
    if not compared:
        print(f"{len(lines)} cases, none with a peer")
        return
    ratios = [line["ratio"] for line in compared]
    slower = sorted((line for line in compared if line["ratio"] < ENOUGH), key=lambda line: line["ratio"])
    print(f"\n| below {ENOUGH} | ratio | us | best peer |\n| --- | --- | --- | --- |")
    for line in slower:
        print(f"| {line['case']} | {line['ratio']:.3f} | {line['us']['flashpage']:,.1f} | {line['best_peer']} |")
    lost = sum(ratio < EQUAL for ratio in ratios)
    print(
        f"{len(lines)} cases, {len(ratios)} with a peer: {lost} ({lost / len(ratios):.1%}) below {EQUAL:g},"
        f" {len(slower)} below {ENOUGH}, geometric mean {statistics.geometric_mean(ratios):.3f}"
    )


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins after so many; 0: only report")
    parser.add_argument("--json", default="sweep.jsonl", help="append one line for each case to this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--again", action="store_true", help="time cases that the file has, too")
    parser.add_argument("--libraries", help=f"comma-separated; default: those installed, here {', '.join(installed())}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each library in a round")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, in each of which all libraries are timed")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--only-compile", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device, path, start = torch.device(arguments.device), Path(arguments.json), time.perf_counter()
    libraries = arguments.libraries.split(",") if arguments.libraries else installed()
    if unknown := [label for label in libraries if label not in PEERS]:
        parser.error(f"no library {unknown[0]!r}: there are {', '.join(PEERS)}")
    known = {} if arguments.again else timed(path)
    cases = [
        case.shrunk() if arguments.small else case
        for case in drawn(arguments.seed, arguments.cases)
        if arguments.only in case.name and case.name not in known
    ]
    if arguments.only_compile:
        compile_when_asked(cases, device)
        return 0
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    recorder = Recorder(str(path))
    if cases and time.perf_counter() - start < arguments.seconds:
        compiler = Compiler(sys.argv[1:], cases)
        for case in compiler:
            torch.manual_seed(0)
            try:
                found = figures(case, measure(case, libraries, device, clock, arguments.rounds))
            except torch.OutOfMemoryError:
                found = {"ratio": None, "refused": {"all": "out of memory"}}
            recorder.add(SECTION, case.name, **found)
            print(f"{case.name}: {found['ratio']} {found['refused'] or ''}", flush=True)
            if time.perf_counter() - start >= arguments.seconds:
                break
        compiler.stop()
    lines = timed(path).values()
    report(lines)
    return int(any("flashpage" in line["refused"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
