"""Plans from lengths on a device equal the host's byte by byte. The CPU runs the card's code, thread by thread."""

from __future__ import annotations

import dataclasses
from typing import Any

import native_build
import numpy as np
import pytest
import torch
from planner_batches import Batch, Cutting
from random_batches import random_case
from table_plans import TableBatch

from flashpage import jit, native
from flashpage.kernels.spec import KernelSpec
from flashpage.native import records


def kernel_of(device: str) -> Any:
    return None if device == "cpu" else jit.get_kernel(KernelSpec("plan"), device).handle


def random_tables(rng: np.random.Generator) -> tuple[TableBatch, Cutting]:
    batch, cutting = random_case(rng)
    while batch.page_size == 0 or batch.has_custom_mask or batch.has_mask_tiles:
        batch, cutting = random_case(rng)
    spare = int(rng.integers(0, 3)), int(rng.integers(0, 9))
    return TableBatch.of(dataclasses.replace(batch, kv_start=0), *spare), cutting


@pytest.mark.parametrize("seed", range(6))
def test_sweep(seed: int, device: str) -> None:
    rng, kernel = np.random.default_rng(seed), kernel_of(device)
    for number in range(100):
        tables, cutting = random_tables(rng)
        dtype = torch.int64 if rng.random() < 0.3 else torch.int32
        assert tables.tables(device, dtype).plan(cutting, kernel) == tables.host_plan(cutting), (
            f"case {number}: {tables}"
        )


@pytest.mark.parametrize("requests", [0, 1, 5, 40, 300, 1500])
def test_the_kernel_as_it_is(requests: int) -> None:
    """With warps and barriers, on the host: threads run in order from the first to the last."""
    rng, library = np.random.default_rng(requests), native_build.plan_kernel()
    q_lens = rng.choice([1, 1, 9, 200], requests).astype(np.int64)
    batch = Batch(q_lens, q_lens + rng.integers(0, 2000, requests), causal=True)
    for cutting in (DECODE, PREFILL, dataclasses.replace(DECODE, num_ctas=264, fixed_piece_tokens=320)):
        tables = TableBatch.of(batch)
        assert tables.tables("cpu").plan(cutting, 1, library) == tables.host_plan(cutting)
    one_row = TableBatch.of(
        dataclasses.replace(batch, q_lens=np.ones(requests, np.int64), num_kv_heads=1, num_q_heads=8)
    )
    assert one_row.tables("cpu").plan(DECODE, 1, library) == one_row.host_plan(DECODE)


@pytest.mark.parametrize("seed", range(4))
def test_lanes_in_integers(seed: int, device: str) -> None:
    """One KV head and a row for each request: the host fills lanes in integers, cards in fp64. Equal lengths, and such
    as leave room for shortest pieces alone, end lanes where both choices cost the same."""
    rng, kernel = np.random.default_rng(seed), kernel_of(device)
    for number in range(60):
        requests, mean = int(rng.integers(1, 300)), float(np.exp(rng.uniform(0.0, 9.0)))
        weights = (np.ones(requests), rng.lognormal(0.0, 1.0, requests), 1.0 / rng.permutation(range(1, requests + 1)))
        kv_lens = 1 + np.rint(mean * weights[number % 3]).astype(np.int64)
        window = int(rng.integers(0, 2000)) if number % 5 == 0 else -1
        batch = Batch(np.ones(requests, np.int64), kv_lens, 16, 1, causal=window >= 0, window_left=window)
        least, step = rng.choice([0.0, 2616.0, 9000.0]), int(rng.choice([32, 64, 128]))
        cutting = dataclasses.replace(
            LATENT, tile_kv=step, least_ns_of_unit=least, ns_per_unit=rng.choice([0.0, 5000.0])
        )
        tables = TableBatch.of(batch)
        assert tables.tables(device).plan(cutting, kernel) == tables.host_plan(cutting), f"case {number}: {batch}"


# Schedules of the kernels that engines use most: flashpage/kernels/tile.py.
DECODE = Cutting(
    num_ctas=132, heads_on_axis=False, tile_q=16, tile_kv=32, ns_per_token=14.84, ns_per_unit=500.0, ns_per_piece=1000.0
)
LATENT = dataclasses.replace(DECODE, tile_kv=64, ns_per_token=33.4, ns_per_unit=5000.0, ns_per_piece=1500.0)
PREFILL = Cutting(
    num_ctas=132,
    heads_on_axis=True,
    tile_q=128,
    tile_kv=128,
    ns_per_token=12.19,
    ns_per_unit=5000.0,
    few_rows_cost=0.65,
    ns_per_piece=2500.0,
    wave_tokens=32768,
)


@pytest.mark.parametrize("requests", [1, 17, 255, 256, 257, 1000, 5000])
@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
def test_decode(requests: int, num_kv_heads: int, device: str) -> None:
    """From one request to more than there are threads, and more than shared memory holds."""
    rng = np.random.default_rng(requests)
    kv_lens = np.minimum(rng.lognormal(6.5, 1.2, requests), 30000).astype(np.int64)
    batch = Batch(np.ones(requests, np.int64), kv_lens, 4 * num_kv_heads, num_kv_heads)
    tables = TableBatch.of(batch, has_rows=False)
    for cutting in (DECODE, dataclasses.replace(DECODE, fixed_piece_tokens=512)):
        assert tables.tables(device).plan(cutting, kernel_of(device)) == tables.host_plan(cutting)


