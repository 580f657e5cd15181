"""Engines with their own planning functions: they write a wrapper's attributes and call `_cached_module.plan` instead
of `plan`. Results are bitwise equal to those of `plan`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from api_batch import DIM, HEADS, KV_HEADS, KV_LENS, PAGE, ROWS, Batch, attention, indptr_of
from engine_plans import (
    DTYPE,
    FIRST,
    INDPTR,
    LAST,
    ONE_ROW,
    OTHER,
    SHAPE,
    TWO_ROWS,
    Lengths,
    decode,
    engine_decode_plan,
    engine_prefill_plan,
    outputs,
    plan,
    prefill,
    workspace,
)

import flashpage
from flashpage import CapabilityError, PlanError, RunError

pytestmark = pytest.mark.usefixtures("quick_kernels")


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


# ---------------------------------------------------------------- what they plan is what `plan` plans


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window_left": 5}, {"fixed_split_size": 2}],
    ids=str,
)
def test_prefill(batch: Batch, graph: bool, options: dict[str, Any]) -> None:
    wrapper, usual = prefill(graph), prefill()
    assert wrapper._cached_module is None and wrapper._plan_info is None
    plan(wrapper, FIRST, **options)
    for lengths in (OTHER, FIRST, OTHER):
        before = wrapper._plan_info
        engine_prefill_plan(wrapper, lengths, **options)
        assert wrapper._plan_info != before and wrapper._plan_info.total_q == len(lengths.q)
        plan(usual, lengths, **options)
        expected = outputs(usual, lengths, batch)
        assert torch.equal(outputs(wrapper, lengths, batch), expected)
    plan(wrapper, FIRST, **options)
    plan(usual, FIRST, **options)
    assert torch.equal(outputs(wrapper, FIRST, batch), outputs(usual, FIRST, batch))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("q_len_per_req", [1, 2])
@pytest.mark.parametrize("tensor_cores", [False, True])
def test_decode(batch: Batch, graph: bool, q_len_per_req: int, tensor_cores: bool) -> None:
    lengths = TWO_ROWS if q_len_per_req == 2 else ONE_ROW
    wrapper, usual = decode(graph, tensor_cores), decode()
    wrapper.plan(*batch.pages(), *SHAPE, q_data_type=DTYPE, q_len_per_req=q_len_per_req)
    if graph:  # the engine fills the buffers that it passed to the constructor
        wrapper._paged_kv_last_page_len_buf.copy_(lengths.last_page_len)
        wrapper._paged_kv_indices_buf[: len(lengths.indices)] = lengths.indices
        assert torch.equal(wrapper._qo_indptr_buf, lengths.qo_indptr)
    for window_left in (-1, 7):
        engine_decode_plan(wrapper, lengths, window_left=window_left, q_len_per_req=q_len_per_req)
        options = {"q_data_type": DTYPE, "window_left": window_left, "q_len_per_req": q_len_per_req}
        usual.plan(*lengths.pages(), *SHAPE, **options)
        assert torch.equal(outputs(wrapper, lengths, batch), outputs(usual, lengths, batch))


def test_soft_cap_of_decode(batch: Batch) -> None:
    wrapper, usual = decode(), decode()
    wrapper.plan(*batch.pages(), *SHAPE, q_data_type=DTYPE)
    engine_decode_plan(wrapper, ONE_ROW, soft_cap=3.0)
    assert wrapper._planner.options.has_soft_cap
    usual.plan(*ONE_ROW.pages(), *SHAPE, q_data_type=DTYPE, logits_soft_cap=3.0)
    assert torch.equal(outputs(wrapper, ONE_ROW, batch), outputs(usual, ONE_ROW, batch))


def test_ragged() -> None:
    lengths, usual = Lengths((2, 0, 3), (5, 0, 7)), flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    kv_indptr = indptr_of((5, 0, 7))
    k, v = torch.randn(12, KV_HEADS, DIM), torch.randn(12, KV_HEADS, DIM)
    usual.plan(lengths.qo_indptr, kv_indptr, HEADS, KV_HEADS, DIM, q_data_type=DTYPE)
    wrapper.plan(indptr_of((1,)), indptr_of((1,)), HEADS, KV_HEADS, DIM, q_data_type=DTYPE)
    assert wrapper._kv_indptr_buf.tolist() == [0, 1]
    memory = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer)
    arrays = (lengths.qo_indptr, kv_indptr, lengths.kv_lens, 5, 3, HEADS, KV_HEADS)
    wrapper._cached_module.plan(*memory, *arrays, 1, False, DIM, DIM, False, -1)  # 16 arguments, as in older releases
    assert torch.equal(wrapper.run(lengths.q, k, v), usual.run(lengths.q, k, v))
    with pytest.raises(PlanError, match="page_size=4 but K and V are ragged"):
        wrapper._cached_module.plan(*memory, *arrays, PAGE, False, DIM, DIM, False, -1)


def test_written_types_are_planned(batch: Batch) -> None:
    wrapper, usual, cache = prefill(True), prefill(), batch.cache.half()
    plan(wrapper, FIRST)
    engine_prefill_plan(wrapper, OTHER, q_data_type="float16")
    usual.plan(OTHER.qo_indptr, *OTHER.pages(), *SHAPE)
    found = wrapper.run(OTHER.q.half(), cache)
    assert found.dtype == torch.float16 and torch.equal(found, usual.run(OTHER.q.half(), cache))
    assert wrapper._cached_q_data_type == wrapper._cached_o_data_type == torch.float16
    engine_prefill_plan(wrapper, OTHER, q_data_type="float8_e4m3fn")
    assert (wrapper._cached_kv_data_type, wrapper._cached_o_data_type) == (torch.float8_e4m3fn, torch.bfloat16)
    plan(wrapper, OTHER)  # the first plan's options again, which are not those of the last plan
    assert wrapper.run(OTHER.q, batch.cache).dtype == torch.float32


def test_other_heads_and_workspaces_are_planned(batch: Batch) -> None:
    wrapper = prefill()
    plan(wrapper, FIRST)
    other = (workspace(), torch.empty(1 << 20, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8))
    changed = {**dict(enumerate(other)), 8: 2 * KV_HEADS, 9: KV_HEADS}
    engine_prefill_plan(wrapper, OTHER, changed=changed, written={"_num_qo_heads": 2 * KV_HEADS})
    assert wrapper._num_qo_heads == 2 * KV_HEADS
    assert wrapper._float_workspace_buffer is other[0] and wrapper._int_workspace_buffer is other[1]
    assert wrapper._pin_memory_int_workspace_buffer is other[2]
    usual = prefill()
    plan(usual, OTHER)
    assert torch.equal(outputs(wrapper, OTHER, batch), outputs(usual, OTHER, batch))


def masks_of(lengths: Lengths) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    bits = int((lengths.qo_indptr.diff() * lengths.kv_lens).sum())
    return torch.rand(bits, generator=generator) < 0.7


def packed(lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
    bits = lengths.qo_indptr.diff() * lengths.kv_lens
    indptr = torch.cat([torch.zeros(1), bits.cumsum(0)]).int()
    return flashpage.segment_packbits(masks_of(lengths), indptr, bitorder="little")


def test_mask_bits_in_the_buffers(batch: Batch) -> None:
    wrapper, usual = prefill(True, masked=True), prefill()
    plan(wrapper, FIRST, custom_mask=masks_of(FIRST))
    assert torch.equal(wrapper._mask_indptr_buf, packed(FIRST)[1])
    assert torch.equal(wrapper._custom_mask_buf[: len(packed(FIRST)[0])], packed(FIRST)[0])
    engine_prefill_plan(wrapper, OTHER, packed_mask=packed(OTHER))
    plan(usual, OTHER, custom_mask=masks_of(OTHER))
    assert torch.equal(usual._mask_indptr_buf, wrapper._mask_indptr_buf)
    assert torch.equal(outputs(wrapper, OTHER, batch), outputs(usual, OTHER, batch))
    bits, indptr = packed(OTHER)
    with pytest.raises(PlanError, match="_mask_indptr_buf"):
        engine_prefill_plan(wrapper, OTHER, packed_mask=(bits, indptr + 1))


# ---------------------------------------------------------------- multi-item scoring


ITEM_ROWS, PREFIX = (9, 6), (4, 3)
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3, *[0, 1, 0, 1, 2, 0, 0, 0, 0]]).to(torch.int16)
ITEMS = Lengths(ITEM_ROWS, (13, 9))


def item_arguments(longest: tuple[int, ...] | None = (3, 2)) -> dict[str, Any]:
    return {
        "prefix_len_ptr": torch.tensor(PREFIX),
        "token_pos_in_items_ptr": POSITIONS,
        "token_pos_in_items_len": 9,
        "max_item_len_ptr": None if longest is None else torch.tensor(longest).to(torch.uint16),
    }


def expected_items(batch: Batch) -> torch.Tensor:
    found, begin = [], 0
    for request, (rows, prefix) in enumerate(zip(ITEM_ROWS, PREFIX, strict=True)):
        tokens = int(ITEMS.kv_lens[request])
        mask = torch.zeros(rows, tokens, dtype=torch.bool)
        for row in range(rows):
            at, position = tokens - rows + row, int(POSITIONS[9 * request + tokens - rows + row - prefix])
            mask[row, :prefix] = True
            mask[row, at - position : at + 1] = True
        pages = batch.cache[ITEMS.indices[ITEMS.kv_indptr[request] : ITEMS.kv_indptr[request + 1]].long()]
        k, v = (pages[:, i].reshape(-1, KV_HEADS, DIM)[:tokens] for i in range(2))
        found.append(attention(ITEMS.q[begin : begin + rows], k, v, mask=mask))
        begin += rows
    return torch.cat(found)


def test_items_are_planned_and_forgotten(batch: Batch) -> None:
    """A run's causal does not lift the mask, and a plan without items has no mask."""
    wrapper, usual = prefill(), prefill()
    plan(wrapper, ITEMS, **item_arguments())
    assert wrapper._token_pos_in_items_len == 9 and wrapper._prefix_len_ptr.tolist() == list(PREFIX)
    expected = expected_items(batch)
    for causal in (True, False):
        torch.testing.assert_close(wrapper.forward(ITEMS.q, batch.cache, causal=causal), expected, rtol=1e-4, atol=1e-5)
    engine_prefill_plan(wrapper, ITEMS)
    assert wrapper._prefix_len_ptr is None and wrapper._token_pos_in_items_len == 0
    plan(usual, ITEMS)
    assert torch.equal(outputs(wrapper, ITEMS, batch), outputs(usual, ITEMS, batch))
    engine_prefill_plan(wrapper, ITEMS, items=tuple(item_arguments().values()))
    torch.testing.assert_close(wrapper.run(ITEMS.q, batch.cache), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_items", [True, False], ids=["items before", "none before"])
def test_items_of_a_failed_plan_are_forgotten(batch: Batch, has_items: bool) -> None:
    """An engine that writes no items plans with those of the last plan that succeeded."""
    wrapper, usual = prefill(), prefill()
    plan(wrapper, ITEMS, **item_arguments())
    if not has_items:
        plan(wrapper, ITEMS, causal=True)
    failed = item_arguments(None) | {"prefix_len_ptr": torch.tensor((1, 1))}
    with pytest.raises(PlanError):
        wrapper.plan(
            ITEMS.qo_indptr, ITEMS.kv_indptr, ITEMS.indices, LAST[:2] + 99, *SHAPE, q_data_type=DTYPE, **failed
        )
    kept = "_prefix_len_ptr", "_token_pos_in_items_ptr", "_token_pos_in_items_len", "_max_item_len_ptr"
    engine_prefill_plan(wrapper, ITEMS, causal=True, not_written=kept)
    plan(usual, ITEMS, **(item_arguments() if has_items else {"causal": True}))
    assert torch.equal(outputs(wrapper, ITEMS, batch), outputs(usual, ITEMS, batch))


def test_the_longest_item_is_checked(batch: Batch) -> None:
    wrapper = prefill()
    for longest in ((3, 2), (9, 9), None):
        plan(wrapper, ITEMS, **item_arguments(longest))
    for longest, says in (((3, 1), r"max_item_len_ptr\[1\]=1 .* 2 tokens"), ((3, 2, 1), "has 3 entries")):
        with pytest.raises(PlanError, match=says):
            plan(wrapper, ITEMS, **item_arguments(longest))
    for alone in ({"max_item_len_ptr": torch.tensor([3, 2])}, {"token_pos_in_items_len": 9}):
        with pytest.raises(PlanError, match="prefix_len_ptr=None"):
            plan(wrapper, ITEMS, **alone)
    with pytest.raises(PlanError, match="max_item_len_ptr"):
        engine_prefill_plan(wrapper, ITEMS, items=tuple(item_arguments((3, 1)).values()))


# ---------------------------------------------------------------- nothing is accepted and ignored


REFUSED = [
    ({"_qo_indptr_last": 6}, {}, "_qo_indptr_last=6"),
    ({"_max_q_len": 3}, {}, "_max_q_len=3 .* 4"),
    ({"_max_kv_len": 29}, {}, "_max_kv_len=29 .* 30"),
    ({"_batch_size": 3}, {}, "_batch_size=3"),
    ({"_num_kv_heads": 4}, {}, "_num_kv_heads=4"),
    (
        {"_paged_kv_indptr_buf": FIRST.kv_indptr},
        {},
        r"_paged_kv_indptr_buf\[1\]=\d+ was written but the batch has \d+:",
    ),
    ({"_mask_indptr_buf": INDPTR}, {}, "_mask_indptr_buf=a tensor of shape .* was written but the batch has None"),
    ({"_cached_kv_data_type": "int4"}, {}, "_cached_kv_data_type='int4'"),
    ({"_block_tables": torch.zeros(4, 8, dtype=torch.int32)}, {}, "block_tables has page 0"),
    ({"_prefix_len_ptr": LAST}, {}, "token_pos_in_items_ptr=None"),
    ({}, {0: torch.empty(64, dtype=torch.float32, device="meta")}, "float_workspace_buffer is on meta"),
    ({}, {1: torch.empty(64, dtype=torch.uint8, device="meta")}, "int_workspace_buffer is on meta"),
    ({}, {2: torch.empty(64, device="meta")}, "_pin_memory_int_workspace_buffer is on meta"),
    ({}, {3: indptr_of((1, 4, -1, 2))}, r"qo_indptr\[3\]"),
    ({}, {4: OTHER.kv_indptr[:-1]}, "batch_size=4 but kv_indptr"),
    ({}, {5: OTHER.kv_lens + 9}, r"seq_lens\[0\]=26"),
    ({}, {6: 6}, "total_num_rows=6"),
    ({}, {7: 5}, "batch_size=5"),
    ({}, {9: 3}, "num_kv_heads=3"),
    ({}, {10: 0}, "page_size=0"),
    ({}, {11: True}, "enable_cuda_graph=True"),
    ({}, {12: 2.5}, "head_dim_qk=2.5"),
    ({}, {15: "all"}, "window_left='all'"),
    ({}, {16: 0}, "fixed_split_size=0"),
    ({}, {18: 4}, "num_colocated_ctas=4"),
    ({}, {19: 2}, "uniform_q_len"),
]


@pytest.mark.parametrize(("written", "changed", "says"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_cannot_be_is_refused(batch: Batch, written: dict[str, Any], changed: dict[int, Any], says: str) -> None:
    wrapper = prefill()
    plan(wrapper, FIRST)
    with pytest.raises((PlanError, CapabilityError), match=says):
        engine_prefill_plan(wrapper, OTHER, written=written, changed=changed)
    with pytest.raises(RunError, match="has no plan"):
        outputs(wrapper, OTHER, batch)
    wrapper.reset_workspace_buffer(workspace(), workspace())
    engine_prefill_plan(wrapper, OTHER)
    assert bool(outputs(wrapper, OTHER, batch)[: OTHER.q.numel()].isfinite().all())


@pytest.mark.parametrize("others", [0, 1], ids=["one plan", "a run's options too"])
def test_a_refused_plan_changes_nothing_that_graphs_read(batch: Batch, others: int) -> None:
    """The written numbers are compared with the batch's, which only the plan finds."""
    wrapper, usual = prefill(True), prefill()
    plan(wrapper, FIRST)
    for window in (3,) * others:
        wrapper.run(FIRST.q, batch.cache, window_left=window)
    engine_prefill_plan(wrapper, OTHER)
    memory = [known.slot.memory for known in wrapper._planner.active]
    before = [plan.clone() for plan in memory]
    assert len(before) == 1 + others
    for name, value in (("_max_q_len", 0), ("_qo_indptr_last", 9), ("_mask_indptr_buf", INDPTR)):
        with pytest.raises(PlanError, match=name):
            engine_prefill_plan(wrapper, FIRST, written={name: value})
        assert all(map(torch.equal, memory, before))
        with pytest.raises(RunError, match="has no plan"):
            outputs(wrapper, OTHER, batch)
    engine_prefill_plan(wrapper, ONE_ROW)
    assert not torch.equal(memory[0], before[0])
    plan(usual, ONE_ROW)
    assert torch.equal(outputs(wrapper, ONE_ROW, batch), outputs(usual, ONE_ROW, batch))


def test_a_plan_info_is_of_one_plan(batch: Batch) -> None:
    wrapper = prefill()
    plan(wrapper, FIRST)
    first = wrapper._plan_info
    wrapper._plan_info = list(first)  # some engines keep it as a list
    plan(wrapper, FIRST)
    assert wrapper._plan_info != first and wrapper._plan_info[1:] == first[1:]
    with pytest.raises(PlanError, match="_plan_info is of a plan that is gone"):
        wrapper._plan_info = first
    wrapper._plan_info = None
    with pytest.raises(RunError, match="has no plan"):
        outputs(wrapper, FIRST, batch)


def test_rows_of_a_graph_never_grow() -> None:
    wrapper = prefill(True)
    assert wrapper._max_total_num_rows is None
    plan(wrapper, OTHER)
    assert wrapper._max_total_num_rows == len(OTHER.q)
    with pytest.raises(PlanError, match="qo_indptr ends at 14 .* had 7 rows"):
        plan(wrapper, FIRST)
    with pytest.raises(PlanError, match="qo_indptr ends at 14"):
        engine_prefill_plan(wrapper, FIRST)
    wrapper._max_total_num_rows = 14  # the engine's tensors are large enough
    plan(wrapper, FIRST)
    assert prefill()._max_total_num_rows is None


def test_rows_of_a_graph_are_declared(batch: Batch) -> None:
    """FlashInfer's max_total_num_rows: the first plan may be smaller than later ones."""
    buffers = INDPTR.clone(), INDPTR.clone(), torch.zeros(64, dtype=torch.int32), LAST.clone()
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers, max_total_num_rows=14)
    usual = prefill()
    assert wrapper._max_total_num_rows == 14
    for lengths in (OTHER, FIRST):
        plan(wrapper, lengths)
        plan(usual, lengths)
        assert torch.equal(outputs(wrapper, lengths, batch), outputs(usual, lengths, batch))
    with pytest.raises(PlanError, match="had 14 rows"):
        plan(wrapper, Lengths((1, 9, 3, 2), KV_LENS))
    with pytest.raises(PlanError, match="max_total_num_rows=14 is for use_cuda_graph=True and the four buffers"):
        flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace(), max_total_num_rows=14)


def test_copies_of_lengths_on_the_host() -> None:
    """FlashInfer's qo_indptr_cpu and kv_indptr_cpu are read in place of the others."""
    wrapper, usual = (flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace()) for _ in range(2))
    ends = indptr_of((2, 0, 3)), indptr_of((5, 0, 7))
    q, (k, v) = torch.randn(5, HEADS, DIM), torch.randn(2, 12, KV_HEADS, DIM)
    shape, copies = (HEADS, KV_HEADS, DIM), dict(zip(("qo_indptr_cpu", "kv_indptr_cpu"), ends, strict=True))
    usual.plan(*ends, *shape, q_data_type=DTYPE)
    wrapper.plan(*(torch.zeros_like(each) for each in ends), *shape, q_data_type=DTYPE, **copies)
    assert torch.equal(wrapper.run(q, k, v), usual.run(q, k, v))


