"""The class of a batch is that of the first row of the table that fits it, computed here row by row and request by
request (csrc/plan/contexts.h sums up all sizes of tiles at once)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import choose, devices
from flashpage.kernels.context_classes import CLASSES, ContextClass
from flashpage.kernels.context_lengths import ContextLengths
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem
from flashpage.variants import builtin

BF16 = DType.BFLOAT16
PAGED = Options("paged", 32, 8, 128, 128, 16, BF16, BF16, BF16, causal=True)


def expected(table: native.ContextTable, rows: np.ndarray, tokens: np.ndarray) -> ContextClass:
    rows, tokens = rows[rows > 0], tokens[rows > 0]
    if not len(rows):
        return ContextClass.USUAL
    seen = np.maximum(tokens - table.hidden * rows, 0)
    mean = math.sqrt((rows * seen).sum() / rows.sum() * seen.mean())
    for row in table.rows[: table.count]:
        fits = rows.sum() <= row.most_rows and (rows**2).sum() / rows.sum() >= row.least_rows_of_request
        fits &= row.least_tokens <= mean <= row.most_tokens and (rows.min() == rows.max() or not row.has_equal_rows)
        if fits and (not row.tile or padding(table, row, rows, tokens) <= row.most_padding):
            return CLASSES[row.contexts]
    return ContextClass.USUAL


def padding(table: native.ContextTable, row: native.ContextRow, rows: np.ndarray, tokens: np.ndarray) -> float:
    packed = rows * table.group
    other, usual = (
        (packed * (tokens - table.hidden * rows) + (-packed % tile) * tokens).sum()
        for tile in (row.tile, row.usual_tile)
    )
    return float(other / usual) if usual > 0 else 1.0


@pytest.mark.parametrize(
    "changed",
    [{}, {"causal": False}, {"head_dim_qk": 64, "head_dim_vo": 64}, {"window_left": 255}, {"num_q_heads": 40}],
    ids=str,
)
def test_the_first_row_that_fits(changed: dict[str, Any]) -> None:
    contexts = ContextLengths(dataclasses.replace(PAGED, **changed), devices.H200)
    rng, found = np.random.default_rng(1), set()
    for _ in range(400):
        count, most = int(rng.choice([1, 4, 60])), int(rng.choice([30, 60, 200, 3000]))
        rows = rng.choice(rng.integers(0, most, 3), count)  # with neighbours that are equal
        tokens = rows + rng.integers(0, int(rng.choice([300, 4000, 40000])), count)
        wanted = expected(contexts.table, rows, tokens)
        assert contexts.of(rows.tolist(), tokens.tolist()) is wanted, (rows, tokens)
        found.add(wanted)
    assert len(found) > 2


@pytest.mark.parametrize("has_soft_cap", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (112, 112), (64, 128), (128, 72), (128, 128)], ids=str)
def test_rows_name_the_tiles_that_kernels_have(dims: tuple[int, int], has_soft_cap: bool) -> None:
    """Otherwise a batch would change its class for the kernel that it has."""
    options = dataclasses.replace(PAGED, head_dim_qk=dims[0], head_dim_vo=dims[1], has_soft_cap=has_soft_cap)
    table = ContextLengths(options, devices.H200).table
    variant = builtin(soft_cap=30.0 if has_soft_cap else None).spec

    def tile_of(contexts: ContextClass) -> int:
        problem = Problem(options, choose.MANY_ROWS, contexts=contexts)
        return choose.choose_for_card(problem, devices.H200, variant).spec.rows

    usual = tile_of(ContextClass.USUAL)
    others = [row for row in table.rows[: table.count] if CLASSES[row.contexts] is ContextClass.OTHER_HEIGHT]
    for row in others:
        assert row.tile == tile_of(ContextClass.OTHER_HEIGHT) != usual
        assert row.usual_tile in (usual, 2 * usual)  # or pairs of them
