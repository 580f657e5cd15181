"""Serving sizes on a card: runs are bitwise repeatable, in any batch and any captured graph if the plan says so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import Outputs
from graphs import capture
from steps import assert_same_bits

import flashpage

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
SERVING = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SERVING_LENS = [17 + 151 * i % 4093 for i in range(40)]
MODES: dict[str, dict[str, Any]] = {
    "balanced": {},
    "fixed split": {"fixed_split_size": 16},
    "never split": {"disable_split_kv": True},
}
EVERYONE = list(range(len(SERVING_LENS)))
SOME = ([0], [7], [39], [12, 3, 30], EVERYONE[::-1])  # requests of a batch


@dataclasses.dataclass(frozen=True)
class Kind:
    """Rows of a request and their entry point: 16, 32 and 64 packed rows of decode, and prefill rows."""

    entry: str  # decode | prefill
    rows: int
    page_size: int = 16
    kv_dtype: torch.dtype = torch.bfloat16
    is_few: bool = True  # Hopper's decode kernel takes them

    def __str__(self) -> str:
        pages = "" if self.page_size == 16 else f", pages of {self.page_size}"
        return f"{self.entry} {self.rows}{pages}{', e4m3' if self.kv_dtype != torch.bfloat16 else ''}"


DECODE = (
    Kind("decode", 1),
    Kind("decode", 1, page_size=1),
    Kind("decode", 1, kv_dtype=torch.float8_e4m3fn),
    Kind("decode", 5),
    Kind("decode", 16),
)
KINDS = (*DECODE, Kind("prefill", 17, is_few=False))


class Serving:
    """A batch of serving size. There is no reference; bits are compared with bits."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.page = kind, kind.page_size
        torch.manual_seed(3)
        self.counts = [-(-n // self.page) for n in SERVING_LENS]
        self.table = torch.randperm(sum(self.counts)).to(torch.int32).split(self.counts)
        shape = (sum(self.counts), 2, self.page, SERVING["num_kv_heads"], SERVING["head_dim"])
        self.cache = torch.randn(shape, device=DEVICE).to(torch.bfloat16).to(kind.kv_dtype)
        rows = (len(SERVING_LENS), kind.rows, SERVING["num_q_heads"], SERVING["head_dim"])
        self.q = torch.randn(rows, device=DEVICE).to(torch.bfloat16)

    def pages(self, requests: list[int], batch: int) -> tuple[torch.Tensor, ...]:
        """indptr, pages and last_page_len of these requests, and of empty ones up to `batch`."""
        counts = [self.counts[i] for i in requests] + [0] * (batch - len(requests))
        last = [(SERVING_LENS[i] - 1) % self.page + 1 for i in requests] + [0] * (batch - len(requests))
        indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return indptr, torch.cat([self.table[i] for i in requests]).to(DEVICE), torch.tensor(last, dtype=torch.int32)

    def plan(self, wrapper: Any, requests: list[int], batch: int = 0, **mode: Any) -> None:
        batch = batch or len(requests)
        indptr, pages, last = self.pages(requests, batch)
        values = {"q_data_type": torch.bfloat16, "kv_data_type": self.kind.kv_dtype, **mode}
        sizes = (*SERVING.values(), self.page)
        if self.kind.entry == "decode":
            wrapper.plan(indptr, pages, last, *sizes, q_len_per_req=self.kind.rows, **values)
        else:
            q_indptr = torch.arange(batch + 1, dtype=torch.int32) * self.kind.rows
            wrapper.plan(q_indptr, indptr, pages, last, *sizes, causal=True, **values)
        if torch.cuda.get_device_capability() == (9, 0):
            assert (wrapper.last_plan.spec.kernel == "decode_sm90") == self.kind.is_few

    def planned(self, requests: list[int], **mode: Any) -> Callable[[], Outputs]:
        """Runs only these requests."""
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        name = {"decode": "BatchDecodeWithPagedKVCacheWrapper", "prefill": "BatchPrefillWithPagedKVCacheWrapper"}
        wrapper = getattr(flashpage, name[self.kind.entry])(workspace)
        self.plan(wrapper, requests, **mode)
        q = self.q[requests].flatten(0, 1)
        return lambda: Outputs(*wrapper.run(q, self.cache, return_lse=True))

    def captured(self, **mode: Any) -> Callable[[list[int]], Outputs]:
        """Captures a graph for a full batch while one request is in it; returns a replay for others."""
        batch = len(SERVING_LENS)
        sizes = {"paged_kv_indptr": batch + 1, "paged_kv_last_page_len": batch, "paged_kv_indices": sum(self.counts)}
        buffers = {f"{name}_buffer": torch.zeros(n, dtype=torch.int32, device=DEVICE) for name, n in sizes.items()}
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace, use_cuda_graph=True, **buffers)
        q = torch.zeros_like(self.q).flatten(0, 1)
        found = Outputs(torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE))
        self.plan(wrapper, [5], batch, **mode)
        replay = capture(lambda: wrapper.run(q, self.cache, out=found.out, lse=found.lse))

        def run(requests: list[int]) -> Outputs:
            q[: len(requests) * self.kind.rows] = self.q[requests].flatten(0, 1)
            found.out.fill_(math.nan)
            self.plan(wrapper, requests, batch, **mode)
            replay()
            return found

        return run

    def check(self, together: Outputs, requests: list[int], found: Outputs) -> None:
        """Checks that these requests' rows have the same bits as in the batch of all requests."""
        rows = self.kind.rows
        for place, request in enumerate(requests):
            here, there = (slice(i * rows, (i + 1) * rows) for i in (place, request))
            assert_same_bits(
                Outputs(found.out[here], found.lse[here]), Outputs(together.out[there], together.lse[there])
            )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_bits_fifty_times(kind: Kind, mode: str) -> None:
    """Another stream takes SMs at random while the runs repeat."""
    run = Serving(kind).planned(EVERYONE, **MODES[mode])
    first = run()
    busy = torch.randn(2048, 2048, device=DEVICE)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(side):
            torch.mm(busy, busy)
        assert_same_bits(first, run())


@pytest.mark.parametrize("mode", ["fixed split", "never split"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_bits_in_any_batch(kind: Kind, mode: str) -> None:
    serving = Serving(kind)
    together = serving.planned(EVERYONE, **MODES[mode])()
    for requests in SOME:
        serving.check(together, requests, serving.planned(requests, **MODES[mode])())


@pytest.mark.parametrize("mode", ["fixed split", "never split"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_bits_next_to_large_queries(kind: Kind, mode: str) -> None:
    """Maxima of the other requests move often, and a tile of queries may hold rows of two requests."""
    serving = Serving(kind)
    together = serving.planned(EVERYONE, **MODES[mode])()
    own = serving.q[[7, 39]]
    serving.q *= 40
    serving.q[[7, 39]] = own
    found = serving.planned(EVERYONE, **MODES[mode])()
    for request in (7, 39):
        rows = slice(request * kind.rows, (request + 1) * kind.rows)
        serving.check(together, [request], Outputs(found.out[rows], found.lse[rows]))


@pytest.mark.parametrize("mode", ["fixed split", "never split"])
@pytest.mark.parametrize("kind", DECODE, ids=str)
def test_the_same_bits_in_a_captured_graph(kind: Kind, mode: str) -> None:
    """One capture serves every batch, with the bits of an eager run."""
    serving = Serving(kind)
    together = serving.planned(EVERYONE, **MODES[mode])()
    run = serving.captured(**MODES[mode])
    for requests in (*SOME, EVERYONE):
        serving.check(together, requests, run(requests))
