"""Plans with `chunk`: every row sees exactly the tokens of its own chunk, and no work item has earlier tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from planner_batches import Batch, Cutting, Planned, arrays_of, bounds, call, plan, problem_of, unpack
from random_batches import random_case
from table_plans import TableBatch

import flashpage
from flashpage import native
from flashpage.errors import CapabilityError, PlanError
from flashpage.plan.lengths import complaint
from flashpage.wrappers.base import PAGED


def coverage(planned: Planned, request: int, kv_head: int) -> np.ndarray:
    """How many items of all CTAs have a token for a row, [packed rows, tokens]."""
    batch, tile_q = planned.batch, planned.cutting.tile_q
    q_len, kv_len, group = int(batch.q_lens[request]), int(batch.kv_lens[request]), batch.group
    first = int(batch.q_start + batch.q_lens[:request].sum())
    found = np.zeros((q_len * group, kv_len), np.int64)
    for cta in planned.ctas:
        for item in planned.items[cta["begin"] : cta["end"]]:
            if item["request"] != request:
                continue
            rows = int(item["q_len"]) * group
            tiles = -(-rows // tile_q)
            for unit in range(item["num_units"]):
                at = int(item["first_packed_row"]) // tile_q + unit
                if item["kv_head"] + cta["kv_head"] + at // tiles != kv_head:
                    continue
                for packed in range(at % tiles * tile_q, min(rows, (at % tiles + 1) * tile_q)):
                    position = int(item["kv_len"]) - int(item["q_len"]) + packed // group
                    begin, end = int(item["kv_begin"]), int(item["kv_end"])
                    if batch.causal:
                        end = min(end, position + 1)
                    if batch.window_left >= 0:
                        begin = max(begin, position - batch.window_left)
                    found[(int(item["q_begin"]) - first) * group + packed, begin : max(begin, end)] += 1
    return found


def expected(batch: Batch, request: int) -> np.ndarray:
    """Coverage by the definition of the options."""
    q_len, kv_len = int(batch.q_lens[request]), int(batch.kv_lens[request])
    row = np.repeat(np.arange(q_len), batch.group)[:, None] + kv_len - q_len
    token = np.arange(kv_len)[None]
    seen = token // batch.chunk == np.maximum(row, 0) // batch.chunk
    if batch.causal:
        seen &= token <= row
    if batch.window_left >= 0:
        seen &= token >= row - batch.window_left
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_rows_have_the_tokens_of_their_chunk(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, cutting = random_case(rng)
    count = min(len(batch.q_lens), 5)
    batch = dataclasses.replace(
        batch,
        q_lens=rng.integers(0, 90, count),
        kv_lens=rng.integers(0, 400, count),
        has_custom_mask=False,
        has_mask_tiles=False,
        chunk=int(rng.choice([1, 7, 16, 64, 100, 1000, 2**30 - 1])),
    )
    if rng.random() < 0.5:
        cutting = dataclasses.replace(cutting, ns_per_merge=2000.0, min_piece_tokens=16)
    planned = plan(batch, cutting)  # within the sizes that fp_plan_bounds promises
    for request in range(count):
        for kv_head in (0, batch.num_kv_heads - 1):
            found = coverage(planned, request, kv_head)
            assert (found == expected(batch, request)).all(), request
    assert (planned.items["kv_begin"] % batch.chunk == 0)[planned.items["partial_row"] < 0].all()


def runs_of(batch: Batch) -> np.ndarray:
    """What `chunk` says as runs of rows (fp_problem.row_runs), and the request of each."""
    found = []
    for request, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        chunks = np.maximum(np.arange(q_len) + kv_len - q_len, 0) // batch.chunk
        for chunk, rows in zip(*np.unique(chunks, return_counts=True), strict=True):
            found.append((rows, min(chunk * batch.chunk, kv_len), min((chunk + 1) * batch.chunk, kv_len), request))
    return np.array(found, np.int32).reshape(-1, 4)


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_rows_are_planned_as_chunks_are(seed: int) -> None:
    """The plans are the same but for the index of items: that of a run is its number."""
    rng = np.random.default_rng(seed)
    batch, cutting = random_case(rng)
    count = min(len(batch.q_lens), 9)
    lens = {"q_lens": rng.integers(0, 90, count), "kv_lens": rng.integers(0, 400, count)}
    lens["least_rows"] = int(rng.choice([0, 0, 20]))  # a mixed batch's part with many rows
    batch = dataclasses.replace(
        batch, **lens, has_custom_mask=False, has_mask_tiles=False, chunk=int(rng.integers(1, 150))
    )
    chunks, runs = plan(batch, cutting), runs_of(batch)
    arrays = arrays_of(batch)
    problem = problem_of(dataclasses.replace(batch, chunk=0), arrays)
    table = np.ascontiguousarray(runs[:, :3])
    problem.row_runs, problem.num_row_runs = table.ctypes.data, len(table)
    capacity = bounds(batch, cutting)[0]
    status, buffer, result = call(problem, cutting, capacity)
    assert status == native.OK
    found = unpack(batch, cutting, buffer, result)
    assert found.header == chunks.header
    for mine, theirs in ((found.items, chunks.items), (found.merges, chunks.merges)):
        mine = mine.copy()
        mine["request"] = runs[mine["request"], 3]
        assert (mine == theirs).all()
    if len(runs) > 1:  # too few runs for the rows: refused, and nothing else is read
        problem.num_row_runs = len(table) - 1
        assert call(problem, cutting, capacity)[0] == native.BAD_LENGTHS


def test_a_decode_plan_has_an_item_a_request() -> None:
    """A context of any length costs the tokens of one chunk."""
    batch = Batch(np.ones(64, np.int64), np.arange(64) * 3000 + 1, chunk=8192)
    planned = plan(batch, Cutting())
    longest = max(int(n - (n - 1) // 8192 * 8192) for n in batch.kv_lens)
    items = planned.items
    assert (items["kv_end"] - items["kv_begin"]).max() <= longest
    assert (items["kv_begin"] >= (batch.kv_lens[items["request"]] - 1) // 8192 * 8192).all()


def test_the_device_plans_the_same() -> None:
    batch = Batch(np.ones(9, np.int64), np.array([100, 5000, 0, 7, 300, 2, 2, 9000, 1]), 32, 8, chunk=256)
    tables = TableBatch.of(batch, has_rows=False)
    for cutting in (Cutting(), Cutting(fixed_piece_tokens=512)):
        assert tables.tables("cpu").plan(cutting, None) == tables.host_plan(cutting)


def test_more_parts_than_a_plan_can_have() -> None:
    batch = Batch(np.array([2**23]), np.array([2**23]), 1, 1, chunk=1)
    arrays = arrays_of(batch)
    status, _, result = call(problem_of(batch, arrays), Cutting(), 1 << 12)
    assert status == native.BAD_LENGTHS
    says = "qo_indptr[1]=8388608 ends rows in more than 4194304 chunks"
    assert says in str(complaint(result, PAGED, 16))


def test_bounds_count_the_parts() -> None:
    batch = Batch(np.array([1000, 3]), np.array([1000, 900]), 8, 8, causal=True)
    whole, cut = (bounds(dataclasses.replace(batch, chunk=chunk), Cutting())[0] for chunk in (0, 10))
    assert cut > whole


def test_what_is_refused() -> None:
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    ints = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 2], [0, 1], [0], [3])]
    for chunk in (-1, 2.5, "8"):
        with pytest.raises(PlanError, match="chunk="):
            wrapper.plan(*ints, 4, 4, 64, 16, chunk=chunk)
    masks = {"custom_mask": torch.ones(6, dtype=torch.bool)}, {"variant": flashpage.Variant(mask="kv_idx != 1")}
    for mask in masks:
        with pytest.raises(CapabilityError, match="chunk=8 is not supported with a mask"):
            wrapper.plan(*ints, 4, 4, 64, 16, chunk=8, **mask)
    tables = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(CapabilityError, match="plan_on_device cannot cut the rows of a request"):
        wrapper.plan_on_device(ints[0], torch.tensor([30]), tables, 4, 4, 64, 16, max_rows=2, chunk=8)
    for chunk in (None, 0, 2**30, 2**31 - 1):
        wrapper.plan(*ints, 4, 4, 64, 16, chunk=chunk)
        assert wrapper._options.chunk == 0
