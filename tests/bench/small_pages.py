"""Prefill over small pages: microseconds with row-by-row loads and with their alternatives, alternating in one run.

`gathered`: K and V of pages of one token are copied to contiguous rows, then read in boxes, whether or not a plan would
do so (flashpage/plan/gather_rows.py); `ragged`: without the copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from command_line import Parser
from gpu import GpuClock, HostClock, in_turns
from peers import Batch
from workloads import Case

import flashpage
from flashpage.plan import gather_rows

CASES = (
    Case("4 x 4k", 4, 4096, 4096, page_size=1),
    Case("1 x 16k", 1, 16384, 16384, page_size=1),
    Case("1 x 16k, full", 1, 16384, 16384, page_size=1, causal=False),
    Case("16 x 1k", 16, 1024, 1024, page_size=1),
    Case("append 512 on 16k", 4, 512, 16384, page_size=1),
    Case("page 5, 4 x 4k", 4, 4096, 4096, page_size=5),
    Case("page 4, 4 x 4k", 4, 4096, 4096, page_size=4),
)
COLUMNS = ("rows", "gathered", "ragged")
Run = Callable[[], torch.Tensor]


def paged(batch: Batch, *, gathers: bool) -> Run:
    case, table = batch.case, batch.table
    gather_rows.LEAST_ROWS = gather_rows.LEAST_ROWS_AND_STARTS = 0 if gathers else 1 << 40  # all batches, or none
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=batch.device)
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace)
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    indices = (batch.q_indptr, table.indptr, table.indices, table.last_page_len)
    wrapper.plan(*indices, *heads, causal=case.causal, q_data_type=batch.q.dtype, kv_data_type=case.kv_dtype)
    can_gather = gathers and gather_rows.runs_on(batch.device)
    assert (gather_rows.NOTE in wrapper.last_plan.notes) is can_gather
    out = torch.empty_like(batch.q)
    return lambda: wrapper.run(batch.q, batch.cache, out=out)


def ragged(batch: Batch) -> Run:
    """A ragged batch, from pages of one token."""
    case, out = batch.case, torch.empty_like(batch.q)
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device=batch.device)
    )
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
    wrapper.plan(batch.q_indptr, batch.kv_indptr, *heads, causal=case.causal, q_data_type=batch.q.dtype)
    rows = batch.cache.squeeze(2)[batch.table.indices.long()]
    return lambda: wrapper.run(batch.q, rows[:, 0], rows[:, 1], out=out)


def measure(case: Case, rounds: int, clock: GpuClock | HostClock, device: torch.device) -> None:
    torch.manual_seed(0)
    batch = Batch(case, device)
    runs: dict[str, Run] = {"rows": paged(batch, gathers=False)}
    if case.page_size == 1:
        runs |= {"gathered": paged(batch, gathers=True), "ragged": ragged(batch)}
    for name, run in runs.items():
        error = batch.error(run())
        if not error < 1e-2:
            raise SystemExit(f"{case.name}, {name}: a relative error of {error}")
    times = in_turns({name: clock.capture(run) for name, run in runs.items()}, rounds, clock)
    print("| " + " | ".join([case.name, *(times.get(name, "") for name in COLUMNS)]) + " |", flush=True)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15, help="replays in each round, of which the median counts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    print("| case, us: median of rounds (least) | " + " | ".join(COLUMNS) + " |")
    print("| --- " * (len(COLUMNS) + 1) + "|")
    for case in CASES:
        if arguments.only in case.name:
            measure(case.shrunk() if arguments.small else case, arguments.rounds, clock, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
