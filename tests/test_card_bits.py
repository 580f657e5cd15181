"""At serving sizes on a card: the same bits again, and in any batch where the plan says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import Outputs
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


class Serving:
    """A batch of the sizes that a server has; no reference, bits are compared with bits."""

    def __init__(self, rows_each: int) -> None:
        self.rows_each, self.page = rows_each, 16
        torch.manual_seed(3)
        self.counts = [-(-n // self.page) for n in SERVING_LENS]
        self.table = torch.randperm(sum(self.counts)).to(torch.int32).split(self.counts)
        shape = (sum(self.counts), 2, self.page, SERVING["num_kv_heads"], SERVING["head_dim"])
        self.cache = torch.randn(shape, device=DEVICE).to(torch.bfloat16)
        rows = (len(SERVING_LENS), rows_each, SERVING["num_q_heads"], SERVING["head_dim"])
        self.q = torch.randn(rows, device=DEVICE).to(torch.bfloat16)

    def planned(self, requests: list[int], **mode: Any) -> Callable[[], Outputs]:
        """A run of these requests alone."""
        indptr = torch.tensor([0, *(self.counts[i] for i in requests)]).cumsum(0).to(torch.int32)
        last = torch.tensor([(SERVING_LENS[i] - 1) % self.page + 1 for i in requests], dtype=torch.int32)
        pages = torch.cat([self.table[i] for i in requests]).to(DEVICE)
        values = {"q_data_type": torch.bfloat16, **mode}
        q = self.q[requests].flatten(0, 1)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        if self.rows_each == 1:
            wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace)
            wrapper.plan(indptr, pages, last, *SERVING.values(), self.page, **values)
        else:
            wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace)
            q_indptr = torch.arange(len(requests) + 1, dtype=torch.int32) * self.rows_each
            wrapper.plan(q_indptr, indptr, pages, last, *SERVING.values(), self.page, causal=True, **values)
        return lambda: Outputs(*wrapper.run(q, self.cache, return_lse=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows_each", [1, 17], ids=["decode", "prefill"])
def test_the_same_bits_fifty_times(rows_each: int, mode: str) -> None:
    """While another stream takes SMs away at random."""
    run = Serving(rows_each).planned(list(range(len(SERVING_LENS))), **MODES[mode])
    first = run()
    busy = torch.randn(2048, 2048, device=DEVICE)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(side):
            torch.mm(busy, busy)
        assert_same_bits(first, run())


@pytest.mark.parametrize("mode", ["fixed split", "never split"])
@pytest.mark.parametrize("rows_each", [1, 17], ids=["decode", "prefill"])
def test_the_same_bits_in_any_batch(rows_each: int, mode: str) -> None:
    serving, everyone = Serving(rows_each), list(range(len(SERVING_LENS)))
    together = serving.planned(everyone, **MODES[mode])()
    for requests in ([0], [7], [39], [12, 3, 30], everyone[::-1]):
        found = serving.planned(requests, **MODES[mode])()
        for place, request in enumerate(requests):
            here, there = (slice(i * rows_each, (i + 1) * rows_each) for i in (place, request))
            assert_same_bits(
                Outputs(found.out[here], found.lse[here]), Outputs(together.out[there], together.lse[there])
            )
