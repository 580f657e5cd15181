"""The kernel that merges partials of cut units (include/flashpage/kernels/helpers/merge.h), on the host."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from native_build import shared_library

from flashpage import native
from flashpage.native import records

OUTS = {"Bf16": torch.bfloat16, "Half": torch.float16, "E4m3": torch.float8_e4m3fn}
UNIT = {"Bf16": 2**-8, "Half": 2**-8, "E4m3": 2**-4}
PARTIALS = (1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 40, *[2] * 6)  # with 64 rows each enough for whole rows by warps


def library(out: str, by_columns: int) -> ctypes.CDLL:
    flags = (f"-DOUT={out}", f"-DBY_COLUMNS={by_columns}")
    return ctypes.CDLL(str(shared_library("merge.cpp", first_include="hopper", flags=flags)))


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("merge_rows", [8, 64])
@pytest.mark.parametrize("dim", [64, 72, 128, 192, 256, 320])
def test_every_row_is_merged_once(out: str, merge_rows: int, dim: int) -> None:
    """One item for each number of partials, some of whose rows see nothing; fewer CTAs than items, and more."""
    random, group, kv_heads, head = np.random.default_rng(dim + merge_rows), 3, 2, 1
    items = np.zeros(len(PARTIALS), records.MERGE_ITEM)
    items["num_partials"], items["kv_head"] = PARTIALS, head
    items["num_rows"] = random.integers(1, merge_rows + 1, len(items))
    items["num_rows"][:2] = 1, merge_rows
    items["first_packed_row"] = random.integers(0, 5, len(items))
    items["q_begin"] = 1 + np.arange(len(items)) * (merge_rows + 2)
    items["partial_stride"] = items["num_rows"] + random.integers(0, 3, len(items))
    sizes = items["partial_stride"] * items["num_partials"]
    items["partial_row"] = 2 + np.cumsum(sizes) - sizes
    plan = np.zeros(records.PLAN_HEADER.itemsize + items.nbytes, np.uint8)
    header = plan[: records.PLAN_HEADER.itemsize].view(records.PLAN_HEADER)
    header["num_merges"], header["merge_rows"], header["merges_offset"] = len(items), merge_rows, header.itemsize
    plan[header.itemsize :] = items.view(np.uint8)

    shape = int(2 + sizes.sum()), dim
    partials, lse = np.full(shape, np.nan, np.float32), np.full(shape[0], np.nan, np.float32)
    rows, heads = int(items["q_begin"][-1]) + merge_rows + 8, group * kv_heads
    wanted, wanted_lse = np.full((rows, heads, dim), np.nan), np.full((rows, heads), np.nan)
    for item in items:
        count, own = int(item["num_partials"]), int(item["num_rows"])
        states, scores = random.standard_normal((count, own, dim)), random.normal(0, 6, (count, own))
        scores[random.random((count, own)) < 0.2] = -np.inf
        states[np.isneginf(scores)] = 0.0
        at = item["partial_row"] + np.arange(count)[:, None] * item["partial_stride"] + np.arange(own)
        partials[at], lse[at] = states, scores
        most = scores.max(0)
        weights = np.exp2(scores - np.where(np.isneginf(most), 0.0, most))
        sums, packed = weights.sum(0), item["first_packed_row"] + np.arange(own)
        place = item["q_begin"] + packed // group, head * group + packed % group
        wanted[place] = (states * weights[..., None]).sum(0) / np.where(sums == 0, 1.0, sums)[:, None]
        with np.errstate(divide="ignore"):
            wanted_lse[place] = most + np.log2(sums)

    for grid, has_lse, by_columns in ((3, True, 0), (200, False, 0), (3, True, 1), (200, False, 1)):
        given = torch.full((rows, heads, dim), torch.nan, dtype=OUTS[out])
        given_lse = torch.full((rows, heads), torch.nan)
        params = native.MergeParams(
            plan=plan.ctypes.data,
            partial_out=partials.ctypes.data,
            partial_lse=lse.ctypes.data,
            out=given.data_ptr(),
            lse=given_lse.data_ptr() if has_lse else None,
            out_row_stride=heads * dim,
            out_head_stride=dim,
            head_dim_vo=dim,
            num_q_heads=heads,
            group=native.make_fast_div(group),
        )
        library(out, by_columns).merge(ctypes.byref(params), grid)
        np.testing.assert_allclose(given.double().numpy(), wanted, atol=1e-3, rtol=UNIT[out])
        if has_lse:
            np.testing.assert_allclose(given_lse.double().numpy(), wanted_lse, atol=1e-4)
        else:
            assert given_lse.isnan().all()


@pytest.mark.parametrize(
    ("cluster_size", "most_rounds", "merged"), [(0, 0, (0, 1)), (0, 1, (1,)), (0, 2, ()), (2, 0, ())]
)
def test_what_the_attention_launch_has_merged(cluster_size: int, most_rounds: int, merged: tuple[int, ...]) -> None:
    """Units of at most so many rounds, and all those of a plan of clusters."""
    items = np.zeros(2, records.MERGE_ITEM)
    items["num_partials"], items["num_rows"], items["partial_stride"] = (8, 9), 1, 1
    items["q_begin"], items["partial_row"] = (0, 1), (0, 8)
    header = np.zeros(1, records.PLAN_HEADER)
    header["num_merges"], header["merge_rows"], header["merges_offset"] = len(items), 1, header.itemsize
    header["cluster_size"] = cluster_size
    plan = np.concatenate([header.view(np.uint8), items.view(np.uint8)])
    partials, lse = np.ones((17, 64), np.float32), np.zeros(17, np.float32)
    out = torch.full((2, 1, 64), torch.nan, dtype=torch.bfloat16)
    params = native.MergeParams(
        plan=plan.ctypes.data,
        partial_out=partials.ctypes.data,
        partial_lse=lse.ctypes.data,
        out=out.data_ptr(),
        out_row_stride=64,
        out_head_stride=64,
        head_dim_vo=64,
        num_q_heads=1,
        group=native.make_fast_div(1),
        most_merge_rounds=most_rounds,
    )
    library("Bf16", 0).merge(ctypes.byref(params), 2)
    assert [i for i in range(2) if not out[i].isnan().any()] == list(merged)
    assert out[list(merged)].eq(1).all()


@pytest.mark.parametrize("by_columns", [0, 1])
@pytest.mark.parametrize("is_batch_invariant", [True, False])
def test_batch_invariant_sums_do_not_depend_on_other_rows(by_columns: int, is_batch_invariant: bool) -> None:
    """Rows of 40 partials alone, where several warps may share one, and in front of many others."""
    random, count, pieces, dim = np.random.default_rng(0), 64, 40, 128
    partials = random.standard_normal((count * pieces, dim)).astype(np.float32)
    lse = random.normal(0, 6, len(partials)).astype(np.float32)
    found = []
    for repeats in (1, 80):
        rows = np.arange(count * repeats)
        items = np.zeros(len(rows), records.MERGE_ITEM)
        items["num_partials"], items["num_rows"], items["partial_stride"] = pieces, 1, 1
        items["q_begin"], items["partial_row"] = rows, rows % count * pieces
        header = np.zeros(1, records.PLAN_HEADER)
        header["num_merges"], header["merge_rows"], header["merges_offset"] = len(rows), 1, header.itemsize
        plan = np.concatenate([header.view(np.uint8), items.view(np.uint8)])
        out, out_lse = (
            torch.full((len(rows), 1, dim), torch.nan, dtype=torch.float16),
            torch.full((len(rows),), torch.nan),
        )
        params = native.MergeParams(
            plan=plan.ctypes.data,
            partial_out=partials.ctypes.data,
            partial_lse=lse.ctypes.data,
            out=out.data_ptr(),
            lse=out_lse.data_ptr(),
            out_row_stride=dim,
            out_head_stride=dim,
            head_dim_vo=dim,
            num_q_heads=1,
            group=native.make_fast_div(1),
            is_batch_invariant=is_batch_invariant,
        )
        library("Half", by_columns).merge(ctypes.byref(params), 7)
        found.append((out[:count], out_lse[:count]))
    assert all(map(torch.equal, *found)) == is_batch_invariant  # the other mode differs in the last bits
