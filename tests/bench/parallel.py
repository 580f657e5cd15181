"""Decode over a context that is spread over a host's cards, compared with the whole context on one of them.

    python tests/bench/parallel.py --ranks 2

Every rank has the same pages and reads only its share. Times are medians of the slowest rank's replays of CUDA graphs;
before each replay the L2 is flushed and the ranks wait for each other. Timed are the whole step (each rank's attention,
one collective, one merge), the step with heads="own", and the collective and merge alone. `--small --device cpu` runs
tiny shapes over gloo with the host's clock: it only shows that the program works.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from command_line import Parser
from gpu import GpuClock, HostClock
from record import Recorder
from workloads import Paged

import flashpage
from flashpage import parallel

WORKSPACE_BYTES = 256 << 20
TIMES = ("one card", "spread", "own heads", "collective and merge")


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests with one row each."""

    name: str
    batch: int
    kv_len: int  # tokens of each request
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    def shrunk(self) -> Case:
        return dataclasses.replace(self, batch=min(self.batch, 4), kv_len=70)


CASES = [
    Case("1 request, 128k", 1, 131072),
    Case("8 requests, 128k", 8, 131072),
    Case("64 requests, 16k", 64, 16384),
    Case("64 requests, 4k", 64, 4096),
    Case("16/2 heads, 8 requests, 128k", 8, 131072, num_q_heads=16, num_kv_heads=2),
]


def measure(case: Case, device: torch.device, clock: GpuClock | HostClock) -> dict[str, Any]:
    """The slowest rank's times, how much faster the ranks are than one card, and the largest error."""
    torch.manual_seed(0)
    pages = Paged([case.kv_len] * case.batch, case.page_size, device)
    cache = pages.cache(case.num_kv_heads, case.head_dim, torch.bfloat16)
    q = torch.randn(case.batch, case.num_q_heads, case.head_dim, device=device).to(torch.bfloat16)
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    one = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace)
    one.plan(pages.indptr, pages.indices, pages.last_page_len, *sizes, q_data_type=torch.bfloat16)
    expected, lse = one.run(q, cache, return_lse=True)
    calls: list[Callable[[], object]] = [lambda: one.run(q, cache)]
    errors = []
    for heads in ("all", "own"):
        spread = parallel.ContextParallelAttention(workspace.clone(), heads=heads)
        lens = torch.full((case.batch,), case.kv_len, dtype=torch.int32)
        spread.plan(pages.indptr, pages.indices, lens, *sizes, q_data_type=torch.bfloat16)
        part = case.num_q_heads // spread.world_size
        own = expected[:, spread.rank * part : (spread.rank + 1) * part] if heads == "own" else expected
        errors.append(float((spread.run(q, cache).float() - own.float()).norm() / own.float().norm()))
        calls.append(lambda spread=spread: spread.run(q, cache))
    calls.append(lambda: parallel.merge_over_group(expected, lse))
    all_us = [clock.seconds(clock.capture(call)) * 1e6 for call in calls]
    found = torch.tensor([*all_us, *errors], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    *times, all_error, own_error = found.tolist()
    us = dict(zip(TIMES, (round(each, 1) for each in times), strict=True))
    return {"us": us, "ratio": round(times[0] / times[1], 3), "error": float(f"{max(all_error, own_error):.2g}")}


class RanksClock(GpuClock):
    """Ranks begin each timed call together; otherwise a collective's time would include the wait for other hosts."""

    def __init__(self, repeats: int) -> None:
        super().__init__(repeats)
        self._token = torch.zeros(1, device="cuda")

    def prepare(self) -> None:
        super().prepare()
        dist.all_reduce(self._token)


def run_rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, f"file://{store}", world_size=arguments.ranks, rank=rank)
    clock = HostClock(arguments.repeats) if device.type == "cpu" else RanksClock(arguments.repeats)
    recorder = Recorder(arguments.json if rank == 0 else None)
    columns = ("case", "ranks", *TIMES, "one / spread", "error")
    if rank == 0:
        print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    for case in CASES:
        if arguments.only in case.name:
            found = measure(case.shrunk() if arguments.small else case, device, clock)
            recorder.add("parallel", case.name, ranks=arguments.ranks, **found)
            if rank == 0:
                cells = [*(f"{us:,.1f} us" for us in found["us"].values()), f"{found['ratio']:.2f}", found["error"]]
                print(f"| {case.name} | {arguments.ranks} | {' | '.join(map(str, cells))} |", flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="a divisor of the query heads")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", metavar="FILE", help="append the figures to this file")
    arguments = parser.parse_args()
    for case in CASES:
        if arguments.only in case.name and case.num_q_heads % arguments.ranks:
            parser.error(
                f"--ranks {arguments.ranks} does not divide the {case.num_q_heads} query heads of '{case.name}': "
                "pass a divisor"
            )
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.ranks:
        print(f"skipped: --ranks {arguments.ranks} needs as many GPUs, torch finds {torch.cuda.device_count()}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (arguments, f"{folder}/store"), nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