# ---------------------------------------------------------------- attributes say what is planned


def test_attributes_of_a_plan() -> None:
    wrapper = prefill()
    assert wrapper._qo_indptr_last is None and wrapper._batch_size is None and wrapper._qo_indptr_buf is None
    plan(wrapper, FIRST, o_data_type="float16")
    assert (wrapper._qo_indptr_last, wrapper._max_q_len, wrapper._max_kv_len) == (sum(ROWS), max(ROWS), max(KV_LENS))
    assert (wrapper._batch_size, wrapper._num_qo_heads, wrapper._num_kv_heads) == (len(ROWS), HEADS, KV_HEADS)
    assert (wrapper._cached_q_data_type, wrapper._cached_kv_data_type) == (DTYPE, DTYPE)
    assert wrapper._cached_o_data_type == torch.float16 and wrapper._block_tables is None
    assert wrapper._mask_indptr_buf is None and wrapper._custom_mask_buf is None and wrapper._prefix_len_ptr is None
    arrays = (wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf)
    for found, given in zip(arrays, (FIRST.qo_indptr, FIRST.kv_indptr, FIRST.last_page_len), strict=True):
        assert torch.equal(found, given) and found.dtype == torch.int32
    assert wrapper._paged_kv_indices_buf is FIRST.indices


def test_graph_buffers_are_the_constructors() -> None:
    wrapper = prefill(True)
    mine = wrapper._paged_kv_indptr_buf
    wrapper._paged_kv_indptr_buf = mine
    with pytest.raises(PlanError, match="_paged_kv_indptr_buf is fixed"):
        wrapper._paged_kv_indptr_buf = mine.clone()
    with pytest.raises(PlanError, match="_paged_kv_indices_buf is fixed"):
        wrapper._paged_kv_indices_buf = FIRST.indices
    assert wrapper._mask_indptr_buf is None
