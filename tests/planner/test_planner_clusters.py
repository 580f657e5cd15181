"""Units with their own CTAs, a cluster for each (include/flashpage/plan/own_ctas.h)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from planner_batches import Batch, Cutting, Planned, bounds, plan
from planner_checks import check

from flashpage import native
from flashpage.kernels import schedules
from flashpage.plan import plan_lengths

H200 = (132, 66, 32, 16, 8)  # clusters of 1, 2, 4, 8, 16 CTAs
DECODE = Cutting(
    num_ctas=132,
    heads_on_axis=False,
    tile_q=16,
    tile_kv=32,
    merge_rows=64,
    ns_per_token=14.84,
    ns_per_unit=500.0,
    ns_per_piece=1000.0,
    clusters=H200,
    cluster_rows=16,
    cluster_piece_tokens=32,
    full_speed_share=34.5 / 47.0,
    ns_per_cluster_unit=500.0,
    ns_per_merge=1500.0,
    ns_per_cluster_merge=400.0,
)
GENERAL = dataclasses.replace(DECODE, clusters=(0,) * 5)


def decode(*kv_lens: int, heads: tuple[int, int] = (32, 8), **values: object) -> Batch:
    return Batch(np.ones(len(kv_lens), np.int32), np.array(kv_lens, np.int32), *heads, **values)


def planned(batch: Batch, cutting: Cutting = DECODE) -> Planned:
    """A checked plan; plan() compares it with the bounds."""
    found = plan(batch, cutting)
    check(found)
    assert found.result.cluster_size == found.header["cluster_size"]
    return found


def size_of(batch: Batch, cutting: Cutting = DECODE) -> int:
    return int(planned(batch, cutting).header["cluster_size"])


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (decode(1024), 16),
        (decode(32768), 16),
        (decode(8192, 8192), 8),
        (decode(*[4096] * 4), 4),
        (decode(*[4096] * 16), 1),
        (decode(*[8192] * 64, heads=(8, 1)), 2),
        (decode(*[4096] * 64), 0),  # more units than CTAs
        (decode(30), 1),  # nothing to cut
        (decode(100, 9000, heads=(64, 8)), 0),  # too uneven
        (decode(32768, heads=(8, 1)), 0),  # 16 CTAs would take longer than all CTAs
    ],
)
def test_the_size_that_ends_first(batch: Batch, size: int) -> None:
    assert size_of(batch) == size


def test_pieces_of_the_longest_request_there_may_be() -> None:
    longest = 2**31 - 1025
    found = plan(decode(longest), DECODE)
    lengths = found.items["kv_end"] - found.items["kv_begin"]
    assert found.header["cluster_size"] == len(lengths) == 16 and lengths.min() > longest // 16 - DECODE.tile_kv


def test_cta_and_cluster_of_every_piece() -> None:
    found = planned(decode(1024, 700, 30, heads=(8, 2)), dataclasses.replace(DECODE, clusters=(0, 0, 0, 16, 0)))
    pieces = check(found)
    assert found.header["num_ctas"] == 3 * 2 * 8 and found.header["cluster_size"] == 8
    counts = {n: int((pieces["request"] == n).sum()) // 2 for n in range(3)}
    assert counts == {0: 8, 1: 8, 2: 1}
    assert (pieces["cta"] == (pieces["request"] * 2 + pieces["kv_head"]) * 8 + pieces["piece"]).all()
    assert found.header["num_merges"] == 2 * 2 and len(found.items) == 17


def test_a_card_that_runs_fewer_clusters_gets_smaller_ones() -> None:
    batch = decode(32768)
    for clusters, size in (((132, 66, 32, 16, 7), 0), ((132, 66, 32, 7, 8), 16), ((132, 66, 32, 0, 0), 0)):
        assert size_of(batch, dataclasses.replace(DECODE, clusters=clusters)) == size
    short = decode(1024)
    assert size_of(short, dataclasses.replace(DECODE, clusters=(132, 66, 32, 16, 7))) == 8
    assert size_of(short, dataclasses.replace(DECODE, clusters=(132, 66, 32, 7, 7))) == 4


@pytest.mark.parametrize("fixed", [-1, 256])
def test_requested_splits_stay(fixed: int) -> None:
    cuttings = (dataclasses.replace(how, fixed_piece_tokens=fixed) for how in (DECODE, GENERAL))
    found, general = (planned(decode(4096), how) for how in cuttings)
    assert found.header["cluster_size"] == 0 and (found.items == general.items).all()


def test_rows_that_no_cluster_merges() -> None:
    """Two row tiles; a window and rows that see different tokens; a request without rows or tokens."""
    rows = Batch(np.full(2, 4, np.int32), np.full(2, 4096, np.int32), 32, 8, causal=True)
    assert size_of(rows) == 8 and size_of(rows, dataclasses.replace(DECODE, cluster_rows=15)) == 0
    tiles = Batch(np.array([9, 0, 3], np.int32), np.array([2000, 50, 2000], np.int32), 8, 2, causal=True)
    assert size_of(tiles) == 16
    assert size_of(dataclasses.replace(tiles, window_left=300)) > 1
    assert size_of(decode(0, 512, 0)) > 1


def test_lengths_that_differ_a_little() -> None:
    for seed in range(40):
        random = np.random.default_rng(seed)
        heads = ((32, 8), (8, 1), (12, 3), (40, 5))[seed % 4]
        lens = random.integers(0, 3000 if seed % 3 else 200, random.integers(1, 9))
        window = -1 if seed % 2 else int(random.integers(1, 900))
        batch = decode(*lens.tolist(), heads=heads, window_left=window, causal=bool(seed % 5))
        for forced in range(1, 5):
            sizes = tuple(count if i == forced else 0 for i, count in enumerate(H200))
            planned(batch, dataclasses.replace(DECODE, clusters=sizes, ns_per_merge=1e9))


def test_bounds_hold_where_few_are_cut() -> None:
    """The bounds include the partials that a cluster's pieces would be merged through."""
    how = dataclasses.replace(DECODE, min_piece_tokens=10**6)
    batch = decode(4096)
    assert bounds(batch, how)[1] >= planned(batch, how).result.num_partial_rows > 0


