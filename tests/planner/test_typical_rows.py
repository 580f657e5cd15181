"""The rows of a request by which a batch's kernel is chosen: their average, or more if long requests have many rows."""

from __future__ import annotations

import pytest
from planner_batches import typical_rows


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "options", "expected"),
    [
        ([1] * 7 + [9], [318] * 7 + [38582], {"group": 4}, 16),  # 36 packed rows of nearly all tokens: a tile of 64
        ([1] * 18 + [20], [44] * 18 + [12869], {}, 32),
        ([1, 53], [641, 19873], {}, 64),
        ([1] * 61 + [187], [6] * 61 + [6454], {"group": 16}, 8),  # a tile of 128
        ([1] * 7 + [9], [38582] * 7 + [318], {"group": 4}, 2),  # many rows, but of few tokens: the average
        ([1] * 2 + [9], [38582] * 3, {"group": 4, "window_left": 20479}, 16),  # the rows' windows decide
        ([1] * 7 + [9], [318] * 7 + [4582], {"group": 4}, 2),  # too few tokens to save
        ([4] * 8, [100] * 8, {"group": 4}, 4),
        ([100, 300], [1000, 3000], {"group": 8}, 200),  # no larger tiles to choose from
        ([0, 0], [5, 5], {}, 1),
        ([3, 0], [0, 0], {}, 3),
    ],
)
def test_typical_rows(q_lens: list[int], kv_lens: list[int], options: dict[str, int], expected: int) -> None:
    assert typical_rows(q_lens, kv_lens, **options) == expected
