"""Cascades in which the rows of one request of the last level have different tokens in the levels above."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from wrong_arguments import ints, workspace

import flashpage
from flashpage import CapabilityError

DIM, PAGE = 16, 4
Level = tuple[tuple[int, int], ...]  # (rows, tokens) of each request
BATCHES: tuple[tuple[Level, Level], ...] = (
    (((2, 4), (1, 0)), ((3, 1),)),
    (((2, 6), (3, 0), (1, 9)), ((4, 5), (2, 2))),
    (((1, 3), (3, 7), (1, 0), (2, 8)), ((5, 7), (2, 4))),
)


class Batch:
    """Rows, and the tokens of each level, whose pages follow each other."""

    def __init__(self, levels: tuple[Level, ...]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.levels, self.first_page, pages = levels, [], 0
        for level in levels:
            self.first_page.append(pages)
            pages += sum(-(-tokens // PAGE) for _, tokens in level)
        self.cache = torch.randn(pages, 2, PAGE, 1, DIM, generator=generator)
        self.q = torch.randn(sum(rows for rows, _ in levels[-1]), 1, DIM, generator=generator)

    def planned(self, **options: Any) -> Any:
        arrays: list[list[torch.Tensor]] = [[], [], [], []]
        for level, first in zip(self.levels, self.first_page, strict=True):
            pages = [-(-tokens // PAGE) for _, tokens in level]
            arrays[0].append(ints(0, *itertools.accumulate(rows for rows, _ in level)))
            arrays[1].append(ints(0, *itertools.accumulate(pages)))
            arrays[2].append(ints(*range(first, first + sum(pages))))
            arrays[3].append(ints(*((tokens - 1) % PAGE + 1 if tokens else 0 for _, tokens in level)))
        wrapper = flashpage.MultiLevelCascadeAttentionWrapper(len(self.levels), workspace())
        wrapper.plan(*arrays, 1, 1, DIM, PAGE, q_data_type=torch.float32, **options)
        return wrapper

    def expected(self, causal: bool, chunk: int, window_left: int) -> torch.Tensor:
        found = torch.zeros_like(self.q)
        for row in range(len(self.q)):
            tokens, position, upper = [], 0, 0
            for level, page in zip(self.levels, self.first_page, strict=True):
                end = 0
                for rows, count in level:
                    end += rows
                    if end - rows <= row < end:
                        tokens += [divmod(page * PAGE + i, PAGE) for i in range(count)]
                        position, upper = len(tokens) - end + row, len(tokens) - count
                    page += -(-count // PAGE)
            seen = [
                place
                for i, place in enumerate(tokens)
                if not (causal and i >= upper and i > position)
                and (not chunk or i // chunk == max(position, 0) // chunk)
                and (window_left < 0 or i >= position - window_left)
            ]
            if seen:
                k, v = self.cache[[p for p, _ in seen], :, [t for _, t in seen], 0].double().unbind(1)
                found[row] = (self.q[row].double() @ k.T / math.sqrt(DIM)).softmax(-1) @ v
        return found


@pytest.mark.parametrize("levels", BATCHES, ids=range(len(BATCHES)))
@pytest.mark.parametrize("window_left", [-1, 0, 3])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_rows_see_their_own_chunk(levels: tuple[Level, Level], causal: bool, window_left: int) -> None:
    batch, refused = Batch(levels), 0
    for chunk in (0, 1, 2, 3, 5, 8, 1000):
        options = {"causal": causal, "chunk": chunk, "window_left": window_left}
        try:
            found = batch.planned(**options).run(batch.q, batch.cache)
        except CapabilityError as error:
            assert "rows of one request of the last level have other tokens" in str(error)
            assert chunk and not causal and window_left >= 0
            refused += 1
            continue
        torch.testing.assert_close(found, batch.expected(**options), rtol=1e-4, atol=1e-5)
    assert refused <= 4  # chunks that cut no request are served
