"""BatchMLASparseAttentionWrapper over two caches: lengths of the first lists, captured runs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashpage
from flashpage import PlanError, RunError
from flashpage.base.errors import FlashpageError
from flashpage.flash_mla import flash_mla_with_kvcache, get_mla_metadata

pytestmark = pytest.mark.usefixtures("quick_kernels")

ROWS, HEADS, ROW_BYTES, FIRST, SECOND = 3, 4, 584, 10, 7
OPTIONS: dict[str, Any] = {"num_heads": HEADS, "head_dim_ckv": 512, "head_dim_kpe": 0, "page_size": 16}
OPTIONS |= {"sm_scale": 0.05, "q_data_type": torch.bfloat16, "kv_row_format": "deepseek_v4"}


def cache_of(pages: int, page_size: int) -> torch.Tensor:
    """Small numbers in e4m3 and bf16, and scales of 1."""
    found = torch.randint(0x20, 0x40, (pages, page_size * ROW_BYTES), dtype=torch.uint8)
    found[:, page_size * (ROW_BYTES - 8) :] = 127
    return found.view(pages, page_size, ROW_BYTES)


@pytest.fixture
def given() -> dict[str, Any]:
    """The queries and both caches, as arguments of a run."""
    torch.manual_seed(5)
    caches = {"kv_cache": cache_of(6, 16), "extra_kv_cache": cache_of(20, 4)}
    return {"query": torch.randn(ROWS, HEADS, 512).bfloat16(), **caches}


@pytest.fixture
def lists() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    first, second = ((96, FIRST), (80, SECOND))
    return tuple(torch.randint(0, most, (ROWS, topk), generator=generator).int() for most, topk in (first, second))


def made(**options: Any) -> flashpage.BatchMLASparseAttentionWrapper:
    return flashpage.BatchMLASparseAttentionWrapper(torch.empty(4 << 20, dtype=torch.uint8), **options)


def planned(lists: Any, lengths: Any = None, wrapper: Any = None) -> flashpage.BatchMLASparseAttentionWrapper:
    wrapper = wrapper or made()
    wrapper.plan(lists[0], lengths, extra_indices=lists[1], **OPTIONS)
    return wrapper


def test_lengths_need_not_be_contiguous(given: Any, lists: Any) -> None:
    """Kernels read the lengths of first lists, and not only the plan does."""
    lengths = torch.tensor([3, 0, 10], dtype=torch.int32)
    strided = torch.stack([lengths, torch.full_like(lengths, 9)], 1)[:, 0]
    assert planned(lists, strided).run(**given).equal(planned(lists, lengths).run(**given))
    one = torch.tensor([3], dtype=torch.int32)
    assert planned(lists, one.expand(ROWS)).run(**given).equal(planned(lists, one.repeat(ROWS)).run(**given))


def test_lengths_may_change_after_the_plan(given: Any, lists: Any) -> None:
    """Else runs would read entries that were never checked."""
    lengths = torch.tensor([3, 0, 10], dtype=torch.int32)
    expected, wrapper = planned(lists, lengths).run(**given), planned(lists, lengths)
    lengths.fill_(FIRST)
    assert wrapper.run(**given).equal(expected)


@pytest.mark.parametrize("begins_with_lengths", [False, True])
def test_captured_runs_read_the_lengths_of_later_plans(given: Any, lists: Any, begins_with_lengths: bool) -> None:
    """Their launches hold an address, or none, for ever."""
    wrapper, plans = made(use_cuda_graph=True, num_rows=ROWS), [None, torch.tensor([3, 0, 10])]
    captured = None
    for lengths in reversed(plans) if begins_with_lengths else plans:
        planned(lists, lengths, wrapper)
        assert wrapper.run(**given).equal(planned(lists, lengths).run(**given))
        address = wrapper._attention._local.bound.params.second.first_lengths
        assert address is not None and captured in (None, address)
        captured = address


def test_a_graph_may_be_planned_in_and_outside_of_inference_mode(given: Any, lists: Any) -> None:
    with torch.inference_mode():
        wrapper = planned(lists, None, made(use_cuda_graph=True, num_rows=ROWS))
    planned((lists[0].flip(0).contiguous(), lists[1]), None, wrapper)
    assert wrapper.run(**given).shape == (ROWS, HEADS, 512)


def test_refused_lengths(lists: Any) -> None:
    for lengths, says in (([1, 2], "one entry a row"), ([1, 2, 11], r"topk_length\[2\]=11"), ([0.5] * 3, "dtype")):
        with pytest.raises(PlanError, match=says):
            planned(lists, torch.tensor(lengths))


def test_refused_caches(given: Any, lists: Any) -> None:
    wrapper, cache = planned(lists), given["extra_kv_cache"]
    for wrong, says in (
        (cache.unsqueeze(2), r"^extra_kv_cache has shape \(20, 4, 1, 584\): pass \[pages, page_size, bytes\]"),
        (cache_of(30, 3), "^extra_kv_cache starts at .* on 16 bytes"),
        (cache.view(torch.float8_e5m2), "^extra_kv_cache has dtype torch.float8_e5m2"),
    ):
        with pytest.raises(RunError, match=says):
            wrapper.run(**given | {"extra_kv_cache": wrong})
    call = {"q": given["query"].unsqueeze(1), "k_cache": given["kv_cache"].unsqueeze(2), "head_dim_v": 512}
    call |= {"block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": get_mla_metadata()[0]}
    call |= {"indices": lists[0].unsqueeze(1), "extra_indices_in_kvcache": lists[1].unsqueeze(1)}
    of_halves = torch.zeros(20, 4, 1, 512, dtype=torch.float16)
    for wrong, says in (
        (cache.view(torch.float8_e5m2).unsqueeze(2), "^extra_k_cache has dtype torch.float8_e5m2"),
        (cache_of(30, 3).unsqueeze(2), "^extra_k_cache starts at .* on 16 bytes"),
        (of_halves[:0].bfloat16(), "^extra_indices_in_kvcache has .* but the cache has 0 tokens"),
        (of_halves, "dtype of extra_k_cache float16"),
    ):
        with pytest.raises(FlashpageError, match=says):
            flash_mla_with_kvcache(**call, extra_k_cache=wrong)
    with pytest.raises(RunError, match="^kv_cache has dtype torch.bfloat16 .* rows of 584 bytes: pass them as uint8"):
        wrapper.run(**given | {"kv_cache": given["kv_cache"].view(torch.bfloat16)})
