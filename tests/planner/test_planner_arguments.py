"""The planner's arguments: index arrays in every form, and every kind of wrong length."""

from __future__ import annotations

import numpy as np
import pytest
from planner_batches import Batch, Cutting, arrays_of, bounds, call, plan, problem_of
from planner_checks import check

from flashpage import native

DECODE = Cutting()
RAGGED_LENS = np.array([0, 1, 40, 7, 1000, 16, 17, 300, 5, 64]), np.array([9, 0, 2000, 7, 1000, 90, 17, 300, 5, 6000])


def ones(count: int) -> np.ndarray:
    return np.ones(count, np.int64)


FORMS = [
    {"dtype": np.int64},
    {"dtype": np.int32, "stride": 3},
    {"dtype": np.int64, "stride": 2},
    {"dtype": np.int32, "use_kv_lens": True},
    {"dtype": np.int64, "stride": 2, "use_kv_lens": True},
]


@pytest.mark.parametrize("form", FORMS)
def test_index_arrays_of_any_form_plan_alike(form: dict[str, object]) -> None:
    batch = Batch(*RAGGED_LENS, causal=True, has_custom_mask=True, q_start=11, kv_start=5)
    plain, other = plan(batch, DECODE), plan(batch, DECODE, **form)
    check(other)
    for part in ("ctas", "items", "merges"):
        assert (getattr(plain, part) == getattr(other, part)).all()


def test_arrays_of_mixed_types() -> None:
    batch = Batch(*RAGGED_LENS)
    arrays = arrays_of(batch)
    expected = plan(batch, DECODE)
    arrays["kv_indptr"] = arrays["kv_indptr"].astype(np.int64)
    status, _buffer, result = call(problem_of(batch, arrays), DECODE, bounds(batch, DECODE)[0])
    assert status == native.OK and result.used_bytes == expected.result.used_bytes


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_without_q_indptr(rows: int) -> None:
    batch = Batch(np.full(10, rows), RAGGED_LENS[1])
    arrays = arrays_of(batch) | {"q_indptr": None}
    problem = problem_of(batch, arrays)
    problem.q_len_per_request = rows
    capacity = bounds(batch, DECODE)[0]
    status, buffer, result = call(problem, DECODE, capacity)
    assert status == native.OK
    _, expected, _ = call(problem_of(batch, arrays_of(batch)), DECODE, capacity)
    assert (buffer[: result.used_bytes] == expected[: result.used_bytes]).all()


def test_pages_beyond_kv_lens_are_allowed() -> None:
    """Engines allocate pages in advance: kv_lens says how many tokens count."""
    batch = Batch(ones(4), np.array([100, 0, 33, 7]), page_size=16)
    arrays = arrays_of(batch, use_kv_lens=True)
    arrays["kv_indptr"] = np.arange(5, dtype=np.int32) * 50
    status, _buffer, result = call(problem_of(batch, arrays), DECODE, 1 << 20)
    assert status == native.OK and result.total_kv == 140 and result.total_pages == 200


def test_an_empty_batch() -> None:
    planned = plan(Batch(np.zeros(0, np.int64), np.zeros(0, np.int64)), DECODE, capacity=1 << 16)
    check(planned)
    assert planned.header["num_items"] == 0 and planned.header["num_ctas"] == 0


# ---------------------------------------------------------------- wrong lengths

GOOD = {"q_indptr": [0, 1, 3, 4], "kv_indptr": [0, 2, 2, 5], "last_page_len": [16, 0, 7]}
NOT_ZERO_FIRST, DECREASES, OUTSIDE, TOO_MANY, OVERFLOW = range(1, 6)
BIG = 2**31 - 1
FAULTS = [  # (changes, array, reason, index, value, limit)
    ({"q_indptr": [-1, 1, 3, 4]}, 1, NOT_ZERO_FIRST, 0, -1, 0),
    ({"kv_indptr": [-5, 2, 2, 5]}, 2, NOT_ZERO_FIRST, 0, -5, 0),
    ({"q_indptr": [0, 3, 1, 4]}, 1, DECREASES, 2, 1, 3),
    ({"kv_indptr": [0, 2, 1, 5]}, 2, DECREASES, 2, 1, 2),
    ({"kv_indptr": [0, 2, 2, 1]}, 2, DECREASES, 3, 1, 2),
    ({"last_page_len": [0, 0, 7]}, 3, OUTSIDE, 0, 0, 16),
    ({"last_page_len": [17, 0, 7]}, 3, OUTSIDE, 0, 17, 16),
    ({"last_page_len": [-1, 0, 7]}, 3, OUTSIDE, 0, -1, 16),
    ({"last_page_len": [16, 17, 7]}, 3, OUTSIDE, 1, 17, 16),
    ({"last_page_len": [16, -1, 7]}, 3, OUTSIDE, 1, -1, 16),
    ({"kv_lens": [32, 0, -1]}, 4, OUTSIDE, 2, -1, 48),
    ({"kv_lens": [33, 0, 48]}, 4, TOO_MANY, 0, 33, 32),
    ({"kv_lens": [32, 1, 48]}, 4, TOO_MANY, 1, 1, 0),
    ({"q_indptr": [0, 1, 3, BIG + 1]}, 1, OVERFLOW, 3, BIG + 1, BIG),
    ({"kv_indptr": [0, 2, 2, BIG + 1]}, 2, OVERFLOW, 3, BIG + 1, BIG),
    ({"kv_indptr": [0, 2, 2, 2**28]}, 2, OVERFLOW, 3, (2**28 - 3) * 16 + 7, BIG - 1024),  # tokens of one request
    ({"q_indptr": [0, 1, 3, 2**30]}, 1, OVERFLOW, 3, 2**30 - 3, BIG // 4),  # packed rows of one request
]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_wrong_lengths_are_reported(fault: tuple, dtype: type) -> None:
    changes, array, reason, index, value, limit = fault
    given = GOOD | changes
    if dtype is np.int32 and max(max(v) for v in given.values()) > BIG:
        pytest.skip("does not fit the type")
    arrays = {name: np.array(values, dtype) for name, values in given.items()}
    arrays.setdefault("kv_lens", None)
    problem = problem_of(Batch(ones(3), ones(3)), arrays)
    status, _, result = call(problem, DECODE, 1 << 20)
    assert status == native.BAD_LENGTHS
    found = (result.error_array, result.error_reason, result.error_index, result.error_value, result.error_limit)
    assert found == (array, reason, index, value, limit)
    assert str(value) in native.load().fp_last_error().decode()


def test_good_lengths_pass() -> None:
    """The arrays are valid without the changes of the faults above."""
    arrays = {name: np.array(values, np.int32) for name, values in GOOD.items()} | {"kv_lens": None}
    status, _, _ = call(problem_of(Batch(ones(3), ones(3)), arrays), DECODE, 1 << 20)
    assert status == native.OK


@pytest.mark.parametrize("change", [{"num_ctas": 0}, {"tile_q": 0}, {"merge_rows": 0}])
def test_a_schedule_that_cannot_be_is_refused(change: dict[str, int]) -> None:
    batch = Batch(ones(3), ones(3))
    status, _, _ = call(problem_of(batch, arrays_of(batch)), Cutting(**{**vars(DECODE), **change}), 1 << 20)
    assert status == native.INTERNAL


def test_heads_that_do_not_divide_are_refused() -> None:
    batch = Batch(ones(3), ones(3), 32, 5)
    status, _, _ = call(problem_of(batch, arrays_of(batch)), DECODE, 1 << 20)
    assert status == native.INTERNAL
