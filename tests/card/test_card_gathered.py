"""Gathered rows before a prefill, on a card: compared with row-by-row loads of the same batch, in chains of launches
and in graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from copied_layers import assert_all_same_bits, check_captured_layers, check_layers_that_follow

import flashpage
from flashpage.plan import gather_rows, widened_pages

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
ROWS, KV_LENS = (1100, 700, 1301), (9000, 7000, 6003)
TOKENS = sum(KV_LENS)
FIRST = 3  # page numbers before the batch's, which no request has
HEADS, DIM = (32, 2), 128
WITH_ROOM, WITHOUT = 64 << 20, 20 << 20  # bytes of a workspace; K and V take 21.5 MiB


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("the kernel is Hopper's")


def indptr(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


class Gathered:
    """A batch, the caches of some layers, and a wrapper over a workspace of NaN."""

    def __init__(
        self, workspace_bytes: int = WITH_ROOM, *, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.q = torch.randn(sum(ROWS), HEADS[0], DIM, device=DEVICE, dtype=dtype)
        self.caches = [torch.randn(2 * TOKENS, 2, 1, HEADS[1], DIM, device=DEVICE, dtype=dtype) for _ in range(2)]
        order = torch.randperm(2 * TOKENS)
        self.indices = torch.cat([torch.full((FIRST,), 2**30), order[:TOKENS], torch.full((9,), 2**30)])
        self.indices = self.indices.int().to(DEVICE)
        for cache in self.caches:
            cache[order[TOKENS:].to(DEVICE)] = math.nan
        self.options = {"causal": True, "q_data_type": dtype} | options
        self.workspace = torch.full((workspace_bytes,), 255, dtype=torch.uint8, device=DEVICE)
        self.wrapper: Any = flashpage.BatchPrefillWithPagedKVCacheWrapper(self.workspace)
        self.plan()

    def plan(self, rows: tuple[int, ...] = ROWS, kv_lens: tuple[int, ...] = KV_LENS) -> None:
        last = torch.ones(len(rows), dtype=torch.int32)
        pages = (indptr(kv_lens) + FIRST, self.indices, last)
        self.wrapper.plan(indptr(rows), *pages, *HEADS, DIM, 1, **self.options)

    @property
    def gathers(self) -> bool:
        return gather_rows.NOTE in self.wrapper.last_plan.notes

    def run(self, layer: int = 0, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.full_like(self.q, math.nan), torch.full(self.q.shape[:2], math.nan, device=DEVICE)
        self.wrapper.run(self.q, self.caches[layer], out=out, lse=lse, return_lse=True, **options)
        return out, lse


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"causal": False},
        {"window_left": 3000},
        {"logits_soft_cap": 20.0},
        {"pos_encoding_mode": "ALIBI"},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_both_ways_give_the_same(how: dict[str, Any]) -> None:
    """The float workspace has room for the rows, or it does not."""
    batch, by_rows = Gathered(**how), Gathered(WITHOUT, **how)
    assert batch.gathers and not by_rows.gathers
    assert by_rows.wrapper._planner.active[0].prepared.choice.spec.loader == "rows"
    sinks = torch.linspace(-1.0, 1.0, HEADS[0], device=DEVICE)
    for options in ({}, {"sinks": sinks}, {"enable_pdl": False}):
        (out, lse), (expected, expected_lse) = batch.run(**options), by_rows.run(**options)
        assert_all_same_bits((out, lse), batch.run(**options))
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("enable_pdl", [None, False])
def test_layers_that_follow_at_once_gather_into_the_same_memory(enable_pdl: bool | None) -> None:
    """A gather that starts too early overwrites rows that the last layer still reads, or reads keys too early."""
    batch = Gathered()
    check_layers_that_follow(batch, enable_pdl=enable_pdl)


def test_keys_that_were_just_written_are_gathered() -> None:
    """Page numbers and the plan are new too, in a workspace that others have used since."""
    batch = Gathered()
    expected, cache = batch.run(), batch.caches[0]
    kept = cache.clone()
    for _ in range(10):
        batch.workspace.fill_(255)
        cache.fill_(math.nan)
        cache.copy_(kept)
        batch.plan()
        found = batch.run()
        cache.fill_(math.nan)
        batch.plan((sum(ROWS) - 5, 5), (TOKENS - 20, 20))
        assert_all_same_bits(found, expected)


def test_a_batch_of_one_token_leaves_no_stride_behind() -> None:
    """A dimension of one entry has no stride of its own in a tensor map; the plan after it has other rows."""
    heads, dim, rows = (8, 8), 64, 8192
    torch.manual_seed(0)
    cache = torch.randn(4096, 2, 1, heads[1], dim, device=DEVICE, dtype=torch.float16)
    q, indices = (
        torch.randn(rows, heads[0], dim, device=DEVICE, dtype=torch.float16),
        torch.randperm(4096).int().to(DEVICE),
    )
    both = [
        flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        for size in (WITH_ROOM, 1 << 20)
    ]
    for tokens in (1, 2000, 1, 2000):
        found = []
        for wrapper in both:
            lengths = (indptr((rows,)), indptr((tokens,)), indices, torch.ones(1, dtype=torch.int32))
            wrapper.plan(*lengths, *heads, dim, 1, causal=False, disable_split_kv=True, q_data_type=torch.float16)
            found.append(wrapper.run(q, cache))
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page", [16, 64])
def test_widened_pages_of_growing_plans(page: int) -> None:
    """Fewer pages than tokens of a page, and a later plan with more pages."""
    heads, dim, rows, most = (32, 8), 128, 1024, 8192
    torch.manual_seed(0)
    shape = (most // page, page, heads[1])
    cache = tuple(torch.randint(0, 256, (*shape, dim // 2), device=DEVICE, dtype=torch.uint8) for _ in "kv")
    scales = tuple(torch.rand(*shape, dim // 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv")
    q, indices = torch.randn(rows, heads[0], dim, device=DEVICE).bfloat16(), torch.randperm(most // page).int()
    both = [
        flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        for size in (WITH_ROOM, 1 << 20)
    ]
    for tokens in (rows, most, 2 * rows):
        found = []
        for wrapper in both:
            count = tokens // page
            lengths = (indptr((rows,)), indptr((count,)), indices[:count].to(DEVICE), torch.tensor([page]).int())
            wrapper.plan(*lengths, *heads, dim, page, causal=True, q_data_type=q.dtype, kv_data_type=torch.uint8)
            found.append(wrapper.run(q, cache, kv_cache_sf=scales))
        assert widened_pages.NOTE in both[0].last_plan.notes and widened_pages.NOTE not in both[1].last_plan.notes
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_captured_layers() -> None:
    check_captured_layers(Gathered())
