"""Custom masks of the Hopper prefill kernel, on the host: the kernel that finds tiles and queues units, the tiles that
loading warps visit, and the bits of a mixed tile, each compared with numpy.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mask_batch import KINDS, TOKENS, Masked, mask_of
from native_build import mask_tiles as native
from planner_batches import Batch, Cutting

import flashpage
from flashpage import native as host


@st.composite
def masked_batches(draw: st.DrawFn) -> Masked:
    lengths = st.sampled_from((0, 1, 2, 7, 64, 65, 129, 300))
    requests = draw(
        st.lists(
            st.tuples(lengths, st.integers(0, 700) | st.just(4500), st.sampled_from(KINDS)), min_size=1, max_size=5
        )
    )
    num_kv_heads, group = draw(st.sampled_from(((1, 1), (2, 3), (1, 40), (3, 4))))
    q_lens, kv_lens = (np.array([r[i] for r in requests], np.int64) for i in range(2))
    batch = Batch(
        q_lens,
        kv_lens,
        num_q_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        page_size=0,
        has_custom_mask=True,
        q_start=draw(st.integers(0, 3)),
        window_left=draw(st.sampled_from((-1, 200))),
    )
    cutting = Cutting(
        num_ctas=draw(st.sampled_from((1, 5, 132, 600))),
        heads_on_axis=True,
        tile_q=draw(st.sampled_from((64, 128))),
        tile_kv=draw(st.sampled_from((*TOKENS, 160))),
        wave_tokens=draw(st.sampled_from((0, 500))),
        ns_per_merge=draw(st.sampled_from((0.0, 1e9))),  # few units shall not be cut
        fixed_piece_tokens=draw(st.sampled_from((0, 0, -1, 3840))),
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    masks = [mask_of(kind, int(q), int(kv), rng) for q, kv, kind in requests]
    return Masked.make(batch, cutting, masks, draw(st.integers(0, 3)))


examples = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@examples
@given(masked_batches(), st.sampled_from((1, 3)))
def test_tiles_of_masks(masked: Masked, grid: int) -> None:
    masked.find(grid)
    masked.check_tiles()
    masked.check_lanes()


@examples
@given(masked_batches(), st.sampled_from((1, 2)))
def test_units_are_queued_once_and_the_long_ones_first(masked: Masked, grid: int) -> None:
    for _ in range(2):  # the second run starts from the memory of the first
        masked.find(grid)
    masked.check_queue()


SEES_NOTHING = 2  # in tile/mask/visible_tiles.h, next to 0 (all) and 1 (some)


class Visited(ctypes.Structure):
    _fields_ = [("first_token", ctypes.c_int32), ("is_last", ctypes.c_int16), ("seen", ctypes.c_int16)]


@examples
@given(
    st.integers(0, 4000).flatmap(lambda tiles: st.tuples(st.just(tiles), st.integers(0, tiles), st.integers(0, tiles))),
    st.sampled_from((0.0, 0.001, 0.05, 0.9)),
    st.integers(0, 99),
)
@example((32, 32, 32), 0.0, 0)
def test_visible_tiles_are_visited(sizes: tuple[int, int, int], density: float, seed: int) -> None:
    """More tiles than a warp reads at a time, and units that begin anywhere."""
    tiles, begin, end = sizes[0], min(sizes[1:]), max(sizes[1:])
    rng = np.random.default_rng(seed)
    visible, hidden = rng.random(tiles) < density, rng.random(tiles) < 0.5
    cells = np.full(-(-tiles // 32) + 2, 2**64 - 1, np.uint64)
    words = [np.packbits(np.append(bits, np.zeros(-tiles % 32, bool)), bitorder="little") for bits in (visible, hidden)]
    cells[1:-1] = np.stack([w.view(np.uint32) for w in words], 1).reshape(-1, 2).copy().view(np.uint64).ravel()
    params = host.MaskTilesParams(cells=cells.ctypes.data, tile_kv=80)
    count = max(1, end - begin)
    visited = (Visited * count)()
    inside = int(rng.integers(0, 80)) if end > begin else 0
    end_token = end * 80 - int(rng.integers(0, 80 - inside)) if end > begin else begin * 80
    found = native().visit_tiles(ctypes.byref(params), ctypes.c_uint32(1), begin * 80 + inside, end_token, visited)
    expected = [(tile * 80, int(hidden[tile])) for tile in range(begin, min(tiles, begin + count)) if visible[tile]]
    if not expected:
        expected = [(begin * 80, SEES_NOTHING)]
    if begin == tiles:  # its cell was never written, and its range is empty
        assert found == 1 and visited[0].first_token == begin * 80
        return
    assert [(v.first_token, v.seen) for v in visited[:found]] == expected
    assert [bool(v.is_last) for v in visited[:found]] == [False] * (len(expected) - 1) + [True]


@pytest.mark.parametrize("tokens", (*TOKENS, 160))
@pytest.mark.parametrize("window_left", [-1, 30])
@pytest.mark.parametrize("group", [1, 3])
def test_bits_of_a_mixed_tile(tokens: int, window_left: int, group: int) -> None:
    """A row's last tile, whose bits end inside a word, is included, and so are rows that start at any bit."""
    rng = np.random.default_rng(0)
    q_len, kv_len = 77, 301
    batch = Batch(
        np.array([5, q_len]), np.array([3, kv_len]), group, 1, 0, window_left=window_left, has_custom_mask=True
    )
    masks = [mask_of("random", int(q), int(kv), rng) for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True)]
    cutting = Cutting(num_ctas=1, heads_on_axis=True, tile_q=128, tile_kv=tokens)
    for first_byte in range(4):
        masked = Masked.make(batch, cutting, masks, first_byte)
        params = host.AttentionParams(
            custom_mask=masked.params.custom_mask, group=masked.params.group, num_q_heads=group, window_left=window_left
        )
        item = masked.item_of(1)
        assert item["kv_end"] == kv_len
        row, token = np.arange(q_len)[:, None], np.arange(kv_len)[None]
        in_window = token >= kv_len - q_len + row - window_left if window_left >= 0 else True
        all_visible = np.zeros((128, kv_len + tokens), bool)
        packed_rows = np.minimum(np.arange(128), q_len * group - 1) // group
        all_visible[:, :kv_len] = (masks[1] & in_window)[packed_rows]
        visible = np.empty((16, tokens), np.uint8)
        for first_row in range(0, 128, 16):
            for first in range(0, kv_len, tokens):
                native().mask_tile_of(
                    ctypes.byref(params), None, ctypes.c_void_p(item.ctypes.data), 128, 0, 0, first_row, first, tokens,
                    ctypes.c_void_p(visible.ctypes.data),
                )  # fmt: skip
                expected = all_visible[first_row : first_row + 16, first : first + tokens]
                assert (visible == expected).all(), (first_row, first)


