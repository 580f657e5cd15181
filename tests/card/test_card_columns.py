"""V of e4m3 that is transposed before a prefill, on a card: compared with V that the attention kernel transposes, in
chains of launches and in graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from copied_layers import assert_all_same_bits, check_captured_layers, check_layers_that_follow

import flashpage
from flashpage.plan import value_columns

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
ROWS, KV_LENS = (1300, 1500, 1201), (8000, 7001, 6503)
HEADS, DIM, PAGE = (32, 8), 128, 16
PAGES = [-(-tokens // PAGE) for tokens in KV_LENS]
WITH_ROOM, WITHOUT = 128 << 20, 20 << 20  # bytes of a workspace; the copy takes 21 MiB
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("the kernel is Hopper's")


def indptr(lens: Any) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


class Columns:
    """A batch, the queries and caches of two layers, and a wrapper over a workspace of NaN."""

    def __init__(self, workspace_bytes: int = WITH_ROOM, *, is_ragged: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.is_ragged = is_ragged
        make = lambda *shape: torch.randn(*shape, device=DEVICE).to(E4M3)
        shape = (sum(KV_LENS),) if is_ragged else (2 * sum(PAGES), PAGE)
        self.queries = [make(sum(ROWS), HEADS[0], DIM) for _ in range(2)]
        self.caches = [tuple(make(*shape, HEADS[1], DIM) for _ in "kv") for _ in range(2)]
        order = torch.randperm(2 * sum(PAGES))
        self.indices = order[: sum(PAGES)].int().to(DEVICE)
        if not is_ragged:
            for half in (half for cache in self.caches for half in cache):
                half.view(torch.uint8)[order[sum(PAGES) :].to(DEVICE)] = 255
        self.options = {"causal": True, "q_data_type": E4M3, "kv_data_type": E4M3} | options
        self.workspace = torch.full((workspace_bytes,), 255, dtype=torch.uint8, device=DEVICE)
        kind = "Ragged" if is_ragged else "Paged"
        self.wrapper: Any = getattr(flashpage, f"BatchPrefillWith{kind}KVCacheWrapper")(self.workspace)
        self.plan()

    def plan(self) -> None:
        last = torch.tensor([(tokens - 1) % PAGE + 1 for tokens in KV_LENS], dtype=torch.int32)
        pages = (indptr(KV_LENS),) if self.is_ragged else (indptr(PAGES), self.indices, last)
        sizes = (*HEADS, DIM) if self.is_ragged else (*HEADS, DIM, PAGE)
        self.wrapper.plan(indptr(ROWS), *pages, *sizes, **self.options)

    @property
    def has_copy(self) -> bool:
        return value_columns.NOTE in self.wrapper.last_plan.notes

    def run(self, layer: int = 0, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, cache = self.queries[layer], self.caches[layer]
        out = torch.full(q.shape, math.nan, device=DEVICE, dtype=torch.bfloat16)
        lse = torch.full(q.shape[:2], math.nan, device=DEVICE)
        kv = cache if self.is_ragged else (cache,)
        self.wrapper.run(q, *kv, out=out, lse=lse, return_lse=True, **options)
        return out, lse


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("how", [{}, {"causal": False}, {"window_left": 6300}, {"logits_soft_cap": 20.0}], ids=str)
def test_both_ways_give_the_same(how: dict[str, Any], is_ragged: bool) -> None:
    """The float workspace has room for the copy, or it does not. Tiles of a ragged request may begin elsewhere, so
    that maxima and sums are of other tokens."""
    batch, in_kernel = Columns(is_ragged=is_ragged, **how), Columns(WITHOUT, is_ragged=is_ragged, **how)
    assert batch.has_copy and not in_kernel.has_copy
    for options in ({}, {"enable_pdl": False}):
        (out, lse), (expected, expected_lse) = batch.run(**options), in_kernel.run(**options)
        assert_all_same_bits((out, lse), batch.run(**options))
        assert (out - expected).float().norm() <= 0.03 * expected.float().norm()
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("enable_pdl", [None, False])
def test_layers_that_follow_at_once_use_the_same_memory(enable_pdl: bool | None, is_ragged: bool) -> None:
    """A launch that starts too early overwrites columns that the last layer still reads."""
    batch = Columns(is_ragged=is_ragged)
    check_layers_that_follow(batch, enable_pdl=enable_pdl)


def test_tensors_that_were_just_written_are_read() -> None:
    """The plan is new too, in a workspace that others have used since."""
    batch = Columns()
    expected, tensors = batch.run(), [t.view(torch.uint8) for t in (batch.queries[0], *batch.caches[0])]
    kept = [tensor.clone() for tensor in tensors]
    for _ in range(10):
        batch.workspace.fill_(255)
        for tensor, values in zip(tensors, kept, strict=True):
            tensor.fill_(255)
            tensor.copy_(values)
        batch.plan()
        found = batch.run()
        for tensor in tensors:
            tensor.fill_(255)
        assert_all_same_bits(found, expected)
        for tensor, values in zip(tensors, kept, strict=True):
            tensor.copy_(values)


def test_captured_layers() -> None:
    """A graph of the caller's may have such runs; wrappers for graphs plan none."""
    check_captured_layers(Columns())
