"""Latent rows on a card: the general kernel where Hopper has its own, lists of tokens that change under a captured run,
and plans from lengths of lists on the card."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from cases import CASES
from cases.case import Case
from graphs import capture
from harness import run_case

import flashpage
from flashpage import flash_mla
from flashpage.kernels import choose

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
LATENT = [case for case in CASES if case.entry == "latent" and case.runs_on(DEVICE)]
GENERAL = [kernel for kernel in choose.ATTENTION if not kernel.name.startswith("latent_")]


@pytest.mark.parametrize("case", LATENT, ids=str)
def test_the_general_kernel(case: Case) -> None:
    """Rows in fp8 and lists of tokens too: it takes every row of the table."""
    with mock.patch.object(choose, "ATTENTION", GENERAL):
        run_case(case, DEVICE)


class Lists:
    """A pool of rows, queries, and lists of tokens."""

    rows, topk, heads, page = 37, 300, 40, 64
    options: dict[str, Any] = {"num_heads": 40, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 64}
    options |= {"sm_scale": 192**-0.5, "q_data_type": torch.bfloat16}

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.cache = torch.randn(30, self.page, 576, device=DEVICE).bfloat16()
        self.query = torch.randn(self.rows, self.heads, 576, device=DEVICE).bfloat16()

    def drawn(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lists and their lengths, on the card."""
        generator = torch.Generator().manual_seed(seed)
        lists = torch.randint(-1, 30 * self.page, (self.rows, self.topk), generator=generator).int()
        lens = torch.randint(0, self.topk + 1, (self.rows,), generator=generator).int()
        return lists.to(DEVICE), lens.to(DEVICE)

    def wrapper(self, **options: Any) -> flashpage.BatchMLASparseAttentionWrapper:
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        return flashpage.BatchMLASparseAttentionWrapper(workspace, **options)

    def eager(self, lists: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        wrapper = self.wrapper()
        wrapper.plan(lists, lens.cpu(), **self.options)
        return wrapper.run(query=self.query, kv_cache=self.cache)


def test_lengths_on_the_card() -> None:
    batch = Lists()
    wrapper = batch.wrapper()
    for seed in range(3):
        lists, lens = batch.drawn(seed)
        wrapper.plan(lists, lens, **batch.options)
        found = wrapper.run(query=batch.query, kv_cache=batch.cache)
        torch.testing.assert_close(found, batch.eager(lists, lens), atol=2e-2, rtol=2e-2)


def test_lists_of_a_captured_run() -> None:
    batch = Lists()
    lists, lens = batch.drawn(0)
    wrapper = batch.wrapper(use_cuda_graph=True, num_rows=batch.rows)
    out = torch.empty(batch.rows, batch.heads, 512, device=DEVICE, dtype=torch.bfloat16)
    wrapper.plan(lists, lens.cpu(), **batch.options)
    replay = capture(lambda: wrapper.run(query=batch.query, kv_cache=batch.cache, out=out))
    for seed in range(3):
        others, lens = batch.drawn(seed)
        wrapper.plan(others, lens.cpu(), **batch.options)  # copied to the lists of the captured run
        replay()
        torch.testing.assert_close(out, batch.eager(others, lens), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("makes_metadata", [False, True], ids=["given", "made"])
def test_reduce_overhead_follows_steps(makes_metadata: bool) -> None:
    """Two layers of FlashMLA's function, whose lengths are written in place where torch counts no writes. Its operators
    stay out of inductor's graphs, also the one that numbers the steps of metadata that compiled code makes."""
    pytest.importorskip("triton")
    torch.manual_seed(5)
    cache = torch.randn(64, 64, 1, 576, device=DEVICE).bfloat16()
    query = torch.randn(4, 1, 16, 576, device=DEVICE).bfloat16()
    tables = torch.randperm(64, device=DEVICE).int().reshape(4, 16)
    lens = torch.zeros(4, dtype=torch.int32, device=DEVICE)

    def step(q: torch.Tensor, given: flash_mla.FlashMLASchedMeta) -> torch.Tensor:
        meta = flash_mla.get_mla_metadata()[0] if makes_metadata else given
        out, _ = flash_mla.flash_mla_with_kvcache(q * 2, cache, tables, lens, 512, meta, softmax_scale=192**-0.5)
        again = torch.cat([out, q[..., 512:]], -1)
        return flash_mla.flash_mla_with_kvcache(again, cache, tables, lens, 512, meta, softmax_scale=192**-0.5)[0] + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, mode="reduce-overhead")
    with torch.inference_mode():
        for most in (1, 1000, 1000, 7, 300, 1024):
            lens.copy_(torch.randint(0, most + 1, (4,)))
            found = compiled(query, flash_mla.get_mla_metadata()[0]).clone()
            expected = step(query, flash_mla.get_mla_metadata()[0])
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