@pytest.mark.parametrize("requests", [1, 64, 300])
def test_append(requests: int, device: str) -> None:
    rng = np.random.default_rng(requests)
    q_lens = rng.choice([1, 1, 1, 64, 700], requests).astype(np.int64)
    batch = Batch(q_lens, q_lens + rng.integers(0, 3000, requests), causal=True)
    for window_left, piece in ((-1, 0), (100, 0), (-1, 1024)):
        tables = TableBatch.of(dataclasses.replace(batch, window_left=window_left), spare_columns=1)
        cutting = dataclasses.replace(PREFILL, fixed_piece_tokens=piece)
        assert tables.tables(device).plan(cutting, kernel_of(device)) == tables.host_plan(cutting)


@pytest.mark.parametrize("requests", [1, 7, 8, 9, 60, 300])
def test_long_prefill_beside_decode(requests: int, device: str) -> None:
    """With 8 requests of one row, decodes have about enough work for one wave."""
    q_lens = np.append(np.ones(requests, np.int64), 256)
    tables = TableBatch.of(Batch(q_lens, np.full(requests + 1, 8192), causal=True))
    assert tables.tables(device).plan(PREFILL, kernel_of(device)) == tables.host_plan(PREFILL)


def test_the_number_of_requests_is_on_the_device_too(device: str) -> None:
    """Requests beyond the number have no items."""
    batch = Batch(np.ones(9, np.int64), np.array([100, 5000, 0, 7, 300, 2, 2, 9000, 1]), 32, 8)
    tables = TableBatch.of(batch, has_rows=False)
    for requests in (0, 1, 5, 9, 12, -3):
        found = tables.tables(device, requests=requests).plan(DECODE, kernel_of(device))
        assert found == tables.host_plan(DECODE, max(0, min(9, requests)))


def test_numbers_out_of_range_are_taken_to_its_ends(device: str) -> None:
    given = Batch(np.array([2, 3, 1]), np.array([-5, 10**6, 40]), 8, 2)
    clamped = dataclasses.replace(given, kv_lens=np.array([0, 64, 40]))
    tables = TableBatch(given, 4, 4)
    made = tables.tables(device)
    assert made.plan(PREFILL, kernel_of(device)) == TableBatch(clamped, 4, 4).host_plan(PREFILL)
    rows = torch.tensor([7, -7, 1], device=device)
    made.struct.table_rows, made.struct.rows_are_int64 = rows.data_ptr(), 1
    offsets = [int(item["kv_offset"]) for item in items_of(made.plan(PREFILL, kernel_of(device)))]
    assert set(offsets) == {2 * 4, 0, 1 * 4}
    made.q_indptr.copy_(torch.tensor([-1, 2, 1, 99]))  # type: ignore[union-attr]
    made.struct.max_rows = 6
    items = items_of(made.plan(PREFILL, kernel_of(device)))
    assert {tuple(item) for item in items[["request", "q_begin", "q_len"]].tolist()} == {(0, 0, 2), (2, 2, 4)}


@pytest.mark.parametrize("piece", [0, 128])
@pytest.mark.parametrize("ends", [[0, 600] * 12 + [0], [0, 300, 100, 600, -5, 7, 300, 600], [500, 0, 600, 600, 550]])
def test_rows_of_an_indptr_that_falls_are_no_requests_again(ends: list[int], piece: int, device: str) -> None:
    """An entry below one before it is taken as that one; else the rows were more than there is memory for."""
    count, lens = len(ends) - 1, np.full(len(ends) - 1, 900)
    rising = np.maximum.accumulate(np.clip(ends, 0, 600))
    given = TableBatch.of(Batch(np.full(count, 600 // count), lens, 8, 2))
    expected = TableBatch.of(Batch(np.diff(rising), lens, 8, 2, q_start=int(rising[0])))
    made = given.tables(device)
    made.struct.max_rows = 600
    made.q_indptr.copy_(torch.tensor(ends))  # type: ignore[union-attr]
    for cutting in (PREFILL, DECODE):
        cutting = dataclasses.replace(cutting, fixed_piece_tokens=piece)
        assert made.plan(cutting, kernel_of(device)) == expected.host_plan(cutting)
    if device == "cpu":
        assert made.plan(cutting, 1, native_build.plan_kernel()) == expected.host_plan(cutting)


def items_of(plan: bytes) -> np.ndarray:
    header = np.frombuffer(plan, records.PLAN_HEADER, 1)[0]
    return np.frombuffer(plan, records.WORK_ITEM, header["num_items"], header["items_offset"])


def test_memory_too_small_is_reported() -> None:
    tables = TableBatch.of(Batch(np.ones(3, np.int64), np.array([5, 600, 70]), 8, 2), has_rows=False).tables("cpu")
    size, _ = tables.bounds(DECODE)
    tables.bounds = lambda cutting: (size - 1, 1)  # type: ignore[method-assign]
    with pytest.raises(native.PlanError, match=f"needs {size} bytes but the int workspace has {size - 1}"):
        tables.plan(DECODE)
