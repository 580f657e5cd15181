"""The planner, case by case: properties of its plans for batches that each have a reason."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from planner_batches import Batch, Cutting, Planned, arrays_of, bounds, call, plan, problem_of
from planner_checks import check, check_balance, expand, loads

from flashpage import native

DECODE = Cutting()
PREFILL = Cutting(
    heads_on_axis=True, tile_q=128, ns_per_token=12.0, ns_per_unit=1000.0, ns_per_piece=5000.0, min_piece_tokens=256
)


def cutting(base: Cutting, **changes: object) -> Cutting:
    return Cutting(**{**vars(base), **changes})


def ones(count: int) -> np.ndarray:
    return np.ones(count, np.int64)


def lognormal(count: int, mean: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).lognormal(0.0, 1.0, count)
    return np.maximum(1, values / values.mean() * mean).astype(np.int64)


def zipf(count: int, mean: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, count + 1)
    return np.maximum(1, weights / weights.sum() * mean * count).astype(np.int64)


def one_long(count: int, length: int, short: int) -> np.ndarray:
    values = np.full(count, short, np.int64)
    values[count // 3] = length
    return values


KV_LENS = {
    "no tokens at all": np.zeros(5, np.int64),
    "one token": np.array([1]),
    "around the tile": np.array([63, 64, 65, 0, 127, 128, 129]),
    "one long among a thousand short": one_long(1000, 200_000, 40),
    "one long alone": np.array([131072]),
    "zipf": zipf(64, 4096),
    "lognormal": lognormal(64, 4096),
    "equal": np.full(64, 4096),
    "empty requests between": np.where(np.arange(40) % 3, lognormal(40, 500), 0),
}


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 40])
@pytest.mark.parametrize("name", KV_LENS)
@pytest.mark.parametrize("heads_on_axis", [False, True])
def test_decode(name: str, num_kv_heads: int, heads_on_axis: bool) -> None:
    kv_lens = KV_LENS[name]
    batch = Batch(ones(len(kv_lens)), kv_lens, 4 * num_kv_heads, num_kv_heads, causal=True)
    planned = plan(batch, cutting(DECODE, heads_on_axis=heads_on_axis))
    check_balance(planned, check(planned))


@pytest.mark.parametrize("window_left", [-1, 0, 100, 100_000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 5, 8, 200])
def test_prefill(causal: bool, window_left: int, group: int) -> None:
    """Rows without tokens, tokens without rows, more rows than tokens, a group larger than the row tile."""
    q_lens = np.array([0, 7, 300, 1, 64, 0, 129, 1000, 2])
    kv_lens = np.array([50, 0, 100, 5000, 64, 0, 20_000, 1000, 1])
    batch = Batch(q_lens, kv_lens, 2 * group, 2, causal=causal, window_left=window_left)
    for heads_on_axis in (True, False):
        planned = plan(batch, cutting(PREFILL, heads_on_axis=heads_on_axis))
        check_balance(planned, check(planned))


@pytest.mark.parametrize("kv_len", range(20_000, 110_000, 10_000))
def test_one_long_request_whose_pieces_cost_more_than_all_others(kv_len: int) -> None:
    """The first levels that are tried are far too low: the average cost of units does not show the long one."""
    q_lens = np.array([300, 0, 17, 17, 5, 1, 17, 2, 2, 300, 1, 129, 1, 0])
    batch = Batch(q_lens, np.where(np.arange(14) == 7, kv_len, 52), 2, 1, causal=True)
    how = Cutting(num_ctas=197, tile_kv=48, ns_per_token=1.0, ns_per_unit=0.0, ns_per_piece=5000.0)
    planned = plan(batch, how)
    check_balance(planned, check(planned))


@pytest.mark.parametrize(
    "num_ctas", [1, 2, 3, 5, 7, 8, 9, 13, 31, 33, 47, 78, 108, 131, 132, 133, 144, 160, 255, 256, 264]
)
def test_any_number_of_ctas(num_ctas: int) -> None:
    for heads in (1, 4, 5, 8, 12):
        planned = plan(Batch(ones(48), lognormal(48, 6000), 2 * heads, heads), cutting(DECODE, num_ctas=num_ctas))
        check_balance(planned, check(planned))
    q_lens = lognormal(12, 700)
    planned = plan(Batch(q_lens, q_lens, 8, 2, causal=True), cutting(PREFILL, num_ctas=num_ctas))
    check_balance(planned, check(planned))


@pytest.mark.parametrize("page_size", [0, 1, 2, 3, 16, 64, 128, 256])
def test_page_sizes(page_size: int) -> None:
    kv_lens = np.array([0, 1, 255, 256, 257, 3000, 0, 16])
    planned = plan(Batch(ones(8), kv_lens, page_size=page_size, kv_start=3), DECODE)
    check(planned)


SERVING = {  # batches fine enough for a balance of 3%: name -> (batch, cutting)
    "decode 64 x 4k": (Batch(ones(64), KV_LENS["equal"]), DECODE),
    "decode 64, lognormal": (Batch(ones(64), KV_LENS["lognormal"]), DECODE),
    "decode 64, zipf": (Batch(ones(64), KV_LENS["zipf"]), DECODE),
    "decode 1 x 128k": (Batch(ones(1), np.array([131072])), DECODE),
    "decode 1 x 128k, 32 heads": (Batch(ones(1), np.array([131072]), 32, 32), DECODE),
    "decode, one long": (Batch(ones(64), one_long(64, 131072, 2048)), DECODE),
    "decode 256, lognormal": (Batch(ones(256), lognormal(256, 4096)), DECODE),
    "decode 4096, lognormal": (Batch(ones(4096), lognormal(4096, 1024)), DECODE),
    "decode, five heads": (Batch(ones(64), KV_LENS["lognormal"], 40, 5), DECODE),
    "prefill 16 x 1k": (Batch(np.full(16, 1024), np.full(16, 1024), causal=True), PREFILL),
    "prefill 4 x 4k": (Batch(np.full(4, 4096), np.full(4, 4096), causal=True), PREFILL),
    "prefill 1 x 16k": (Batch(np.array([16384]), np.array([16384]), causal=True), PREFILL),
    "prefill 1 x 16k, not causal": (Batch(np.array([16384]), np.array([16384])), PREFILL),
    "prefill 1 x 16k, window": (Batch(np.array([16384]), np.array([16384]), causal=True, window_left=1000), PREFILL),
    "prefill, lognormal": (Batch(lognormal(16, 2048), lognormal(16, 2048), causal=True), PREFILL),
    "append 512 on 16k": (Batch(np.full(4, 512), np.full(4, 16384), causal=True), PREFILL),
    "mixed": (Batch(np.where(np.arange(64) % 8, 1, 700), lognormal(64, 4000) + 700, causal=True), PREFILL),
}


@pytest.mark.parametrize("name", SERVING)
def test_at_most_three_percent_over_the_mean(name: str) -> None:
    planned = plan(*SERVING[name])
    load = loads(planned, check(planned))
    assert load.max() <= 1.03 * load.mean()
    assert planned.result.cost_max_ns == pytest.approx(load.max(), rel=0.005)
    assert planned.result.cost_total_ns == pytest.approx(load.sum(), rel=0.005)


def test_prefill_items_are_runs_never_one_a_tile() -> None:
    planned = plan(Batch(np.full(256, 1024), np.full(256, 1024), causal=True), PREFILL)
    check(planned)
    assert len(planned.items) <= 2 * 132 + 256
    assert planned.items["num_units"].max() > 50


@pytest.mark.parametrize(("num_ctas", "members"), [(264, 8), (132, 4), (131, 1)])
def test_runs_are_planned_once_for_as_many_heads_as_divide_the_ctas(num_ctas: int, members: int) -> None:
    lens = lognormal(16, 1000)
    planned = plan(Batch(lens, lens, causal=True), cutting(PREFILL, num_ctas=num_ctas))
    load = loads(planned, check(planned)).reshape(-1, members)
    assert load == pytest.approx(np.broadcast_to(load[:, :1], load.shape))
    assert len(planned.items) <= 16 + 4 * num_ctas // members
    ctas = planned.ctas.reshape(-1, members)
    assert (ctas["begin"] == ctas["begin"][:, :1]).all() and (ctas["end"] == ctas["end"][:, :1]).all()
    assert (ctas["kv_head"] == np.arange(members) * (8 // members)).all()


def test_teams_walk_one_range_for_all_heads() -> None:
    """Neighbours are at the same step: member m of a team has the list of member 0, shifted by m heads."""
    planned = plan(Batch(ones(64), KV_LENS["lognormal"]), DECODE)
    seen = expand(planned)
    for team in range(16):
        lists = [
            {
                name: seen[name][seen["cta"] == team * 8 + member]
                for name in ("request", "kv_begin", "kv_end", "kv_head")
            }
            for member in range(8)
        ]
        for member, walked in enumerate(lists):
            assert (walked["kv_head"] == member).all()
            for name in ("request", "kv_begin", "kv_end"):
                assert (walked[name] == lists[0][name]).all()


def test_left_over_ctas_form_smaller_teams() -> None:
    planned = plan(Batch(ones(64), KV_LENS["lognormal"]), cutting(DECODE, num_ctas=16 * 8 + 6))
    load = loads(planned, check(planned))
    assert (load > 0.9 * load.mean()).all()  # six CTAs: four take two heads each, two take four
    seen = expand(planned)
    heads = [len(set(seen["kv_head"][seen["cta"] == cta])) for cta in (0, 128, 131, 132, 133)]
    assert heads == [1, 2, 2, 4, 4]


def test_a_decode_plan_has_one_item_a_request_and_cut() -> None:
    planned = plan(Batch(ones(4096), lognormal(4096, 1024)), DECODE)
    assert len(planned.items) <= 4096 + 4 * 20


def test_small_work_uses_fewer_ctas() -> None:
    planned = plan(Batch(ones(1), np.array([300])), DECODE)
    assert planned.header["num_ctas"] == 8 and len(planned.merges) == 0
    planned = plan(Batch(ones(1), np.array([1000])), DECODE)
    assert 8 < planned.header["num_ctas"] < 64  # no piece is cheaper than the fixed cost of a piece


@pytest.mark.parametrize("max_pieces", [1, 2, 7])
def test_max_pieces(max_pieces: int) -> None:
    planned = plan(Batch(ones(3), np.array([100_000, 5000, 77])), cutting(DECODE, max_pieces=max_pieces))
    check(planned)
    assert max(planned.merges["num_partials"], default=1) == max_pieces


@pytest.mark.parametrize(
    "num_ctas", [8, 12, 13], ids=["a full team", "a full team and a half", "a full team and one CTA"]
)
@pytest.mark.parametrize("heads_on_axis", [False, True])
def test_pieces_arrive_at_the_merge_of_their_own_head(heads_on_axis: bool, num_ctas: int) -> None:
    """Members of a team share their items, and a unit of 16 rows has two merges."""
    batch = Batch(np.full(5, 4), np.array([9000, 20_000, 3000, 700, 15_000]))
    planned = plan(batch, cutting(DECODE, heads_on_axis=heads_on_axis, num_ctas=num_ctas, fixed_piece_tokens=1024))
    check(planned)
    seen = expand(planned)
    own = planned.merges[seen["merge"]]
    is_cut = seen["partial_row"] >= 0
    assert (own["kv_head"] == seen["kv_head"])[is_cut].all() and set(own["kv_head"][is_cut]) == set(range(8))
    first = np.unique(seen["merge"][is_cut])
    assert len(planned.merges) == 2 * len(first) == 2 * 4 * 8
    assert (planned.merges[first + 1]["first_packed_row"] == planned.merges[first]["first_packed_row"] + 8).all()


def test_more_kv_heads_than_a_plan_can_name() -> None:
    batch = Batch(ones(1), ones(1), 65_536, 65_536)
    status, _, _ = call(problem_of(batch, arrays_of(batch)), DECODE, 1 << 16)
    assert status == native.INTERNAL and "65536" in native.last_error()


# ---------------------------------------------------------------- few rows and many rows in one batch

MIXED = Cutting(  # 128 columns of fp16 or bf16 on Hopper: flashpage/kernels/tile.py
    heads_on_axis=True,
    tile_q=128,
    tile_kv=160,
    ns_per_token=12.19,
    ns_per_unit=5000.0,
    few_rows_cost=0.65,
    ns_per_piece=2500.0,
    min_piece_tokens=256,
    wave_tokens=32768,
)


def kinds_of_ctas(planned: Planned, decode: np.ndarray) -> tuple[int, int]:
    """How many CTAs have only units of other requests, and how many have only units of `decode`."""
    seen = expand(planned)
    kinds = [set(decode[seen["request"][seen["cta"] == cta]]) for cta in range(planned.cutting.num_ctas)]
    return kinds.count({False}), kinds.count({True})


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("prefill", "decode", "fewest", "most"),
    [
        ((4096, 4096), (128, 8192), 30, 42),
        ((1024, 1024), (128, 8192), 3, 6),
        ((4096, 4096), (64, 4096), 70, 90),  # too short to walk heads one by one: lanes of four CTAs
        ((2048, 16384), (64, 8192), 90, 100),
    ],
)
def test_prefill_and_decode_run_on_different_ctas(
    first: str, prefill: tuple[int, int], decode: tuple[int, int], fewest: int, most: int
) -> None:
    rows, tokens = prefill
    q_lens = np.concatenate([[rows], ones(decode[0])])
    kv_lens = np.concatenate([[tokens], np.full(*decode)])
    if first == "decode":
        q_lens, kv_lens = q_lens[::-1].copy(), kv_lens[::-1].copy()
    planned = plan(Batch(q_lens, kv_lens, causal=True), MIXED)
    load = loads(planned, check(planned))
    assert load.max() <= 1.03 * load.mean()
    many, few = kinds_of_ctas(planned, q_lens == 1)
    assert many + few >= 120 and fewest <= many <= most


@pytest.mark.parametrize("decode", [0, 8], ids=["prefill alone", "little decode"])
def test_other_batches_have_waves(decode: int) -> None:
    """Every CTA begins with the first requests."""
    q_lens = np.concatenate([np.full(4, 4096), ones(decode)])
    seen = expand(plan(Batch(q_lens, np.full(len(q_lens), 4096), causal=True), MIXED))
    in_first = np.unique(seen["cta"][(seen["request"] == 0)])
    assert len(in_first) > 100


def test_few_rows_are_half_a_row_tile_at_most() -> None:
    """Half of 16 requests have one row more, and their tokens cost twice as much: twice as many CTAs take them."""
    how = cutting(MIXED, ns_per_unit=0.0, few_rows_cost=0.5)
    q_lens = np.repeat([16, 17], 8)
    planned = plan(Batch(q_lens, np.full(16, 8192)), how)
    check_balance(planned, check(planned))
    many, few = kinds_of_ctas(planned, q_lens == 16)
    assert many == pytest.approx(2 * few, abs=2) and many + few >= 130


# ---------------------------------------------------------------- fixed splits


def own_split(batch: Batch, how: Cutting, request: int) -> set[tuple[int, ...]]:
    seen = expand(plan(batch, how))
    mine = seen["request"] == request
    names = ("kv_head", "tile", "piece", "kv_begin", "kv_end")
    rows = {tuple(int(seen[name][i]) for name in names) for i in np.flatnonzero(mine & (seen["partial_row"] >= 0))}
    whole = {(int(seen["kv_head"][i]), int(seen["tile"][i])) for i in np.flatnonzero(mine & (seen["partial_row"] < 0))}
    return rows | whole


@pytest.mark.parametrize("heads_on_axis", [False, True])
@pytest.mark.parametrize("window_left", [-1, 700])
def test_fixed_split_is_the_same_alone_and_in_any_batch(heads_on_axis: bool, window_left: int) -> None:
    how = cutting(DECODE, heads_on_axis=heads_on_axis, fixed_piece_tokens=512, tile_q=32, few_rows_cost=0.5)
    q_lens, kv_lens = np.array([1, 40, 3, 1, 200, 1]), np.array([5000, 700, 0, 512, 3000, 513])
    together = Batch(q_lens, kv_lens, 20, 5, causal=True, window_left=window_left)
    check(plan(together, how))
    for request in range(len(q_lens)):
        alone = Batch(q_lens[[request]], kv_lens[[request]], 20, 5, causal=True, window_left=window_left)
        crowd = Batch(
            *(np.concatenate([lognormal(30, 9), q_lens]), np.concatenate([lognormal(30, 2000), kv_lens]), 20, 5),
            causal=True,
            window_left=window_left,
        )
        split = own_split(alone, how, 0)
        assert own_split(together, how, request) == split
        assert own_split(crowd, how, 30 + request) == split
        assert own_split(together, cutting(how, num_ctas=7), request) == split


@pytest.mark.parametrize("piece", [1 << 16, (1 << 30) - 64])
def test_fixed_split_of_as_many_tokens_as_31_bits_count(piece: int) -> None:
    """The multiple after the last piece has 32 bits."""
    longest = (1 << 31) - 1025
    batch = Batch(ones(2), np.array([longest, 5]), 1, 1)
    planned = plan(batch, cutting(DECODE, fixed_piece_tokens=piece))
    ends = [min(piece * (i + 1), longest) for i in range(-(-longest // piece))]
    assert sorted(planned.items["kv_end"].tolist()) == [5, *ends]


def test_never_cut() -> None:
    planned = plan(Batch(ones(3), np.array([100_000, 10, 50_000])), cutting(DECODE, fixed_piece_tokens=-1))
    check(planned)
    assert planned.result.num_partial_rows == 0


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "how", [DECODE, PREFILL, cutting(DECODE, fixed_piece_tokens=256)], ids=["teams", "runs", "fixed"]
)
def test_too_small_a_workspace_names_the_size_that_works(how: Cutting) -> None:
    batch = Batch(lognormal(30, 10), lognormal(30, 3000), causal=True)
    problem = problem_of(batch, arrays_of(batch))
    _, whole, wanted = call(problem, how, 1 << 22)
    needed = wanted.used_bytes
    for capacity in (0, 16, 1000, needed // 2, needed - 1):
        status, _, result = call(problem, how, capacity)
        assert status == native.WORKSPACE_TOO_SMALL and result.used_bytes == needed
        assert result.num_partial_rows == wanted.num_partial_rows
    status, buffer, _ = call(problem, how, needed)
    assert status == native.OK and (buffer[:needed] == whole[:needed]).all()


def test_fixed_split_bound_of_one_row_a_request() -> None:
    how = cutting(DECODE, fixed_piece_tokens=512)
    batch = Batch(ones(64), KV_LENS["lognormal"])
    plan_bytes, partial_rows = bounds(batch, how, one_row=True)
    planned = plan(batch, how, capacity=plan_bytes)
    assert planned.result.num_partial_rows <= partial_rows < 2 * planned.result.num_partial_rows


def test_balanced_bound_does_not_grow_with_the_tokens() -> None:
    bound = [bounds(Batch(ones(64), np.full(64, length)), DECODE) for length in (1000, 100_000)]
    assert bound[0] == bound[1]


def test_more_than_31_bits_of_tokens() -> None:
    """A million requests: totals that may exceed 32 bits are 64-bit, and the plan succeeds."""
    batch = Batch(ones(1_000_000), np.full(1_000_000, 4096), page_size=64)
    planned = plan(batch, DECODE)
    assert planned.result.total_kv == 4096 * 10**6
    assert planned.result.num_items >= 10**6


def test_a_plan_is_the_same_from_any_thread_at_any_time() -> None:
    """Scratch memory is kept between plans: larger and smaller batches in between must leave nothing in it."""
    batch = Batch(lognormal(40, 30), lognormal(40, 2000), causal=True)
    expected = plan(batch, PREFILL)
    same: list[bool] = []

    def again() -> None:
        for other in (1, 500, 7):
            plan(Batch(ones(other), lognormal(other, 3000)), DECODE)
            planned = plan(batch, PREFILL)
            parts = ("ctas", "items", "merges")
            same.append(all((getattr(planned, p) == getattr(expected, p)).all() for p in parts))

    threads = [threading.Thread(target=again) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 9