def test_graphs_have_one_size() -> None:
    """The largest size for which every batch within the capacity has enough clusters; CTAs are a multiple of it."""
    whole = DECODE.struct()
    for units, size, num_ctas in ((8, 16, 128), (9, 8, 128), (32, 4, 128), (64, 2, 132), (67, 0, 132)):
        fixed, found = schedules.with_one_cluster_size(whole, units)
        assert (found, fixed.num_ctas) == (size, num_ctas)
        kept = [0] * 5
        kept[0], kept[size.bit_length() - 1 if size else 0] = (
            num_ctas,
            H200[size.bit_length() - 1] if size else num_ctas,
        )
        assert list(fixed.clusters) == kept and list(whole.clusters) == list(H200)
    none, size = schedules.with_one_cluster_size(GENERAL.struct(), 1)
    assert size == 0 and bytes(none) == bytes(GENERAL.struct())


def test_the_plan_says_so() -> None:
    clusters = schedules.Clusters(H200, 16)
    text = plan_lengths(None, [4096], clusters=clusters).explain()
    assert "each unit has 16 neighbouring CTAs of its own" in text
    assert "a unit's are merged inside a cluster of 16 CTAs" in text and "partials 0 B" in text
    assert "each unit has a CTA of its own" in plan_lengths(None, [4096] * 16, clusters=clusters).explain()
    assert "cluster" not in plan_lengths(None, [4096]).explain()
    assert plan_lengths(None, [4096], clusters=clusters, fixed_piece_tokens=512).result.cluster_size == 0
    assert isinstance(plan_lengths(None, [4096], clusters=clusters).result, native.PlanResult)
