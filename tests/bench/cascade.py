"""Cascade attention for requests that share their first tokens, level by level, compared with flat decode.

Flat decode runs twice: over shared pages, with which each request's list begins (repeated reads may hit the L2), and
over copies, where nothing is shared. One run times everything on the same numbers, as CUDA graph replays after a flush
of the L2. `--small --device cpu` runs tiny shapes with the host's clock: it only shows that the program works.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from command_line import Parser
from gpu import GpuClock, HostClock
from workloads import Paged, indptr

LIBRARIES = ("flashpage", "flashinfer")
WORKSPACE_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests with one row each."""

    name: str
    batch: int
    shared: int  # tokens that all requests share
    own: int  # tokens of each request
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    def shrunk(self) -> Case:
        return dataclasses.replace(self, batch=min(self.batch, 4), shared=64, own=min(self.own, 40))


CASES = [
    Case("64 requests, 32k shared, 1k own", 64, 32768, 1024),
    Case("64 requests, 8k shared, 1k own", 64, 8192, 1024),
    Case("16 requests, 32k shared, 1k own", 16, 32768, 1024),
    Case("256 requests, 4k shared, 256 own", 256, 4096, 256),
    Case("8/1 heads, 64 requests, 32k shared, 1k own", 64, 32768, 1024, num_q_heads=8, num_kv_heads=1),
]


class Batch:
    """Tensors of a case (the shared pages once, then each request's own), and the plans of both ways."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.pages = Paged([case.shared] + [case.own] * case.batch, case.page_size, device)
        self.cache = self.pages.cache(case.num_kv_heads, case.head_dim, torch.bfloat16)
        self.q = torch.randn(case.batch, case.num_q_heads, case.head_dim, device=device).to(torch.bfloat16)
        self.sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        self.shared_pages = self.pages.indices[: case.shared // case.page_size]
        self.own_pages = self.pages.indices[len(self.shared_pages) :]
        self.own_counts = self.pages.indptr[1:].diff()

    def workspace(self) -> torch.Tensor:
        return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)

    def cascade(self, library: Any) -> Callable[[], torch.Tensor]:
        batch, last = self.case.batch, self.pages.last_page_len
        wrapper = library.MultiLevelCascadeAttentionWrapper(2, self.workspace(), "NHD")
        wrapper.plan(
            [indptr([batch]), indptr([1] * batch)],
            [self.pages.indptr[:2], self.pages.indptr[1:] - self.pages.indptr[1]],
            [self.shared_pages, self.own_pages],
            [last[:1], last[1:]],
            *self.sizes,
            q_data_type=torch.bfloat16,
        )
        return lambda: wrapper.run(self.q, self.cache)

    def flat(self, library: Any, is_shared: bool) -> Callable[[], torch.Tensor]:
        """Flat decode; each request's list begins with the shared pages or with its own copies."""
        own = self.own_pages.split(self.own_counts.tolist())
        indices, cache = torch.cat([torch.cat([self.shared_pages, pages]) for pages in own]), self.cache
        if not is_shared:
            indices, cache = torch.arange(len(indices), dtype=torch.int32, device=self.device), cache[indices.long()]
        counts = (self.own_counts + len(self.shared_pages)).tolist()
        options = {} if library.__name__ == "flashpage" else {"use_tensor_cores": True}
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(self.workspace(), "NHD", **options)
        last = self.pages.last_page_len[1:]
        wrapper.plan(indptr(counts), indices, last, *self.sizes, q_data_type=torch.bfloat16)
        return lambda: wrapper.run(self.q, cache)

    def error(self, out: torch.Tensor) -> float:
        """Relative norm of the difference from fp32 attention, for a few requests."""
        case, errors = self.case, []
        shared = self.pages.request(self.cache, 0)
        for i in range(0, case.batch, max(1, case.batch // 4)):
            own = self.pages.request(self.cache, 1 + i)
            k, v = (torch.cat(parts).float() for parts in zip(shared, own, strict=True))
            group = case.num_q_heads // case.num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("hd,khd->hk", self.q[i].float(), k) * case.head_dim**-0.5
            exact = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
            errors.append(float((out[i].float() - exact).norm() / exact.norm()))
        return max(errors)


def measure(batch: Batch, library: Any, clock: GpuClock | HostClock) -> str:
    """The columns of a row. The way that needs copies makes and frees them."""
    seconds, errors = [], []
    for way in (lambda: batch.cascade(library), lambda: batch.flat(library, True), lambda: batch.flat(library, False)):
        call = way()
        errors.append(batch.error(call()))
        seconds.append(clock.seconds(clock.capture(call)))
        del call
    cascade, shared, copied = (value * 1e6 for value in seconds)
    ratios = f"{shared / cascade:.1f} | {copied / cascade:.1f}"
    return f"{cascade:,.1f} us | {shared:,.1f} us | {copied:,.1f} us | {ratios} | {max(errors):.1e}"


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help="libraries that are not installed are skipped")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    names = [name for name in arguments.libraries.split(",") if importlib.util.find_spec(name)]
    columns = ("case", "library", "cascade", "flat", "flat, copies", "flat / cascade", "copies / cascade", "error")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    failed = False
    for case in CASES:
        if arguments.only not in case.name:
            continue
        torch.manual_seed(0)
        batch = Batch(case.shrunk() if arguments.small else case, device)
        for name in names:
            try:
                row = measure(batch, importlib.import_module(name), clock)
            except Exception as failure:  # a peer's refusal is a result too
                failed |= name == "flashpage"
                row = f"{type(failure).__name__}: {failure}".splitlines()[0][:200] + " |" * 5
            print(f"| {case.name} | {name} | {row} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
