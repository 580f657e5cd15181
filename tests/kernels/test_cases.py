"""Every row of the case table on every device, through the public wrappers, compared with the fp64 reference."""

from __future__ import annotations

import pytest
from cases import CASES, REDUCED, pairs
from cases.case import Case
from harness import run_case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, device: str, kernels: None) -> None:
    if not case.runs_on(device):
        pytest.skip("a row of the CPU" if case.runs_on("cpu") else "a row of cards")
    run_case(case, device)


def test_names_are_unique_and_reasons_given() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.why for case in CASES)
    assert 20 <= len(REDUCED) <= 73


def test_pairs_are_covered() -> None:
    """Every two values of two factors occur together in some row, except values that exclude each other."""
    rows = pairs.cover(pairs.AT_RUN, lambda row: True)
    names = list(pairs.AT_RUN)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for x in pairs.AT_RUN[a]:
                for y in pairs.AT_RUN[b]:
                    assert any(row[a] == x and row[b] == y for row in rows), (a, x, b, y)
