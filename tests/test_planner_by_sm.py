"""Plans by SM: lists weighted by how fast the SM works that will claim them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from planner_batches import RUNS, TEAMS, Batch, Cutting, Planned, arrays_of, bounds, call, plan, problem_of
from planner_checks import check, check_balance, expand, loads
from test_planner_properties import random_case

from flashpage import host

SWEEP = 300


def speeds_of(classes: dict[float, int], seed: int = 0) -> np.ndarray:
    """Each speed as often as said, over CTAs in random order."""
    values = np.repeat(np.array(list(classes), np.float32), list(classes.values()))
    return np.random.default_rng(seed).permutation(values)


# GPCs of 18 and of 12 SMs; a GPC has its share of the memory's bandwidth.
H200 = speeds_of({1.0: 108, 1.125: 24})
CLASSES = {
    "two kinds of GPC": H200,
    "not a team's worth of slow ones": speeds_of({1.0: 3, 1.2: 129}),
    "three odd classes": speeds_of({0.7: 47, 1.0: 53, 1.3: 31}),
    "a far slower one": speeds_of({1.0: 131, 0.1: 1}),
    "all alike": np.full(132, 3.5, np.float32),
    "no two alike": (1.0 + np.arange(40) / 100).astype(np.float32),
    "one CTA": np.ones(1, np.float32),
}


def cutting(speeds: np.ndarray, **changes: object) -> Cutting:
    return Cutting(num_ctas=len(speeds), cta_speeds=speeds, **changes)


def decode(num_kv_heads: int = 8, count: int = 64, mean: int = 4096) -> Batch:
    values = np.random.default_rng(1).lognormal(0.0, 1.0, count)
    kv_lens = np.maximum(1, values / values.mean() * mean).astype(np.int64)
    return Batch(np.ones(count, np.int64), kv_lens, 4 * num_kv_heads, num_kv_heads)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("name", CLASSES)
def test_every_class(name: str, num_kv_heads: int) -> None:
    for batch in (decode(num_kv_heads), decode(num_kv_heads, 1, 100_000), decode(num_kv_heads, 500, 60)):
        planned = plan(batch, cutting(CLASSES[name]))
        assert planned.is_by_sm
        check_balance(planned, check(planned))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 32])
def test_all_end_together(num_kv_heads: int) -> None:
    """Three in a hundred over the mean, of times; those that work faster have more work."""
    planned = plan(decode(num_kv_heads, mean=20_000), cutting(H200))
    pieces = check(planned)
    time = loads(planned, pieces)
    work = np.bincount(pieces["cta"], pieces["cost"], len(H200))
    assert time.max() <= 1.03 * work.mean()
    assert work[H200 > 1].mean() == pytest.approx(1.125 * work[H200 == 1].mean(), rel=0.02)
    assert planned.result.cost_max_ns == pytest.approx(time.max(), rel=0.005)
    assert planned.result.cost_total_ns == pytest.approx(work.sum(), rel=0.005)


def test_members_of_a_team_are_equally_fast() -> None:
    """They share token ranges, so one that is slower would hold the others' up."""
    planned = plan(decode(), cutting(H200))
    check(planned)
    lists = planned.ctas[["begin", "end"]]
    teams = [np.flatnonzero(lists == team) for team in np.unique(lists)]
    assert sorted(map(len, teams)) == [4, *[8] * 16]
    assert all(len(set(H200[team])) == 1 for team in teams)
    seen = expand(planned)
    for team in teams:
        heads = [sorted(set(seen["kv_head"][seen["cta"] == cta])) for cta in team]
        assert sorted(sum(heads, [])) == list(range(8))


def test_short_plans_are_not_by_sm() -> None:
    batch = decode()
    plain = plan(batch, Cutting())
    mean = plain.result.cost_total_ns / 132
    short = plan(batch, cutting(H200, min_by_sm_ns=1.05 * mean))
    check(short)
    assert not short.is_by_sm and short.result.num_ctas == plain.result.num_ctas
    for name in ("ctas", "items", "merges"):
        assert (getattr(short, name) == getattr(plain, name)).all()
    long = plan(batch, cutting(H200, min_by_sm_ns=0.95 * mean))
    check(long)
    assert long.is_by_sm


