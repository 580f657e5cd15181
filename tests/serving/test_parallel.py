"""The heads and tokens of one rank, and refusals, in one process. test_parallel_ranks.py starts several."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_batch import CASES, RAGGED, WORKSPACE_BYTES, ParallelBatch, ParallelCase, owner

import flashpage
from flashpage import CapabilityError, PlanError, RunError, parallel
from flashpage.parallel import merge

GROUP_OF_ONE = [c for c in CASES if c.name in ("decode", "append-causal-sinks", "decode-window")]


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


def workspace() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)


def planned(case: ParallelCase, **changed: Any) -> tuple[parallel.ContextParallelAttention, ParallelBatch]:
    batch = ParallelBatch(case, 1)
    wrapper = parallel.ContextParallelAttention(workspace(), case.kv_layout)
    rows = {"qo_indptr": batch.q_indptr} if case.q_lens else {}
    wrapper.plan(*batch.pages(0), batch.seq_lens, *batch.sizes(), **(rows | batch.options() | changed))
    return wrapper, batch


@pytest.mark.parametrize("case", GROUP_OF_ONE, ids=str)
def test_a_group_of_one_is_the_wrapper(case: ParallelCase, group_of_one: None) -> None:
    wrapper, batch = planned(case)
    cache = batch.caches[0].argument("cpu")
    found = wrapper.run_return_lse(batch.q, cache, sinks=batch.sinks)
    batch.check(*found, is_merged=False)
    assert (wrapper.rank, wrapper.world_size) == (0, 1)
    merged = parallel.merge_over_group(*found)
    assert torch.equal(merged[0], found[0]) and torch.equal(merged[1], found[1])


def test_one_wrapper_plans_many_batches(group_of_one: None) -> None:
    """The mask's tensors grow with the batch; plans without a mask come between."""
    names = ("decode-window", "append-causal", "decode", "append-causal-contiguous-window", "decode-window")
    cases = {case.name: case for case in CASES}
    wrapper = parallel.ContextParallelAttention(workspace())
    for name in names:
        batch = ParallelBatch(cases[name], 1)
        options = batch.options() | ({"qo_indptr": batch.q_indptr} if cases[name].q_lens else {})
        wrapper.plan(*batch.pages(0), batch.seq_lens, *batch.sizes(), **options)
        batch.check(*wrapper.run(batch.q, batch.caches[0].argument("cpu"), return_lse=True), is_merged=False)


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "world_size", "local", "replicas"),
    [
        (32, 8, 1, (32, 8), 1),
        (32, 8, 4, (8, 2), 1),
        (32, 8, 8, (4, 1), 1),
        (32, 8, 16, (2, 1), 2),
        (8, 1, 4, (2, 1), 4),
    ],
)
def test_heads_of_all_ranks(
    num_qo_heads: int, num_kv_heads: int, world_size: int, local: tuple[int, int], replicas: int
) -> None:
    """Each query head belongs to one rank, together with the KV head that it reads."""
    group, seen = num_qo_heads // num_kv_heads, []
    for rank in range(world_size):
        share = parallel.head_share(num_qo_heads, num_kv_heads, rank, world_size)
        assert ((share.num_qo_heads, share.num_kv_heads), share.kv_replicas) == (local, replicas)
        queries, keys = list(range(num_qo_heads))[share.qo], list(range(num_kv_heads))[share.kv]
        assert [keys[i * len(keys) // len(queries)] for i in range(len(queries))] == [head // group for head in queries]
        seen += queries
    assert seen == list(range(num_qo_heads))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shares_give_the_whole(world_size: int, kv_layout: str) -> None:
    """Each rank plans its own heads over views of the whole cache; 2 KV heads, so that 4 ranks replicate them."""
    case = ParallelCase("tensor-parallel", kv_layout=kv_layout, sinks=True)
    batch, outs, lses = ParallelBatch(case, 1), [], []
    k, v = batch.caches[0].argument("cpu")
    for rank in range(world_size):
        share = parallel.head_share(case.num_q_heads, case.num_kv_heads, rank, world_size)
        wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace(), kv_layout)
        sizes = (share.num_qo_heads, share.num_kv_heads, case.head_dim, case.page_size)
        wrapper.plan(*batch.pages(0), None, *sizes, q_data_type=torch.bfloat16, seq_lens=batch.seq_lens)
        cache = share.cache((k, v), kv_layout)
        assert cache[0].data_ptr() == share.cache(k, kv_layout).data_ptr()  # a view, not a copy
        out, lse = wrapper.run(share.queries(batch.q), cache, sinks=batch.sinks[share.qo], return_lse=True)
        outs.append(out)
        lses.append(lse)
    batch.check(torch.cat(outs, 1), torch.cat(lses, 1), is_merged=False)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("order", "interleave"), [("interleaved", 0), ("interleaved", 1), ("interleaved", 32), ("contiguous", 0)]
)
def test_tokens_of_all_ranks(order: str, interleave: int, world_size: int) -> None:
    """Compared with the owner of each token, counted one by one."""
    case = ParallelCase("layout", order=order, interleave=interleave)
    for length in (*RAGGED, 48, 95, 1000):
        owners = torch.tensor([owner(case, world_size, t, length) for t in range(length)])
        positions, lens = torch.arange(length), torch.full((length,), length)
        for rank in range(world_size):
            layout = parallel.ContextLayout(rank, world_size, 16, order, interleave)
            here = owners == rank
            assert int(layout.tokens(torch.tensor([length]))) == int(here.sum())
            assert torch.equal(layout.is_local(positions, lens), here)
            assert torch.equal(layout.tokens_before(positions, lens), here.long().cumsum(0) - here.long())


