"""Decode and prefill over caches of 4 and 8 bits, next to bf16 and e4m3, and the appends that fill them, in turns; if
FlashInfer is installed, also its time over the same nvfp4 cache.

`--json` appends each case as a line of data: microseconds by format, and how far its output is from bf16's.

    python tests/bench/formats.py --json formats.jsonl
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command_line import Parser

sys.path.append(str(Path(__file__).parents[1] / "support"))
from format_names import EACH, kv_types
from gpu import GpuClock, HostClock, rounds_of
from record import Recorder
from workloads import Case, Paged

import flashpage
from flashpage.kernels.kv_formats import FORMATS

ELEMENTS = ("bfloat16", "float8_e4m3fn")
CASES = (
    Case("decode, 64 x 4k", 64, 1, 4096),
    Case("decode, 64 x 4k, page 1", 64, 1, 4096, page_size=1),
    Case("decode, 64 lognormal, mean 4k", 64, 1, 4096, kind="lognormal"),
    Case("decode, 1 x 32k", 1, 1, 32768),
    Case("decode, 64 x 4k, 64/8 heads of 64", 64, 1, 4096, num_q_heads=64, head_dim=64),
    Case("append 512 rows on 16k, 4 requests", 4, 512, 16384),
    Case("append 128 rows on 16k, 4 requests", 4, 128, 16384),
    Case("append 32 rows on 8k, 16 requests", 16, 32, 8192),
    Case("prefill, 8 x 1k", 8, 1024, 1024),
    Case("fill, 8k tokens", 1, 8192, 8192),
)
Run = Callable[[], Any]


class Cache:
    """Pages of a format that hold given rows, with their scales, and how they are written."""

    def __init__(self, name: str, case: Case, table: Paged, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.name, self.rows, self.table = name, rows, table
        shape = (table.num_pages, case.page_size, case.num_kv_heads)
        self.scales: tuple[torch.Tensor, ...] | None = None
        kinds: dict[str, Any] = {"device": rows[0].device}
        if name in ELEMENTS:
            self.parts = tuple(torch.zeros(*shape, case.head_dim, dtype=torch.bfloat16, **kinds) for _ in "kv")
        else:
            row = FORMATS[name]
            columns, last = row.stored_columns(case.head_dim), row.row_scales(case.head_dim)
            stored, kind = getattr(torch, row.stored[0]), getattr(torch, row.scales[0])
            self.parts = tuple(torch.zeros(*shape, columns, dtype=stored, **kinds) for _ in "kv")
            last_dims = (last,) if last > 1 else ()
            self.scales = tuple(torch.zeros(*shape, *last_dims, dtype=kind, **kinds) for _ in "kv")
        counts = torch.tensor(table.kv_lens)
        request = torch.repeat_interleave(torch.arange(table.batch), counts)
        position = torch.cat([torch.arange(n) for n in table.kv_lens])
        places = (part.to(torch.int32).to(rows[0].device) for part in (request, position))
        lists = (table.indices, *(part.to(rows[0].device) for part in (table.indptr, table.last_page_len)))
        options: dict[str, Any] = {"kv_format": name, "kv_cache_sf": self.scales} if self.scales else {}
        given = tuple(places)
        self.write: Run = lambda: flashpage.append_paged_kv_cache(*rows, *given, self.parts, *lists, **options)
        self.write()
        if name == "float8_e4m3fn":
            self.parts = tuple(part.to(torch.float8_e4m3fn) for part in self.parts)

    @property
    def run_arguments(self) -> dict[str, Any]:
        return {"kv_cache_sf": self.scales} if self.scales else {}

    @property
    def plan_arguments(self) -> dict[str, Any]:
        return kv_types(self.name) if self.scales else {"kv_data_type": getattr(torch, self.name)}


def attention(case: Case, cache: Cache, q: torch.Tensor, q_indptr: torch.Tensor, library: str = "flashpage") -> Run:
    device, table, module = q.device, cache.table, importlib.import_module(library)
    workspace = torch.empty(1 << 30 if device.type == "cuda" else 16 << 20, dtype=torch.uint8, device=device)
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    pages = (table.indptr, table.indices, table.last_page_len)
    out = torch.empty_like(q)
    if case.q_len == 1:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)  # FlashInfer's for nvfp4
        wrapper.plan(*pages, *heads, q_data_type=q.dtype, **cache.plan_arguments)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace)
        wrapper.plan(q_indptr, *pages, *heads, causal=True, q_data_type=q.dtype, **cache.plan_arguments)
    return lambda: wrapper.run(q, cache.parts, out=out, **cache.run_arguments)


def measure(case: Case, rounds: int, clock: GpuClock | HostClock, device: torch.device, recorder: Recorder) -> None:
    torch.manual_seed(0)
    table = Paged(list(case.kv_lens), case.page_size, device)
    rows = tuple(
        torch.randn(sum(table.kv_lens), case.num_kv_heads, case.head_dim, device=device).bfloat16() for _ in "kv"
    )
    q = torch.randn(sum(case.q_lens), case.num_q_heads, case.head_dim, device=device).bfloat16()
    q_indptr = torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32)
    caches = {name: Cache(name, case, table, (rows[0], rows[1])) for name in (*ELEMENTS, *EACH)}
    if case.name.startswith("fill"):
        copy = torch.empty(2, *rows[0].shape, device=device, dtype=torch.bfloat16)
        both = torch.stack(rows)
        runs: dict[str, Run] = {"copy": lambda: copy.copy_(both)}
        runs |= {name: cache.write for name, cache in caches.items() if name != "float8_e4m3fn"}
        errors: dict[str, float] = {}
    else:
        runs = {name: attention(case, cache, q, q_indptr) for name, cache in caches.items()}
        if device.type == "cuda" and importlib.util.find_spec("flashinfer"):
            try:
                peer = attention(case, caches["nvfp4"], q, q_indptr, "flashinfer")
                peer()  # compiles its kernel
                runs["nvfp4 by FlashInfer"] = peer
            except Exception as failure:
                print(f"{case.name}: FlashInfer refused: {failure}".splitlines()[0])
        exact = runs["bfloat16"]().float()
        errors = {name: float((run().float() - exact).norm() / exact.norm()) for name, run in runs.items()}
        if not max(errors.values()) < 0.5:
            raise SystemExit(f"{case.name}: relative errors of {errors}")
    spent = rounds_of({name: clock.capture(run) for name, run in runs.items()}, rounds, clock)
    us = {name: statistics.median(times) for name, times in spent.items()}
    print(f"| {case.name} | " + " | ".join(f"{name} {time:.1f}" for name, time in us.items()) + " |", flush=True)
    recorder.add("formats", case.name, us=us, errors=errors)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=15, help="replays in each round, of which the median counts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", help="file to which each case is appended")
    arguments = parser.parse_args()
    device, recorder = torch.device(arguments.device), Recorder(arguments.json)
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    for case in CASES:
        if arguments.only in case.name:
            shape = dataclasses.replace(case.shrunk(), name=case.name) if arguments.small else case
            measure(shape, arguments.rounds, clock, device, recorder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
