"""Decodes and prompts of an engine's step in one call, against the best peers' two calls one after the other.

A part's peers take turns first: for decodes FlashInfer and a scheduled FlashAttention-3, for prompts FlashAttention-3,
FlashInfer and cuDNN. Prompts without earlier context are also given to them as contiguous tensors, in place of pages.
Then flashpage's call and the two fastest calls take turns. All of it is one run on the same tensors, after a flush of
the L2. `--ways` times flashpage alone instead: each part, one after the other, as one plan, and as two
(flashpage/plan/mixed_batch.py). `--small --device cpu` runs tiny shapes with the host's clock: it only shows that the
program works.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from command_line import Parser
from gpu import GpuClock, HostClock, rounds_of
from peers import PEERS, Batch, Call, installed
from record import Recorder
from workloads import Case, indptr

import flashpage
from flashpage.plan import mixed_batch

SECTION = "mixed"
PEERS_OF = {
    "decodes": ("flashinfer fa2", "fa3 scheduled"),
    "prompts": ("fa3", "flashinfer fa3", "torch cudnn"),
}
CONTIGUOUS = ", contiguous"  # end of a peer's label
MUST = 1.35  # the peers' time over flashpage's
MOST_TIMES_THE_LARGER = 1.15  # bound of the first mix's time over that of its larger part
WORKSPACE_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Mix:
    """A step: prompts, or chunks of them, and decodes."""

    prompts: Case
    decodes: Case

    @property
    def name(self) -> str:
        return f"{self.prompts.name}, {self.decodes.name}"

    def shrunk(self) -> Mix:
        return Mix(self.prompts.shrunk(), self.decodes.shrunk())


MIXES = [
    Mix(Case("1 x 4k", 1, 4096, 4096), Case("128 decodes of 8k", 128, 1, 8192)),
    Mix(Case("4 x 2k", 4, 2048, 2048), Case("64 decodes of 4k", 64, 1, 4096)),
    Mix(Case("1 x 512", 1, 512, 512), Case("256 decodes of 1k", 256, 1, 1024)),
    Mix(Case("chunk of 2k on 16k", 1, 2048, 16384), Case("64 decodes of 4k", 64, 1, 4096)),
    Mix(Case("4 chunks of 512 on 8k", 4, 512, 8192), Case("128 decodes as in chats, mean 2k", 128, 1, 2048, "chat")),
]


class Step:
    """The tensors of a mix: each part's, and both parts' in one. The parts' caches are views of one cache."""

    def __init__(self, mix: Mix, device: torch.device) -> None:
        self.mix, self.device = mix, device
        self.prompts, self.decodes = parts = Batch(mix.prompts, device), Batch(mix.decodes, device)
        self.q = torch.cat([part.q for part in parts])
        self.cache = torch.cat([part.cache for part in parts])
        pages = self.prompts.table.num_pages
        self.prompts.cache, self.decodes.cache = self.cache[:pages], self.cache[pages:]
        tables = [part.table for part in parts]
        self.indices = torch.cat([tables[0].indices, tables[1].indices + pages])
        self.kv_indptr = torch.cat([tables[0].indptr, tables[1].indptr[1:] + pages])
        self.last_page_len = torch.cat([table.last_page_len for table in tables])
        self.q_indptr = indptr([*self.prompts.q_lens, *self.decodes.q_lens])
        self.wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        )

    def call(self) -> Call:
        """flashpage's call for both parts, which is planned now."""
        case = self.mix.decodes
        lengths = (self.q_indptr, self.kv_indptr, self.indices, self.last_page_len)
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        self.wrapper.plan(*lengths, *heads, causal=True, q_data_type=case.q_dtype)
        return lambda: self.wrapper.run(self.q, self.cache)

    def error(self, out: torch.Tensor) -> float:
        rows = len(self.prompts.q)
        return max(self.prompts.error(out[:rows]), self.decodes.error(out[rows:]))

    def ctas(self) -> str:
        plan: Any = self.wrapper.last_plan
        return " + ".join(str(part.num_ctas) for part in getattr(plan, "parts", [plan]))


def forms(part: Batch) -> Iterator[tuple[str, Batch]]:
    """The end of a label, and the tensors: in pages, and prompts without earlier context as contiguous ones, too."""
    yield "", part
    if part.q_lens == part.kv_lens and not part.case.is_decode:
        contiguous = Batch(dataclasses.replace(part.case, page_size=0), part.device)
        requests = [part.keys_and_values(i) for i in range(part.case.batch)]
        contiguous.q = part.q
        contiguous.k, contiguous.v = (torch.cat(tensors) for tensors in zip(*requests, strict=True))
        yield CONTIGUOUS, contiguous


@dataclasses.dataclass
class Peers:
    """The peers' calls of one part, their errors and median microseconds, and the refusals."""

    calls: dict[str, Call]
    errors: dict[str, float]
    refused: dict[str, str]
    us: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> str:
        return min(self.us, key=self.us.__getitem__, default="")


def peers_of(part: Batch, labels: Sequence[str], rounds: int, clock: GpuClock | HostClock) -> Peers:
    """Calls of a part, timed in turns."""
    found = Peers({}, {}, {})
    for end, batch in forms(part):
        for label in labels:
            try:
                call = PEERS[label][1](batch)
                if call is None:  # the library does not support the case
                    continue
                found.errors[label + end] = batch.error(call())
                found.calls[label + end] = call
            except Exception as failure:
                found.refused[label + end] = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
    found.us = {label: statistics.median(us) for label, us in rounds_of(found.calls, rounds, clock).items()}
    return found