def test_pages_of_a_rank() -> None:
    """Lists longer than needed, which do not begin at 0, for the second of two ranks."""
    indptr, indices = torch.tensor([2, 7, 7, 8]), torch.arange(100, 110)
    layout = parallel.ContextLayout(1, 2, 16)
    pages = layout.pages(indptr, indices, torch.tensor([61, 0, 16]))
    assert [part.tolist() for part in pages] == [[0, 2, 2, 2], [103, 105], [29, 0, 0]]
    assert pages.last_page_len(16).tolist() == [13, 0, 0]


def test_pages_that_a_window_hides_are_not_read(group_of_one: None) -> None:
    """The plan of a row has the tokens of its window alone, which needs no mask."""
    wrapper, batch = planned(ParallelCase("window", kv_lens=(4000, 7), window_left=40))
    items = wrapper._attention.last_plan.work_items()
    assert (items["kv_begin"] >= items["kv_len"] - 41).all() and wrapper._attention.last_plan.spec.variant.mask == ""
    hidden = batch.pages(0)[1][: (4000 - 41) // 16].long()
    for kv in batch.caches[0].rows():
        kv[hidden] = math.nan
    batch.check(*wrapper.run(batch.q, batch.caches[0].argument("cpu"), return_lse=True), is_merged=False)


def test_states_that_travel_are_aligned() -> None:
    """Kernels read states in vectors of 16 bytes; the sizes here end inside a vector."""
    memory = merge._memory(3, (5, 1, 24), torch.zeros(1, dtype=torch.float16))
    out, lse = merge._views(memory, (5, 1, 24), torch.float16)
    for states in (out, lse):
        assert all((state.data_ptr() - memory.data_ptr()) % 16 == 0 for state in states)
    assert (out.shape, lse.shape) == ((3, 5, 1, 24), (3, 5, 1))


def test_import_starts_nothing() -> None:
    code = "import flashpage.parallel as p, torch.distributed as d; assert not d.is_initialized() and p.head_share"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])


def test_no_process_group_is_refused() -> None:
    with pytest.raises(PlanError, match=r"init_process_group"):
        parallel.ContextParallelAttention(workspace())


