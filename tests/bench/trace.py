"""When each CTA of a decode launch starts, loads, computes and ends: clock stamps of a kernel compiled with a trace.

Times are microseconds after the first CTA's start, medians of several launches, each after a flush of the L2. The
steps' figures are over the CTAs that had work; `spread` is the time between the first end and the last one, as a share
of the whole time.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from command_line import Parser
from gpu import GpuClock, work
from peers import Batch
from workloads import DECODE, MORE_DECODE, Case

import flashpage
from flashpage.run.stamps import NAMES

CASES = (  # without --only
    "batch 1, context 1k",
    "batch 1, context 32k",
    "batch 16, context 4k",
    "batch 64, context 4k",
    "batch 64, context 4k, lognormal",
    "batch 64, context 4k, Zipf",
    "batch 64, context 4k, one long",
    "batch 256, context 1k",
    "e4m3 KV, batch 64, context 4k",
    "batch 256, chat",
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Stamps of one launch."""

    num_ctas: int  # CTAs with work
    steps: np.ndarray  # [stamps without the SM, (min, mean, max)] microseconds; NaN: no stamp
    spread: float  # between the first end and the last one, as a share of the time

    @staticmethod
    def of(stamps: np.ndarray, names: Sequence[str]) -> Launch | None:
        """A launch from [CTAs, stamps] nanoseconds, 0 where a CTA has no stamp; None if no CTA had work."""
        busy = stamps[stamps[:, names.index("first_tile")] > 0][:, : names.index("sm")]
        if not len(busy):
            return None
        starts = stamps[:, names.index("start")]
        times = np.where(busy > 0, (busy - starts[starts > 0].min()) / 1e3, np.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # steps that no CTA has
            steps = np.stack([np.nanmin(times, 0), np.nanmean(times, 0), np.nanmax(times, 0)], 1)
        first, _, last = steps[names.index("end")]
        return Launch(len(busy), steps, float((last - first) / last))

    @staticmethod
    def median(launches: list[Launch]) -> Launch:
        return Launch(
            int(np.median([launch.num_ctas for launch in launches])),
            np.median(np.stack([launch.steps for launch in launches]), 0),
            float(np.median([launch.spread for launch in launches])),
        )


class Traced:
    """One case, planned."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.batch = case, Batch(case, device)
        workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
        self.wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace)
        table = self.batch.table
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": case.kv_dtype}
        self.wrapper.plan(table.indptr, table.indices, table.last_page_len, *heads, **dtypes)
        self.out = torch.empty_like(self.batch.q)
        self.run()

    def run(self) -> object:
        return self.wrapper.run(self.batch.q, self.batch.cache, out=self.out)

    def launches(self, clock: GpuClock) -> list[Launch]:
        found = []
        with self.wrapper._attention.recorded() as recorder:
            for _ in range(1 + clock.repeats):  # the first run compiles the kernel with stamps
                clock.flush.amax()
                torch.cuda.synchronize()
                self.run()
                torch.cuda.synchronize()
                found.append(Launch.of(recorder.runs.pop().stamps(), NAMES))
        return [launch for launch in found[1:] if launch is not None]


def show(case: Case, seconds: float, kernel: str, launch: Launch | None, names: Sequence[str]) -> None:
    rate = work(case)[0] / seconds / 1e9
    print(f"\n{case.name}: {kernel}, {seconds * 1e6:.1f} us as a graph, {rate:,.0f} GB/s", end="")
    if launch is None:
        print("; no stamps: this kernel has no trace", flush=True)
        return
    print(f"; {launch.num_ctas} CTAs with work, spread of their ends {launch.spread:.1%}")
    print("| step | min | mean | max |\n| --- | --- | --- | --- |")
    for name, (least, mean, most) in zip(names, launch.steps, strict=False):
        print(f"| {name} | {least:.2f} | {mean:.2f} | {most:.2f} |", flush=True)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", help="cases of `decode` and `more-decode` whose name contains this")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="exit with 1 if ends spread by 5%% or more")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch finds no GPU here")
        return 0
    clock, uneven = GpuClock(arguments.repeats), []
    for case in (*DECODE, *MORE_DECODE):
        if case.name not in CASES if arguments.only is None else arguments.only not in case.name:
            continue
        torch.manual_seed(0)
        traced = Traced(case, torch.device("cuda"))
        seconds = clock.seconds(clock.capture(traced.run))
        launches = traced.launches(clock)
        launch = Launch.median(launches) if launches else None
        show(case, seconds, traced.wrapper.last_plan.spec.kernel, launch, NAMES)
        if launch is not None and launch.spread >= 0.05:
            uneven.append(case.name)
        del traced
    print(f"\nends spread by 5% or more: {', '.join(uneven) or 'nowhere'}")
    return int(arguments.check and bool(uneven))


if __name__ == "__main__":
    sys.exit(main())