@pytest.mark.parametrize("tokens", (*TOKENS, 160))
@pytest.mark.parametrize("group", [1, 3])
def test_bits_of_a_mixed_tile_as_computing_lanes_have_them(tokens: int, group: int) -> None:
    rng = np.random.default_rng(1)
    q_len, kv_len = 77, 401
    batch = Batch(np.array([5, q_len]), np.array([3, kv_len]), group, 1, 0, has_custom_mask=True)
    masks = [mask_of("random", int(q), int(kv), rng) for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True)]
    masked = Masked.make(batch, Cutting(num_ctas=1, heads_on_axis=True, tile_q=128, tile_kv=tokens), masks, 1)
    masked.find(3)
    params, item = host.AttentionParams(group=masked.params.group, num_q_heads=group), masked.item_of(1)
    all_visible = np.zeros((128, kv_len + tokens), bool)
    all_visible[:, :kv_len] = masks[1][np.minimum(np.arange(128), q_len * group - 1) // group]
    visible = np.empty((16, tokens), np.uint8)
    for first_row in range(0, 128, 16):
        for first in range(0, kv_len, tokens):
            native().mask_tile_of(
                ctypes.byref(params), ctypes.byref(masked.params), ctypes.c_void_p(item.ctypes.data), 128, 0, 0,
                first_row, first, tokens, ctypes.c_void_p(visible.ctypes.data),
            )  # fmt: skip
            expected = all_visible[first_row : first_row + 16, first : first + tokens]
            assert (visible == expected).all(), (first_row, first)


def wrapper_with_mask(fixed_split_size: int | None, mask: torch.Tensor, q_lens: list[int]) -> Any:
    workspace = torch.empty(1 << 23, dtype=torch.uint8)
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    indptr = torch.tensor([0, *q_lens]).cumsum(0)
    wrapper.plan(indptr, indptr, 6, 2, 64, custom_mask=mask, fixed_split_size=fixed_split_size)
    return wrapper


@pytest.mark.parametrize("fixed_split_size", [None, 128])
def test_a_wrapper_binds_memory_for_its_plan(fixed_split_size: int | None) -> None:
    """Uses a CPU plan: the kernel finds every unit in it, and stays within its memory."""
    mask = torch.tril(torch.ones(500, 500)).bool().ravel()
    wrapper = wrapper_with_mask(fixed_split_size, torch.cat([mask, mask]), [500, 500])
    planner = wrapper._planner
    option_plan = planner.active[0]
    tiles = option_plan.mask_tiles
    params = tiles.params
    option_plan.mask_tiles.bind(planner.batch, option_plan.prepared, option_plan.slot)
    cells = tiles.cells.tensor
    native().find_mask_tiles(ctypes.byref(params), 3)
    num_units = int(cells[0]) & 0xFFFFFFFF
    assert num_units == int(option_plan.make_plan().work_items()["num_units"].sum())
    assert params.queue_begin + 4 * num_units <= params.list_begin < params.lanes_begin < cells.numel()
    option_plan.mask_tiles.bind(planner.batch, option_plan.prepared, option_plan.slot)
    assert tiles.cells.tensor is cells, "every layer uses the same memory"


def test_graph_mode_has_memory_for_the_largest_batch() -> None:
    """Later plans do not change the arguments of a captured launch."""
    buffers = {"qo_indptr_buf": torch.zeros(3, dtype=torch.int32), "kv_indptr_buf": torch.zeros(3, dtype=torch.int32)}
    mask_buffer = torch.zeros(80000, dtype=torch.uint8)
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(
        float_workspace_buffer=torch.empty(1 << 20, dtype=torch.uint8),
        use_cuda_graph=True,
        **buffers,
        custom_mask_buf=mask_buffer,
        mask_indptr_buf=torch.zeros(3, dtype=torch.int32),
    )
    bound = []
    for q_lens in ([500, 500], [3, 700], [1, 1]):
        q_indptr = torch.tensor([0, *q_lens]).cumsum(0)
        wrapper.plan(q_indptr, q_indptr, 6, 2, 64, custom_mask=torch.ones(sum(q * q for q in q_lens)).bool())
        planner = wrapper._planner
        tiles = planner.active[0].mask_tiles
        tiles.bind(planner.batch, planner.active[0].prepared, planner.active[0].slot)
        params = tiles.params
        bound.append((bytes(params), tiles.lane_bits))
    assert len(set(bound)) == 1
    assert params.custom_mask == mask_buffer.data_ptr()