DECODE = ParallelCase("decode")
LAYOUT = (torch.tensor([0, 2]), torch.arange(2), torch.tensor([20]))
REFUSALS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    (
        "heads-ranks",
        lambda: parallel.head_share(30, 10, 0, 4),
        PlanError,
        "num_qo_heads=30 .* world_size=4.*divides 30",
    ),
    (
        "kv-ranks",
        lambda: parallel.head_share(24, 6, 0, 4),
        PlanError,
        "num_kv_heads=6 and world_size=4.*multiple of it",
    ),
    ("group", lambda: parallel.head_share(30, 8, 0, 2), PlanError, "num_qo_heads=30 .*num_kv_heads=8"),
    ("rank", lambda: parallel.head_share(32, 8, 4, 4), PlanError, "rank=4 .*at most 3"),
    ("q", lambda: parallel.head_share(8, 2, 0, 2).queries(torch.zeros(3, 4, 64)), RunError, r"q .*\(3, 4, 64\).*all 8"),
    (
        "cache",
        lambda: parallel.head_share(8, 2, 0, 2).cache(torch.zeros(3, 16, 4, 64)),
        RunError,
        r"paged_kv_cache .*\(3, 16, 4, 64\).*all 2 heads",
    ),
    ("order", lambda: parallel.ContextLayout(0, 2, 16, "zigzag"), PlanError, "order='zigzag'.*'contiguous'"),
    ("runs", lambda: parallel.ContextLayout(0, 2, 16, "contiguous", 16), PlanError, "interleave=16.*pass 0"),
    ("cut", lambda: parallel.ContextLayout(0, 2, 16, interleave=8).pages(*LAYOUT), PlanError, "interleave=8.*'own'"),
    (
        "short",
        lambda: parallel.ContextLayout(0, 2, 8).pages(*LAYOUT),
        PlanError,
        r"seq_lens\[0\]=20 exceeds the 16 tokens.*'own'",
    ),
    ("pages", lambda: parallel.ContextParallelAttention(workspace(), pages="mine"), PlanError, "pages='mine'.*'own'"),
    ("heads", lambda: parallel.ContextParallelAttention(workspace(), heads="mine"), PlanError, "heads='mine'.*'own'"),
    (
        "rope",
        lambda: planned(DECODE, pos_encoding_mode="ROPE_LLAMA"),
        CapabilityError,
        "pos_encoding_mode='ROPE_LLAMA'",
    ),
    ("mask", lambda: planned(DECODE, custom_mask=torch.ones(9)), CapabilityError, "custom_mask=.*on one rank"),
    ("format", lambda: planned(DECODE, kv_format="nvfp4"), CapabilityError, "kv_format='nvfp4'.*pass kv_data_type"),
    (
        "variant",
        lambda: planned(DECODE, variant=flashpage.Variant(mask="kv_idx > 3")),
        CapabilityError,
        "variant=.*kv_idx",
    ),
    ("rows", lambda: planned(DECODE, qo_indptr=torch.tensor([0, 1])), PlanError, "qo_indptr has 2 entries"),
    (
        "rows-fall",
        lambda: planned(DECODE, qo_indptr=torch.tensor([0, 2, 1, 3, 4, 5, 6, 7, 8])),
        PlanError,
        r"qo_indptr\[2\]=1",
    ),
    (
        "no-plan",
        lambda: parallel.ContextParallelAttention(workspace()).run(torch.zeros(1, 8, 64), None),
        RunError,
        "plan",
    ),
    (
        "out",
        lambda: (planned(DECODE)[0]).run(ParallelBatch(DECODE, 1).q, None, out=torch.zeros(8, 8, 32)),
        RunError,
        r"out has shape \(8, 8, 32\)",
    ),
    (
        "lse",
        lambda: parallel.merge_over_group(torch.zeros(2, 8, 64), torch.zeros(8, 2)),
        RunError,
        r"lse has shape \(8, 2\)",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str, group_of_one: None) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("pages", ["all", "own"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_indptr": torch.tensor([-3, 2])}, r"kv_indptr\[0\]=-3 is negative"),
        ({"kv_indices": torch.tensor([1])}, "kv_indices has 1 entries but kv_indptr ends at 2"),
        ({"kv_indices": torch.tensor([1.0, 2.0])}, "kv_indices has shape .* and dtype torch.float32"),
        ({"seq_lens": torch.tensor([2**40])}, "seq_lens reaches 1099511627776"),
    ],
    ids=["negative", "short", "floats", "huge"],
)
def test_lists_lie_within_the_page_numbers(wrong: dict[str, Any], says: str, pages: str, group_of_one: None) -> None:
    """A negative place counted from the end of the page numbers, and a length of 2**40 wrapped to 0 tokens."""
    wrapper = parallel.ContextParallelAttention(workspace(), pages=pages)
    given = {
        "kv_indptr": torch.tensor([0, 2]),
        "kv_indices": torch.tensor([1, 2, 3, 4]),
        "seq_lens": torch.tensor([20]),
    }
    with pytest.raises(PlanError, match=says):
        wrapper.plan(**given | wrong, num_qo_heads=2, num_kv_heads=2, head_dim=64, page_size=16, window_left=3)


def test_a_failed_plan_is_no_plan(group_of_one: None) -> None:
    wrapper, batch = planned(DECODE)
    with pytest.raises(PlanError, match=r"seq_lens\[1\]=-1 is negative"):
        wrapper.plan(*batch.pages(0), torch.tensor([1, -1, 0, 0, 0, 0, 0, 0]), *batch.sizes())
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(batch.q, batch.caches[0].argument("cpu"))
