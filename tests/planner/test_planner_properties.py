"""Properties of the planner over thousands of random batches: a fixed-seed sweep, and hypothesis for corner cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_batches import RUNS, TEAMS, Batch, Cutting, plan
from planner_checks import check, check_balance

CASES_OF_A_SWEEP = 500


def random_kv_lens(rng: np.random.Generator, count: int) -> np.ndarray:
    kind = rng.integers(0, 5)
    lens = (
        rng.lognormal(6, 1.5, count),
        np.full(count, rng.integers(1, 5000)),
        np.where(np.arange(count) == count // 2, 100_000, rng.integers(1, 300)),
        rng.integers(0, 3000, count),
        rng.zipf(1.5, count).clip(max=50_000),
    )[kind]
    return lens.astype(np.int64) * (rng.random(count) > 0.1)


def random_case(rng: np.random.Generator) -> tuple[Batch, Cutting]:
    count = int(rng.integers(0, 50))
    num_kv_heads, group = int(rng.choice([1, 2, 3, 4, 5, 6, 8, 12])), int(rng.choice([1, 2, 3, 4, 7, 8, 40]))
    decode = rng.random() < 0.5
    q_lens = (
        np.ones(count, np.int64) if decode else rng.choice([0, 1, 1, 2, 5, 17, 64, 129, 300], count).astype(np.int64)
    )
    batch = Batch(
        *(q_lens, random_kv_lens(rng, count), num_kv_heads * group, num_kv_heads),
        page_size=int(rng.choice([0, 1, 2, 16, 64, 256])),
        causal=bool(rng.random() < 0.5),
        window_left=int(rng.choice([-1, -1, 0, 5, 100, 1000])),
        has_custom_mask=bool(rng.random() < 0.2),
        has_mask_tiles=bool(rng.random() < 0.2),
        q_start=int(rng.integers(0, 3)),
        kv_start=int(rng.integers(0, 3)),
    )
    cutting = Cutting(
        num_ctas=int(rng.integers(1, 265)),
        walk=int(rng.integers(0, 2)),
        tile_q=int(rng.choice([16, 32, 64, 128])),
        tile_kv=int(rng.choice([16, 48, 64, 128])),
        ns_per_token=float(rng.choice([0, 1, 4, 12, 28])),
        ns_per_unit=float(rng.choice([0, 200, 400, 1500])),
        few_rows_cost=float(rng.choice([1.0, 0.5])),
        ns_per_piece=float(rng.choice([0, 1500, 5000])),
        min_piece_tokens=int(rng.choice([1, 128, 256])),
        max_pieces=int(rng.choice([0, 0, 0, 2, 8, 32])),
        fixed_piece_tokens=int(rng.choice([0, 0, 0, 0, -1, 100, 512])),
        merge_rows=int(rng.choice([1, 8, 64])),
        wave_tokens=int(rng.choice([0, 0, 3000, 32768])),
    )
    return batch, cutting


@pytest.mark.parametrize("seed", range(16))
def test_sweep(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for number in range(CASES_OF_A_SWEEP):
        batch, cutting = random_case(rng)
        batch.least_rows, batch.most_rows = int(rng.choice([0, 0, 0, 2, 18])), int(rng.choice([0, 0, 0, 17, 64]))
        form = {"dtype": rng.choice([np.int32, np.int64]), "stride": int(rng.integers(1, 3))}
        try:
            planned = plan(batch, cutting, use_kv_lens=bool(rng.random() < 0.5), **form)
            pieces = check(planned)
            if cutting.fixed_piece_tokens <= 0:
                check_balance(planned, pieces)
        except AssertionError as error:
            raise AssertionError(f"case {number}: {batch}, {cutting}: {error}") from error


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[Batch, Cutting]:
    """Lengths around every edge there is: tile, piece, page, window."""
    edges = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 2000])
    count = draw(st.integers(0, 6))
    lens = st.lists(edges, min_size=count, max_size=count)
    heads = draw(st.sampled_from([1, 2, 3, 6, 8]))
    batch = Batch(
        *(
            np.array(draw(lens), np.int64),
            np.array(draw(lens), np.int64),
            heads * draw(st.sampled_from([1, 3, 4])),
            heads,
        ),
        page_size=draw(st.sampled_from([0, 1, 16])),
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, 0, 1, 16, 127])),
    )
    cutting = Cutting(
        num_ctas=draw(st.integers(1, 40)),
        walk=draw(st.sampled_from([TEAMS, RUNS])),
        tile_q=draw(st.sampled_from([1, 16, 64])),
        tile_kv=draw(st.sampled_from([1, 16, 64])),
        few_rows_cost=draw(st.sampled_from([1.0, 0.5])),
        ns_per_piece=draw(st.sampled_from([0.0, 10.0, 1500.0])),
        min_piece_tokens=draw(st.sampled_from([0, 1, 64])),
        max_pieces=draw(st.sampled_from([0, 1, 3])),
        fixed_piece_tokens=draw(st.sampled_from([0, 0, 0, 64, -1])),
        merge_rows=draw(st.sampled_from([1, 8])),
        wave_tokens=draw(st.sampled_from([0, 0, 40, 1000])),
    )
    return batch, cutting


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(small_cases())
def test_small_cases(case: tuple[Batch, Cutting]) -> None:
    batch, cutting = case
    planned = plan(batch, cutting)
    pieces = check(planned)
    if cutting.fixed_piece_tokens <= 0:
        check_balance(planned, pieces)