def in_order(calls: Sequence[Call]) -> Callable[[], object]:
    return lambda: [call() for call in calls]


def measure(
    step: Step, labels: dict[str, Sequence[str]], rounds: int, clock: GpuClock | HostClock
) -> tuple[dict[str, Any], dict[str, Peers]]:
    """A mix as a record, and the peers of its parts."""
    own = step.call()
    errors = {"flashpage": step.error(own())}
    parts = {name: peers_of(getattr(step, name), labels[name], rounds, clock) for name in PEERS_OF}
    best = {name: peers.best for name, peers in parts.items()}
    calls: dict[str, Callable[[], object]] = {"flashpage": own}
    if all(best.values()):
        calls["peers"] = in_order([peers.calls[peers.best] for peers in parts.values()])
        errors["peers"] = max(peers.errors[peers.best] for peers in parts.values())
    us = {label: statistics.median(times) for label, times in rounds_of(calls, rounds, clock).items()}
    figures = {
        "us": {label: round(value, 2) for label, value in us.items()},
        "parts": {name: {label: round(value, 2) for label, value in peers.us.items()} for name, peers in parts.items()},
        "best": best,
        "errors": {label: float(f"{value:.2g}") for label, value in errors.items()},
        "refused": {label: words for peers in parts.values() for label, words in peers.refused.items()},
        "ratio": round(us["peers"] / us["flashpage"], 4) if "peers" in us else None,
        "must": MUST,
        "ctas": step.ctas(),
    }
    return figures, parts


def show(name: str, figures: dict[str, Any], parts: dict[str, Peers]) -> None:
    for part, peers in parts.items():
        for label, us in peers.us.items():
            print(f"| {name} | {part} by {label} | {us:,.1f} us | | {peers.errors[label]:.1e} |")
        for label, words in peers.refused.items():
            print(f"| {name} | {part} by {label} | {words} | | |")
    if "peers" in figures["us"]:
        print(f"| {name} | {' then '.join(figures['best'].values())} | {figures['us']['peers']:,.1f} us | | |")
    own, ratio = figures["us"]["flashpage"], f"{figures['ratio']:.3f}" if figures["ratio"] else ""
    error = figures["errors"]["flashpage"]
    print(f"| {name} | flashpage, {figures['ctas']} CTAs | {own:,.1f} us | {ratio} | {error:.1e} |", flush=True)


def show_ways(step: Step, rounds: int, clock: GpuClock | HostClock) -> float:
    """One row for each of flashpage's ways; returns the planned way's time, divided by that of the larger part."""
    halves = [PEERS["flashpage"][1](part) for part in (step.prompts, step.decodes)]
    calls: dict[str, Callable[[], object]] = {"prompts alone": halves[0], "decodes alone": halves[1]}
    calls["one after the other"] = in_order(halves)
    ctas = {}
    steps = {"one plan": math.inf, "as planned": mixed_batch.LEAST_GAIN_NS}
    for way, gain in steps.items():
        with mock.patch.object(mixed_batch, "LEAST_GAIN_NS", gain):
            other = Step(step.mix, step.device)
            calls[way] = other.call()
            ctas[way] = other.ctas()
    us = {way: statistics.median(times) for way, times in rounds_of(calls, rounds, clock).items()}
    larger = max(us["prompts alone"], us["decodes alone"])
    for way, value in us.items():
        print(f"| {step.mix.name} | {way} | {value:,.1f} us | {value / larger:.2f} | {ctas.get(way, '')} |", flush=True)
    return us["as planned"] / larger


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="mixes whose name contains this")
    for part, labels in PEERS_OF.items():
        parser.add_argument(f"--{part}", default=",".join(labels), help="comma-separated libraries of this part")
    parser.add_argument("--ways", action="store_true", help="time flashpage's ways, and no peers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each library in a round")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, in each of which all libraries are timed")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    parser.add_argument("--json", help="append one line for each mix to this file (docs/figures.py reads it)")
    arguments = parser.parse_args()
    device, recorder = torch.device(arguments.device), Recorder(arguments.json)
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    labels = {part: [x for x in getattr(arguments, part).split(",") if x in installed()] for part in PEERS_OF}
    names = ("of the larger part", "CTAs") if arguments.ways else ("peers / flashpage", "error")
    print(f"| mix | call | time | {' | '.join(names)} |\n| --- | --- | --- | --- | --- |")
    is_good = True
    for mix in MIXES:
        if arguments.only not in mix.name:
            continue
        torch.manual_seed(0)
        step = Step(mix.shrunk() if arguments.small else mix, device)
        if arguments.ways:
            times = show_ways(step, arguments.rounds, clock)
            is_good &= mix is not MIXES[0] or times <= MOST_TIMES_THE_LARGER
            continue
        figures, parts = measure(step, labels, arguments.rounds, clock)
        show(mix.name, figures, parts)
        recorder.add(SECTION, mix.name, **figures)
        is_good &= figures["ratio"] is None or figures["ratio"] >= MUST
    return 1 if arguments.check and not is_good else 0


if __name__ == "__main__":
    sys.exit(main())
