"""Whole units, dealt longest first: all units, or a tail after runs (include/flashpage/plan/whole_units.h)."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from planner_batches import Batch, Cutting, Planned, bounds, plan
from planner_checks import all_units, check, loads, ns_per_token
from random_batches import random_case
from table_plans import TableBatch

from flashpage.plan import plan_lengths

HOPPER = Cutting(
    num_ctas=132,
    heads_on_axis=True,
    tile_q=128,
    tile_kv=160,
    ns_per_token=12.19,
    ns_per_unit=3456.0,
    few_rows_cost=0.75,
    ns_per_piece=2500.0,
    ns_per_merge=4000.0,
    min_piece_tokens=256,
    merge_rows=64,
    wave_tokens=32768,
)
ALWAYS = dataclasses.replace(HOPPER, ns_per_merge=1e9)  # deals whenever there are units to deal
ROUNDED = 1e-6  # costs are 32-bit floats
CUT = dataclasses.replace(HOPPER, ns_per_merge=0.0)


def rows(*q_lens: int, context: int = 0, heads: tuple[int, int] = (32, 8), **values: Any) -> Batch:
    """Prefills over their own tokens and a context."""
    lens = np.array(q_lens, np.int64)
    return Batch(lens, lens + context, *heads, **{"causal": True, **values})


def is_dealt(planned: Planned) -> bool:
    """Whether all units are dealt, without runs before them."""
    return bool((planned.items["num_units"] == 1).all() and (planned.items["partial_row"] < 0).all())


def planned(batch: Batch, cutting: Cutting = HOPPER) -> Planned:
    """A checked plan, in a buffer of exactly the promised size. Dealt units are checked for the promises of dealing."""
    found = plan(batch, cutting)
    pieces = check(found)
    cut = plan(batch, dataclasses.replace(cutting, ns_per_merge=0.0))
    if found.items.tobytes() == cut.items.tobytes() and found.ctas.tobytes() == cut.ctas.tobytes():
        return found
    assert found.result.num_merges == found.result.num_partial_rows == 0 and cut.result.num_merges > 0
    assert found.header["cluster_size"] == 0
    load = loads(found, pieces)
    # If the group does not divide the row tile, the axis knows a unit's tokens to within one.
    inexact = cutting.ns_per_token * np.bincount(pieces["cta"]).max() if cutting.tile_q % batch.group else 0.0
    assert load.max() == pytest.approx(found.result.cost_max_ns, rel=ROUNDED, abs=inexact)
    assert load.sum() == pytest.approx(found.result.cost_total_ns, rel=ROUNDED, abs=inexact * cutting.num_ctas)
    assert found.result.cost_max_ns < cut.result.cost_max_ns + cutting.ns_per_merge
    assert any(ends_in(tail, found, pieces, inexact) for tail in tails(found, pieces))
    return found


def tails(found: Planned, pieces: dict[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Every set of units that may have been dealt: the last 1, 2, ... units on the axis, up to four for each lane."""
    members = int(found.ctas["place"].max()) + 1
    copy = pieces["kv_head"] % (found.batch.num_kv_heads // members)
    code = (pieces["request"].astype(np.int64) << 36) + (copy.astype(np.int64) << 24) + pieces["tile"]
    place = np.unique(code, return_inverse=True)[1]
    from_end = place.max() + 1 - place
    for units in range(1, 4 * found.cutting.num_ctas // members + 1):
        yield from_end <= units


def ends_in(tail: np.ndarray, found: Planned, pieces: dict[str, np.ndarray], inexact: float = 0.0) -> bool:
    """A CTA's tail is last, with one unit in each item, longest first, and no other CTA had less when it got the last
    one. Costs that differ by less than 1/255 of the longest count as equal."""
    if (found.items["num_units"][pieces["item"][tail]] != 1).any():
        return False
    load, order = loads(found, pieces), np.argsort(pieces["item"], kind="stable")
    cta, cost, tail = pieces["cta"][order], pieces["cost"][order], tail[order]
    order = np.argsort(cta, kind="stable")
    cta, cost, tail = cta[order], cost[order], tail[order]
    alike = 1.0001 * cost[tail].max() / 255
    follows = (cta[1:] == cta[:-1]) & tail[:-1]
    is_last = np.append(cta[1:] != cta[:-1], True) & tail
    before = load[cta[is_last]] - cost[is_last]
    return bool(
        tail[1:][follows].all()
        and (cost[1:][follows] <= cost[:-1][follows] + alike).all()
        and (before <= load.min() * (1 + ROUNDED) + 2 * inexact).all()
    )


def longest_first(costs: np.ndarray, ctas: list[float]) -> np.ndarray:
    """Sorted loads of the CTAs if each unit goes to the CTA with the least. `ctas`: their loads before."""
    heapq.heapify(ctas)
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(ctas, ctas[0] + cost)
    return np.sort(ctas)


@pytest.mark.parametrize(
    ("batch", "cutting"),
    [
        (rows(1024), HOPPER),
        (rows(2048), HOPPER),
        (rows(1024, 1024), HOPPER),
        (rows(1500, causal=False), HOPPER),
        (rows(1900, window_left=1200), HOPPER),
        (rows(700, 300), ALWAYS),
        (rows(1024, heads=(32, 32)), HOPPER),
        (rows(2048, heads=(40, 5)), dataclasses.replace(ALWAYS, num_ctas=264)),  # one list for each CTA
        (
            rows(300, 200, context=500, heads=(12, 6)),
            dataclasses.replace(ALWAYS, num_ctas=15),
        ),  # three CTAs for each list
        (rows(2048, heads=(32, 8)), dataclasses.replace(HOPPER, num_ctas=66, tile_q=256)),  # pairs of CTAs
    ],
)
def test_loads_are_those_of_longest_first(batch: Batch, cutting: Cutting) -> None:
    found = planned(batch, cutting)
    load = loads(found, check(found))
    assert is_dealt(found) and plan(batch, dataclasses.replace(cutting, ns_per_merge=0.0)).result.num_merges > 0
    units = all_units(batch, cutting.tile_q)
    costs = cutting.ns_per_unit + ns_per_token(batch, cutting, units["request"]) * (units["end"] - units["begin"])
    assert np.sort(load) == pytest.approx(longest_first(costs, [0.0] * cutting.num_ctas), rel=ROUNDED)


PAIRS = dataclasses.replace(HOPPER, num_ctas=66, tile_q=256)


@pytest.mark.parametrize(
    ("batch", "cutting", "members", "waves", "units"),
    [
        (rows(*[1024] * 4), HOPPER, 4, 1, 96),
        (rows(*[1024] * 4), PAIRS, 2, 1, 80),
        (rows(2048, 2048), HOPPER, 4, 1, 128),
        (rows(4096), HOPPER, 4, 1, 128),  # four units for each CTA, after a run
        (rows(*[1024] * 16), HOPPER, 4, 4, 96),
        (rows(*[4096] * 4), HOPPER, 4, 4, 128),
        (rows(*[4096] * 4), PAIRS, 2, 4, 128),
        (rows(*[700] * 9, 0, heads=(40, 8)), HOPPER, 4, 2, 84),  # the group does not divide the row tile
        (rows(*[1024] * 16, heads=(32, 32)), HOPPER, 4, 8, 72),
        (rows(1000, 1000, 1000, heads=(28, 7)), HOPPER, 1, 1, 288),  # one list for each CTA
    ],
)
def test_tails(batch: Batch, cutting: Cutting, members: int, waves: int, units: int) -> None:
    """The tail is in the last KV heads, at least two units for each CTA. The runs before it differ by less than two of
    the longest units, in as many items as waves and requests allow."""
    found = planned(batch, cutting)
    pieces, lanes = check(found), cutting.num_ctas // members
    assert not is_dealt(found) and int(found.ctas["place"].max()) + 1 == members
    tail = next(tail for tail in tails(found, pieces) if tail.sum() == units * members)
    assert ends_in(tail, found, pieces, 2 * cutting.ns_per_token * len(batch.q_lens))
    assert len(found.items) <= units + len(batch.q_lens) + waves * lanes
    before = np.bincount(pieces["cta"][~tail], pieces["cost"][~tail], cutting.num_ctas)
    assert before.max() - before.min() < 2 * pieces["cost"].max()
    dealt = longest_first(pieces["cost"][tail], before.tolist())
    assert np.sort(loads(found, pieces)) == pytest.approx(dealt, rel=0.002 if cutting.tile_q % batch.group else ROUNDED)


@pytest.mark.parametrize(
    ("why", "batch", "cutting", "takes"),
    [
        ("the case that dealing is made for", rows(1024), {}, True),
        ("four units for each CTA", rows(2112), {}, True),
        ("more than four, so runs come first", rows(2113), {}, True),
        ("merging is cheap compared with the work", rows(*[1024] * 256), {}, False),
        ("the tail's units are long", rows(8192), {}, False),
        ("more than four units a CTA in the last KV head", rows(20000), {}, False),
        ("merging costs no more than its pieces", rows(1024), {"ns_per_merge": 0.0}, False),
        ("nothing is cut", rows(512), {}, None),
        ("units for half of the CTAs", rows(256, context=8192), {}, False),
        ("waves", rows(2048, heads=(32, 32)), {}, True),
        ("all heads in one wave", rows(2048, heads=(32, 32)), {"wave_tokens": 1 << 20}, True),
        ("a fixed split", rows(1024), {"fixed_piece_tokens": 320}, False),
        ("splitting is off", rows(1024), {"fixed_piece_tokens": -1}, None),
        ("teams", rows(1024), {"heads_on_axis": False}, False),
    ],
)
def test_where_it_is_taken(why: str, batch: Batch, cutting: dict[str, Any], takes: bool | None) -> None:
    """True: units are dealt. False: the plan is as if merging were free. None: that plan has no merges either."""
    how = dataclasses.replace(HOPPER, **cutting)
    found, other = planned(batch, how), plan(batch, dataclasses.replace(how, ns_per_merge=0.0))
    assert bool(other.result.num_merges) == (takes is not None)
    is_other = found.items.tobytes() == other.items.tobytes() and (found.ctas == other.ctas).all()
    assert is_other != bool(takes), why
    assert found.result.num_merges == 0 or not takes


def test_what_a_merge_must_cost() -> None:
    """Two plans that are known, and the price of a merge at which the other one becomes better."""
    batch = rows(800, 1500, heads=(8, 2))
    cut, whole = plan(batch, CUT), plan(batch, ALWAYS)
    difference = whole.result.cost_max_ns - cut.result.cost_max_ns
    assert is_dealt(whole) and not is_dealt(cut) and difference > 500
    for price, expected in ((difference - 1, cut), (difference + 1, whole)):
        found = plan(batch, dataclasses.replace(HOPPER, ns_per_merge=price))
        assert found.items.tobytes() == expected.items.tobytes()


def test_any_lengths() -> None:
    """Random batches: planned() checks those that are dealt."""
    dealt = tails = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        for number in range(600):
            batch, cutting = random_case(rng)
            few = slice(int(rng.integers(0, 9)) if number % 3 else None)
            batch.q_lens, batch.kv_lens = batch.q_lens[few], batch.kv_lens[few]
            cutting.heads_on_axis, cutting.fixed_piece_tokens = True, 0
            cutting.ns_per_merge = float(rng.choice([1.0, 4000.0, 1e9]))
            cut = plan(batch, dataclasses.replace(cutting, ns_per_merge=0.0))
            found = planned(batch, cutting)
            if cut.result.num_merges > found.result.num_merges:
                dealt, tails = dealt + is_dealt(found), tails + (not is_dealt(found))
    assert dealt > 60 and tails > 20


@pytest.mark.parametrize(
    ("rows_of_each", "context", "are_whole"),
    [
        ((512,), 4096, True),
        ((512,), 16384, True),
        ((512, 512), 2048, True),
        ((200,), 16384, False),
        ((2048,), 8192, False),
    ],
)
def test_few_units_need_no_waves(rows_of_each: tuple[int, ...], context: int, are_whole: bool) -> None:
    """At most two units for each CTA need no waves: 16 x 8, and 2 x 16 x 8. 56 units leave CTAs idle; 512 are many."""
    batch, cutting = rows(*rows_of_each, context=context), dataclasses.replace(HOPPER, ns_per_merge=10_000.0)
    found = planned(batch, cutting)
    assert is_dealt(found) is are_whole is (found.result.num_merges == 0)
    assert (len(all_units(batch, 128)["tile"]) <= 2 * 132) is (rows_of_each[0] < 2048)
    one_wave = planned(batch, dataclasses.replace(cutting, wave_tokens=0))
    assert not are_whole or found.items.tobytes() == one_wave.items.tobytes()


@pytest.mark.parametrize(
    ("lens", "heads"),
    [((2112,), (32, 8)), ((16896,), (4, 4)), ((8448,), (8, 1)), ((2816, 2816, 2816), (8, 1))],
)
def test_bounds_have_room(lens: tuple[int, ...], heads: tuple[int, int]) -> None:
    """Bounds for as many units as may be dealt: planned() uses exactly that much memory."""
    batch, cutting = rows(*lens, heads=heads), dataclasses.replace(ALWAYS, wave_tokens=0)
    found = planned(batch, cutting)
    assert is_dealt(found) and len(all_units(batch, 128)["tile"]) == 4 * 132
    assert found.result.used_bytes <= bounds(batch, cutting)[0]


def test_a_card_cuts_as_ever() -> None:
    """Plans from lengths on the device do not deal units."""
    tables = TableBatch.of(rows(1024))
    assert tables.tables("cpu").plan(HOPPER) == tables.host_plan(CUT) != tables.host_plan(HOPPER)


def test_the_plan_says_so() -> None:
    plan = plan_lengths([1024], [1024], page_size=0)
    text = plan.explain()
    assert "unit by itself, the longest ones first" in text and "no unit is cut: merging would take 10 us" in text
    assert "256 units in 64 items" in text and "132 of 132 CTAs work" in text
    assert plan.cta_loads().max() == pytest.approx(plan.result.cost_max_ns)
    assert len(plan.work_items()) == 256 and len(plan.segments()) == 256
    assert len(plan.picture(color=False, max_rows=200).splitlines()) == 133
    text = plan_lengths([1024] * 16, [1024] * 16, page_size=0).explain()
    assert "takes a run of (KV head, row tile) units, then some of the last ones, the longest first" in text
    assert "no unit is cut: merging would take 10 us" in text
    for other in (plan_lengths([32768], [32768]), plan_lengths([1024], [1024], backend="cpu", num_ctas=132)):
        assert "each CTA takes a run of" in other.explain() and other.result.num_merges > 0


@pytest.mark.parametrize(("q_len", "cuts"), [(1024, False), (832, False), (768, True), (512, True)])
def test_units_that_are_claimed_are_whole_where_they_are_many(q_len: int, cuts: bool) -> None:
    """Three units for two CTAs: the CTA that is done first claims the third."""
    batch = rows(q_len, context=4 * q_len)
    found = plan(batch, dataclasses.replace(CUT, are_claimed=1))
    check(found)
    assert (found.result.num_merges > 0, found.result.num_partial_rows > 0) == (cuts, cuts)
    assert plan(batch, CUT).result.num_merges > 0
    never_dealt = plan(batch, dataclasses.replace(ALWAYS, are_claimed=1))
    assert never_dealt.items.tobytes() == found.items.tobytes()


def test_an_explanation_says_that_units_are_claimed() -> None:
    claimed = plan_lengths([1024], [1024])
    claimed.schedule.are_claimed = 1
    text = claimed.explain()
    assert "units: CTAs claim (KV head, row tile) units" in text and "split: no unit is cut: a CTA that is done" in text