def test_every_list_can_be_claimed_where_most_are_empty() -> None:
    """All CTAs are launched, whatever they have to do."""
    for lens in (np.zeros(0, np.int64), np.array([300])):
        planned = plan(Batch(np.ones_like(lens), lens), cutting(H200))
        check(planned)
        assert planned.result.num_ctas == len(planned.claims) - 1 == 132
        assert (planned.ctas["end"] > planned.ctas["begin"]).sum() == 8 * len(lens)


@pytest.mark.parametrize("fixed_piece_tokens", [512, -1])
def test_speeds_do_not_move_the_cuts_of_a_fixed_split(fixed_piece_tokens: int) -> None:
    batch = decode(5)
    by_sm = plan(batch, cutting(CLASSES["three odd classes"], fixed_piece_tokens=fixed_piece_tokens))
    plain = plan(batch, Cutting(num_ctas=131, fixed_piece_tokens=fixed_piece_tokens))
    names = ("request", "kv_head", "tile", "piece", "kv_begin", "kv_end")
    found = []
    for planned in (by_sm, plain):
        pieces = check(planned)
        order = np.lexsort([pieces[name] for name in names])
        found.append([pieces[name][order] for name in names])
    assert np.array_equal(*found) and by_sm.is_by_sm


def test_a_plan_is_a_function_of_its_speeds() -> None:
    """Made again after others on the same scratch memory, from a copy of the speeds."""
    first = plan(decode(), cutting(H200))
    plan(decode(), Cutting(num_ctas=200))
    plan(decode(), cutting(H200[::-1].copy()))
    again = plan(decode(), cutting(H200.copy()))
    for name in ("ctas", "items", "merges"):
        assert (getattr(first, name) == getattr(again, name)).all()


def test_a_workspace_too_small_names_the_size_with_the_claims() -> None:
    batch = decode()
    problem, how = problem_of(batch, arrays_of(batch)), cutting(H200)
    needed = call(problem, how, 1 << 20)[2].used_bytes
    assert call(problem, how, needed - 1)[0] == host.WORKSPACE_TOO_SMALL
    assert call(problem, how, needed)[0] == host.OK
    assert needed <= bounds(batch, how)[0]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (cutting(H200, walk=RUNS), "teams"),
        (cutting(np.array([1, 0, 1], np.float32)), r"cta_speeds[1] is 0"),
        (cutting(np.array([1, 1, np.nan], np.float32)), r"cta_speeds[2] is nan"),
        (cutting(np.array([np.inf], np.float32)), r"cta_speeds[0] is inf"),
    ],
)
def test_what_cannot_be_honoured_is_refused(how: Cutting, message: str) -> None:
    batch = decode()
    status, _, _ = call(problem_of(batch, arrays_of(batch)), how, 1 << 20)
    assert status == host.INTERNAL and message in host.last_error()


def random_speeds(rng: np.random.Generator) -> np.ndarray:
    if rng.random() < 0.3:
        return rng.permutation(H200)
    classes = rng.choice([0.5, 0.9, 1.0, 1.125, 1.3, 2.0], int(rng.integers(1, 5)), replace=False)
    return rng.choice(classes, int(rng.integers(1, 265))).astype(np.float32)


def by_sm_case(rng: np.random.Generator) -> tuple[Batch, Cutting]:
    batch, how = random_case(rng)
    speeds = random_speeds(rng)
    threshold = float(rng.choice([0.0, 0.0, 20_000.0]))
    return batch, dataclasses.replace(how, walk=TEAMS, num_ctas=len(speeds), cta_speeds=speeds, min_by_sm_ns=threshold)


@pytest.mark.parametrize("seed", range(8))
def test_sweep(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    kinds: set[bool] = set()
    for number in range(SWEEP):
        batch, how = by_sm_case(rng)
        try:
            planned: Planned = plan(batch, how)
            pieces = check(planned)
            kinds.add(planned.is_by_sm)
            if how.fixed_piece_tokens <= 0:
                check_balance(planned, pieces)
        except AssertionError as error:
            raise AssertionError(f"case {number}: {batch}, {how}: {error}") from error
    assert kinds == {True, False}
