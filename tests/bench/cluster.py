"""Decode of small batches with clusters of each size: microseconds of a graph's replay, sizes alternating in one run.

`general`: units are cut anywhere and merged through partials; `1`: each unit has its own CTA; `2` to `16`: each unit
has a cluster of that size; `planner`: the planner chooses. Sizes with too few clusters for the units are skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from command_line import Parser
from gpu import GpuClock, HostClock, in_turns
from peers import Batch
from workloads import Case

import flashpage
from flashpage.kernels.schedules import CLUSTER_SIZES

sys.path.append(str(Path(__file__).parents[1] / "support"))
from cluster_sizes import FREELY, GENERAL, choose, give_to_cpu, schedule_of

CASES = (
    Case("1 x 256", 1, 1, 256),
    Case("1 x 1k", 1, 1, 1024),
    Case("1 x 4k", 1, 1, 4096),
    Case("1 x 32k", 1, 1, 32768),
    Case("1 x 128k", 1, 1, 131072),
    Case("2 x 8k", 2, 1, 8192),
    Case("4 x 1k", 4, 1, 1024),
    Case("4 x 4k", 4, 1, 4096),
    Case("8 x 4k", 8, 1, 4096),
    Case("16 x 1k", 16, 1, 1024),
    Case("16 x 4k", 16, 1, 4096),
    Case("64 x 8k, 8/1 heads", 64, 1, 8192, num_q_heads=8, num_kv_heads=1),
    Case("1 x 32k, page 1", 1, 1, 32768, page_size=1),
    Case("4 x 4k, d 64", 4, 1, 4096, head_dim=64),
    Case("4 x 4k, d 256", 4, 1, 4096, head_dim=256, num_q_heads=16),
    Case("4 x 4k, e4m3", 4, 1, 4096, kv_dtype=torch.float8_e4m3fn),
    Case("64 x 4k", 64, 1, 4096),  # always `general`: shows that nothing is lost
)
NAMES = {GENERAL: "general", FREELY: "planner"}


class Planned:
    """One case with one size of clusters."""

    def __init__(self, batch: Batch, size: int) -> None:
        case, table = batch.case, batch.table
        device = batch.q.device
        workspace = torch.empty((256 if device.type == "cuda" else 16) << 20, dtype=torch.uint8, device=device)
        self.wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace)
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        dtypes = {"q_data_type": batch.q.dtype, "kv_data_type": case.kv_dtype}

        def plan() -> None:
            self.wrapper.plan(table.indptr, table.indices, table.last_page_len, *heads, **dtypes)

        plan()
        schedule = schedule_of(self.wrapper)
        if device.type == "cpu":
            give_to_cpu(schedule)
        runs = choose(schedule, size)
        plan()
        self.has_size = runs and size in (FREELY, self.wrapper.last_plan.result.cluster_size)
        self.batch, self.out = batch, torch.empty_like(batch.q)

    def run(self) -> torch.Tensor:
        out: torch.Tensor = self.wrapper.run(self.batch.q, self.batch.cache, out=self.out)
        return out


def measure(case: Case, sizes: list[int], rounds: int, clock: GpuClock | HostClock, device: torch.device) -> None:
    torch.manual_seed(0)
    batch = Batch(case, device)
    found = {size: planned for size in sizes if (planned := Planned(batch, size)).has_size}
    for size, planned in found.items():
        planned.run()
        error = (planned.out.float() - found[sizes[0]].out.float()).abs().max().item() if sizes[0] in found else 0.0
        if not error < 2e-2:
            raise SystemExit(f"{case.name}, clusters of {size}: {error} away from clusters of {sizes[0]}")
    times = in_turns({size: clock.capture(planned.run) for size, planned in found.items()}, rounds, clock)
    cells = [times.get(size, "") for size in sizes]
    if FREELY in found:
        last = found[FREELY].wrapper.last_plan.result
        cells.append(f"{last.cluster_size} x {last.num_ctas}")
    print("| " + " | ".join([case.name, *cells]) + " |", flush=True)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sizes", default="", help=f"comma-separated, of {', '.join(map(str, CLUSTER_SIZES))}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=15, help="replays in each round, of which the median counts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    wanted = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else list(CLUSTER_SIZES)
    sizes = [GENERAL, *wanted, FREELY]
    names = [NAMES.get(size, str(size)) for size in sizes]
    print("| case, us: median of rounds (least) | " + " | ".join([*names, "planner's size x CTAs"]) + " |")
    print("| --- " * (len(sizes) + 2) + "|")
    for case in CASES:
        if arguments.only in case.name:
            measure(case.shrunk() if arguments.small else case, sizes, arguments.rounds, clock, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
