"""How CTAs of a cluster merge a unit (tile/merge/cluster_merge.h), with all of them as fibers on the host."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from native_build import shared_library

from flashpage import native
from flashpage.native import records

# for each kernel: the cache's type, columns of V, warps along the columns
KERNELS = (("Bf16", 128, 1), ("Bf16", 64, 1), ("Bf16", 256, 1), ("E4m3", 128, 1), ("E4m3", 256, 2), ("Bf16", 72, 1))


class Unit(ctypes.Structure):
    """include/flashpage/tile/unit.h"""

    _fields_ = [
        (name, ctypes.c_int32) for name in ["first_row", "num_rows", "kv_head", "begin", "end", "all_begin", "all_end"]
    ]


def library(kernel: tuple[str, int, int]) -> ctypes.CDLL:
    flags = tuple(f"-D{name}={value}" for name, value in zip(("CACHE", "HEAD_DIM_VO", "WARPS_V"), kernel, strict=True))
    return ctypes.CDLL(str(shared_library("cluster_merge.cpp", first_include="hopper", flags=flags)))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("log_pieces", [1, 2, 3, 4])
def test_every_row_is_merged_once(kernel: tuple[str, int, int], log_pieces: int) -> None:
    """The CTA that has the columns merges; other memory is NaN. Groups of 1, 3 and 4 heads, with LSE or without."""
    code, dim = library(kernel), kernel[1]
    for rows, group in ((1, 1), (4, 4), (3, 3), (7, 4), (8, 1), (16, 4)):
        if rows <= code.max_rows():
            check(code, dim, log_pieces, rows, group)


def check(code: ctypes.CDLL, dim: int, log_pieces: int, rows: int, group: int) -> None:
    random, pieces, kv_heads, first_row, head = np.random.default_rng(rows), 1 << log_pieces, 3, 2 * group, 1
    columns = random.standard_normal((pieces, rows, dim)).astype(np.float32)
    maxima = random.normal(0, 4, (pieces, rows)).astype(np.float32)
    sums = random.uniform(0.5, 9, (pieces, rows)).astype(np.float32)
    maxima[-1, 0], sums[-1, 0], columns[-1, 0] = -np.inf, 0, 0  # a piece in which a row sees nothing
    if rows > 1:
        maxima[:, 1], sums[:, 1], columns[:, 1] = -np.inf, 0, 0  # a row that sees nothing

    q_begin, q_len = 5, 2 + -(-rows // group)
    out = torch.full((q_begin + q_len + 1, kv_heads * group, dim), torch.nan, dtype=torch.bfloat16)
    lse = torch.full(out.shape[:2], torch.nan)
    params = native.AttentionParams(
        out=out.data_ptr(), lse=lse.data_ptr(), value_scale=0.5, num_q_heads=kv_heads * group
    )
    params.out_row_stride, params.out_head_stride, params.group = *out.stride()[:2], native.make_fast_div(group)
    items = np.zeros(pieces, records.WORK_ITEM)
    items["q_begin"], items["q_len"], items["piece"] = q_begin, q_len, np.arange(pieces)
    unit = Unit(first_row, rows, head)
    arrays = (columns, maxima, sums)
    waiting = code.run_cluster(
        ctypes.byref(params), ctypes.c_void_p(items.ctypes.data), ctypes.byref(unit), log_pieces,
        *(ctypes.c_void_p(a.ctypes.data) for a in arrays),
    )  # fmt: skip
    assert waiting == 0

    top = maxima.max(0)
    weights = np.exp2(maxima - np.where(np.isinf(top), 0, top))
    total = (weights * sums).sum(0)
    expected = (weights[..., None] * columns).sum(0) * 0.5 / np.where(total == 0, 1, total)[:, None]
    with np.errstate(divide="ignore"):
        expected_lse = top + np.log2(total)
    packed = first_row + np.arange(rows)
    at = q_begin + packed // group, head * group + packed % group
    torch.testing.assert_close(out[at].float(), torch.from_numpy(expected), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse[at], torch.from_numpy(expected_lse).float(), rtol=1e-4, atol=1e-4)
    out[at], lse[at] = torch.nan, torch.nan
    assert out.isnan().all() and lse.isnan().all(), "other rows were written"
