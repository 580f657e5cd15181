"""Mask functions of the Hopper prefill kernel, on the host: the kernel that finds the tiles of a variant's mask,
compared with torch's evaluation of the same function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mask_batch import TOKENS, FunctionMasked, memory_of, plan_of
from native_build import function_tiles
from planner_batches import Batch, Cutting
from variant_build import variant_args

import flashpage
from flashpage.kernels import choose
from flashpage.kernels.spec import VariantSpec
from flashpage.variants import Variant
from flashpage.variants.source import mask_is_causal, mask_looks_at_head

pytestmark = pytest.mark.usefixtures("quick_kernels")

MOST_TOKENS, BEFORE, REQUESTS, HEADS = 4600, 300, 5, 40  # BEFORE: rows before a request's first token
_generator = torch.Generator().manual_seed(5)
DOCUMENT = torch.sort(torch.randint(0, 30, (REQUESTS, BEFORE + MOST_TOKENS), generator=_generator))[0]
REACH = torch.randint(0, 900, (HEADS,), generator=_generator)
FIRST = torch.tensor([0, 10**6, 100, 640, -5])  # first of the tokens that a request sees


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[b, q_idx + BEFORE] == DOCUMENT[b, kv_idx + BEFORE]


def causal_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return documents(b, h, q_idx, kv_idx) & (kv_idx <= q_idx) & (kv_idx != 7)


def reach_of_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx < REACH[h]) & (kv_idx - q_idx < 40)


def islands(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx // 40 + kv_idx // 200) % 3 == 0) & (kv_idx >= FIRST[b])


FUNCTIONS: tuple[Callable[..., Any], ...] = (documents, causal_documents, reach_of_heads, islands)
VARIANTS = {function.__name__: Variant(mask_mod=function).traced() for function in FUNCTIONS}


def function_masked(batch: Batch, cutting: Cutting, function: Callable[..., Any]) -> FunctionMasked:
    variant = VARIANTS[function.__name__]
    args, kernel = variant_args(variant), function_tiles(variant.spec)
    masks, in_range = [], []
    for request, (rows, tokens) in enumerate(zip(batch.q_lens.tolist(), batch.kv_lens.tolist(), strict=True)):
        q_idx = torch.arange(rows).reshape(-1, 1) + tokens - rows
        kv_idx = torch.arange(tokens).reshape(1, -1)
        seen = [function(request, head, q_idx, kv_idx).expand(rows, tokens) for head in range(batch.num_q_heads)]
        masks.append(torch.stack(seen).numpy())
        after = kv_idx <= q_idx if batch.causal else torch.ones(rows, tokens, dtype=torch.bool)
        in_window = kv_idx >= q_idx - batch.window_left if batch.window_left >= 0 else after
        in_range.append((after & in_window).numpy())
    planned, plan_bytes = plan_of(batch, cutting)
    heads = batch.num_kv_heads if mask_looks_at_head(variant.spec) else 1
    params, cells, after = memory_of(planned, heads)
    params.plan = plan_bytes.ctypes.data
    made = FunctionMasked(planned, masks, np.zeros(0, np.uint8), params, cells, after, plan_bytes)
    made.ask = lambda params, grid: kernel(ctypes.byref(params), ctypes.byref(args), grid)
    made.in_range = in_range
    return made


@st.composite
def function_batches(draw: st.DrawFn, function: Callable[..., Any]) -> FunctionMasked:
    lengths = st.sampled_from((0, 1, 2, 7, 64, 65, 129, 300))
    tokens = st.integers(0, 700) | st.just(4500)
    requests = draw(st.lists(st.tuples(lengths, tokens), min_size=1, max_size=REQUESTS))
    num_kv_heads, group = draw(st.sampled_from(((1, 1), (2, 3), (1, 40), (3, 4))))
    q_lens, kv_lens = (np.array([r[i] for r in requests], np.int64) for i in range(2))
    batch = Batch(
        q_lens,
        kv_lens,
        num_q_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        page_size=0,
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from((-1, 200))),
        has_mask_tiles=True,
        q_start=draw(st.integers(0, 3)),
    )
    cutting = Cutting(
        num_ctas=draw(st.sampled_from((1, 5, 132, 600))),
        heads_on_axis=True,
        tile_q=draw(st.sampled_from((64, 128))),
        tile_kv=draw(st.sampled_from(TOKENS)),
        wave_tokens=draw(st.sampled_from((0, 500))),
        fixed_piece_tokens=draw(st.sampled_from((0, 0, -1, 3840))),
    )
    return function_masked(batch, cutting, function)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tiles_and_queue_of_functions(function: Callable[..., Any], data: st.DataObject) -> None:
    batch, grid = data.draw(function_batches(function)), data.draw(st.sampled_from((1, 3)))
    for _ in range(2):  # the second run starts from the memory of the first
        batch.find(grid)
    batch.check_tiles()
    batch.check_queue()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_who_looks_at_the_head(function: Callable[..., Any]) -> None:
    assert mask_looks_at_head(VARIANTS[function.__name__].spec) == (function is reach_of_heads)
    assert mask_is_causal(VARIANTS[function.__name__].spec) == (function is causal_documents)


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [
        ("kv_idx <= q_idx", True),
        ("(q_idx > kv_idx)", True),
        ("logical_and(logical_and((a(b) == a(kv_idx)), (kv_idx <= q_idx)), kv_idx > 3)", True),
        ("kv_idx > 3\nq_idx >= kv_idx", True),
        ("const auto v0 = a(b); return logical_and((v0 == v0), (kv_idx <= q_idx));", True),
        ("logical_or((a(b) == 1), (kv_idx <= q_idx))", False),
        ("logical_not(logical_and((a(b) == 1), (kv_idx <= q_idx)))", False),
        ("(kv_idx) <= (q_idx)", False),
        ("logical_and(a(b), b) == (kv_idx <= q_idx)", False),
        ("logical_and(select(b, a(b), (kv_idx <= q_idx)), b > 1)", False),
        ("int q_idx = 9; return (kv_idx <= q_idx);", False),
        ("", False),
    ],
)
def test_masks_that_say_that_they_are_causal(mask: str, is_causal: bool) -> None:
    assert mask_is_causal(VariantSpec(mask=mask)) == is_causal


def planned(variant: Variant, is_graph: bool = False, **options: Any) -> Any:
    buffers = {}
    if is_graph:
        buffers = {name: torch.zeros(3, dtype=torch.int32) for name in ("qo_indptr_buf", "kv_indptr_buf")}
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(1 << 23, dtype=torch.uint8), use_cuda_graph=is_graph, **buffers
    )
    indptr = torch.tensor([0, 300, 800])
    wrapper.plan(indptr, indptr, 6, 2, 64, variant=variant, **options)
    return wrapper._planner


@pytest.mark.parametrize("fixed_split_size", [None, 128])
@pytest.mark.parametrize("function", [documents, reach_of_heads], ids=lambda function: function.__name__)
def test_a_wrapper_binds_memory_for_its_plan(
    function: Callable[..., Any], fixed_split_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a CPU plan, with a CPU kernel that is marked to need mask tiles."""
    monkeypatch.setattr(choose, "_mask_source", lambda *_: "function")
    planner = planned(Variant(mask_mod=function), fixed_split_size=fixed_split_size, causal=True, window_left=400)
    option_plan = planner.active[0]
    option_plan.mask_tiles.bind(planner.batch, option_plan.prepared, option_plan.slot)
    params = option_plan.mask_tiles.params
    variant = VARIANTS[function.__name__]
    function_tiles(variant.spec)(ctypes.byref(params), ctypes.byref(variant_args(variant)), 3)
    cells = option_plan.mask_tiles.cells.tensor
    num_units = int(cells[0]) & 0xFFFFFFFF
    assert num_units == int(option_plan.make_plan().work_items()["num_units"].sum())
    assert params.queue_begin + 4 * num_units <= cells.numel()
    assert (params.causal, params.window_left, params.custom_mask) == (1, 400, None)
    assert params.tile_heads == (2 if function is reach_of_heads else 1)


def test_lengths_are_not_known_where_a_graph_may_hold_the_launch() -> None:
    variant = Variant(mask_mod=documents)
    known = [planned(variant, is_graph).active[0].prepared.problem.has_known_lengths for is_graph in (False, True)]
    assert known == [True, False]
