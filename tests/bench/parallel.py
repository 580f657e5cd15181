"""Decode over a context that is spread over a host's cards, compared with the whole context on one of them.

    python tests/bench/parallel.py --ranks 2

Every rank has the same pages and reads only its share. Times are medians of the slowest rank, after a flush of the L2
before each run: the whole step (each rank's attention, one collective, one merge), the step with heads="own", and the
collective and merge alone. `--small --device cpu` runs tiny shapes over gloo with the host's clock: it only shows that
the program works.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpu import GpuClock, HostClock
from workloads import Paged

import flashpage
from flashpage import parallel

WORKSPACE_BYTES = 256 << 20


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


def measure(case: Case, device: torch.device, clock: GpuClock | HostClock) -> str:
    """The columns of a row."""
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
    found = torch.tensor([*(clock.seconds(call) * 1e6 for call in calls), *errors], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    *times, all_error, own_error = found.tolist()
    shown = " | ".join(f"{microseconds:,.1f} us" for microseconds in times)
    return f"{shown} | {times[0] / times[1]:.2f} | {max(all_error, own_error):.1e}"


def run_rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, f"file://{store}", world_size=arguments.ranks, rank=rank)
    clock = HostClock(arguments.repeats) if device.type == "cpu" else GpuClock(arguments.repeats)
    columns = ("case", "ranks", "one card", "spread", "own heads", "collective and merge", "one / spread", "error")
    if rank == 0:
        print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    for case in CASES:
        if arguments.only in case.name:
            row = measure(case.shrunk() if arguments.small else case, device, clock)
            if rank == 0:
                print(f"| {case.name} | {arguments.ranks} | {row} |", flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="a divisor of the query heads")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.ranks:
        print(f"skipped: --ranks {arguments.ranks} needs as many GPUs, torch finds {torch.cuda.device_count()}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (arguments, f"{folder}/store"), nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
