"""Properties of the planner over thousands of random batches: a sweep with a fixed seed, and hypothesis for corners."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_batches import Batch, Cutting, plan
from planner_checks import check, check_balance
from random_batches import random_case

# `make fuzz` and CI look at many cases. The first 60 of the other seeds have none that takes seconds.
CASES_OF_A_SWEEP, SEEDS = (500, range(16)) if "FUZZ_MINUTES" in os.environ else (60, range(16, 32))


@pytest.mark.parametrize("seed", SEEDS)
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
    """Lengths around every edge: tile, piece, page, window."""
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
        heads_on_axis=draw(st.booleans()),
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
