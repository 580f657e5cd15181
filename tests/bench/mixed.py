"""Prompts and decodes in one batch, compared with either alone: as two parts and as one plan (plan/mixed_batch.py), and
as two wrappers that run one after the other.

One run times everything on the same numbers, after a flush of the L2. `--small --device cpu` runs tiny shapes with the
host's clock: it only shows that the program works.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from gpu import GpuClock, HostClock
from workloads import Paged, indptr

import flashpage
from flashpage.plan import mixed_batch

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
WORKSPACE_BYTES = 256 << 20
MOST_TIMES_THE_LARGER = 1.15  # bound of the first case


@dataclasses.dataclass(frozen=True)
class Case:
    """Prompts without earlier context, and decodes."""

    prompts: int
    prompt_len: int
    decodes: int
    kv_len: int

    def shrunk(self) -> Case:
        return Case(1, 40, min(self.decodes, 3), 64)

    def __str__(self) -> str:
        return f"{self.prompts} x {self.prompt_len} + {self.decodes} x {self.kv_len}"


CASES = [
    Case(1, 4096, 128, 8192),
    Case(4, 2048, 64, 4096),
    Case(1, 512, 256, 1024),
    Case(1, 2048, 64, 2048),
    Case(1, 8192, 64, 8192),
    Case(2, 1024, 32, 32768),
]


class Batch:
    """Requests of a case in one wrapper."""

    def __init__(self, q_lens: list[int], kv_lens: list[int], device: torch.device) -> None:
        torch.manual_seed(0)
        self.q_indptr, self.table = indptr(q_lens), Paged(kv_lens, PAGE_SIZE, device)
        self.cache = self.table.cache(NUM_KV_HEADS, HEAD_DIM, torch.bfloat16)
        self.q = torch.randn(sum(q_lens), NUM_Q_HEADS, HEAD_DIM, device=device).to(torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        )

    def planned(self) -> Callable[[], Any]:
        """A run of the batch, which is planned now."""
        table, heads = self.table, (NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE)
        lengths = (self.q_indptr, table.indptr, table.indices, table.last_page_len)
        self.wrapper.plan(*lengths, *heads, causal=True, q_data_type=torch.bfloat16)
        return lambda: self.wrapper.run(self.q, self.cache, out=self.out)

    def seconds(self, clock: GpuClock | HostClock) -> float:
        run = self.planned()
        self.out.fill_(math.nan)
        found = clock.seconds(run)
        assert not bool(self.out.isnan().any())
        return found


def ctas_of(plan: Any) -> str:
    return " + ".join(str(part.num_ctas) for part in getattr(plan, "parts", [plan]))


def measure(case: Case, device: torch.device, clock: GpuClock | HostClock) -> float:
    """One row for each way, with its time divided by that of the larger part."""
    prompts, decodes = [case.prompt_len] * case.prompts, [1] * case.decodes
    contexts = [case.kv_len] * case.decodes
    halves = [Batch(prompts, prompts, device), Batch(decodes, contexts, device)]
    alone = [half.seconds(clock) for half in halves]
    runs = [half.planned() for half in halves]
    in_turn = clock.seconds(lambda: [run() for run in runs])
    print(
        f"| {case} | prompts alone | {alone[0] * 1e6:.1f} us | | |\n| | decodes alone | {alone[1] * 1e6:.1f} us | | |"
    )
    print(f"| | one after the other | {in_turn * 1e6:.1f} us | {in_turn / max(alone):.2f} | |")
    ratio = 0.0
    for way, gain in (("one plan", math.inf), ("as planned", mixed_batch.LEAST_GAIN_NS)):
        mixed_batch.LEAST_GAIN_NS, usual = gain, mixed_batch.LEAST_GAIN_NS
        both = Batch(prompts + decodes, prompts + contexts, device)
        seconds = both.seconds(clock)
        mixed_batch.LEAST_GAIN_NS = usual
        ratio = seconds / max(alone)
        print(f"| | {way} | {seconds * 1e6:.1f} us | {ratio:.2f} | {ctas_of(both.wrapper.last_plan)} |", flush=True)
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the first case misses its bound")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    print("| | | time | of the larger alone | CTAs |\n| --- | --- | --- | --- | --- |")
    ratios = [measure(case.shrunk() if arguments.small else case, device, clock) for case in CASES]
    return 1 if arguments.check and ratios[0] > MOST_TIMES_THE_LARGER else 0


if __name__ == "__main__":
    sys.exit(main())
