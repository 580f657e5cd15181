"""Custom masks of the Hopper prefill kernel, on the host: the kernel that looks for tiles and queues units, the tiles
that loading warps visit, and the bits of a mixed tile, each against numpy."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_build import mask_tiles as native
from planner_batches import RUNS, Batch, Cutting, Planned, arrays_of, bounds, call, problem_of, unpack

import flashpage
from flashpage import host

TOKENS = (48, 80, 128)  # of a tile
GUARD = 2**64 - 1


@dataclasses.dataclass(repr=False)
class Masked:
    """A batch with masks, its plan, and what the kernel makes of the two."""

    planned: Planned
    masks: list[np.ndarray]  # per request [q_len, kv_len] bool
    mask_bytes: np.ndarray  # with garbage before and behind
    params: host.MaskTilesParams
    cells: np.ndarray  # uint64
    behind: np.ndarray
    plan_bytes: np.ndarray

    @staticmethod
    def make(batch: Batch, cutting: Cutting, masks: list[np.ndarray], first_byte: int) -> Masked:
        arrays = arrays_of(batch)
        problem = problem_of(batch, arrays)
        status, plan_bytes, result = call(problem, cutting, bounds(batch, cutting)[0])
        assert status == host.OK, host.last_error()
        planned = unpack(batch, cutting, plan_bytes, result)
        packed = [
            np.packbits(np.append(mask.ravel(), np.ones(-mask.size % 8, bool)), bitorder="little") for mask in masks
        ]
        garbage = np.full(8, 0b10110101, np.uint8)
        mask_bytes = np.concatenate([garbage[: 4 + first_byte], *packed, garbage])
        assert mask_bytes.ctypes.data % 4 == 0
        params = host.MaskTilesParams()
        count = host.load().fp_mask_cells(
            *(result.mask_bytes, result.total_q, len(masks), batch.num_q_heads, batch.num_kv_heads),
            *(ctypes.byref(cutting.struct()), ctypes.byref(params)),
        )
        memory = np.full(count + 2, GUARD, np.uint64)
        memory = memory[memory.ctypes.data // 8 % 2 :]  # starts on 16 bytes
        cells, behind = memory[:count], memory[count:]
        cells[:2] = 0
        params.plan, params.custom_mask = plan_bytes.ctypes.data, mask_bytes.ctypes.data + 4 + first_byte
        params.cells, params.group = cells.ctypes.data, host.make_fast_div(batch.group)
        params.tile_q, params.tile_kv = cutting.tile_q, cutting.tile_kv
        return Masked(planned, masks, mask_bytes, params, cells, behind, plan_bytes)

    def find(self, grid: int) -> None:
        native().find_mask_tiles(ctypes.byref(self.params), grid)
        assert self.behind[0] == GUARD, "wrote past the memory"

    def item_of(self, request: int) -> np.ndarray:
        items = self.planned.items
        return items[items["request"] == request][:1]

    def cell(self, request: int, row_block: int) -> int:
        item = self.item_of(request)
        return native().tile_cell(ctypes.byref(self.params), ctypes.c_void_p(item.ctypes.data), int(row_block))

    def expected(self, request: int, row_block: int) -> tuple[np.ndarray, np.ndarray]:
        """Visible and mixed, a truth value for each tile."""
        cutting, mask = self.planned.cutting, self.masks[request]
        first = row_block * cutting.tile_q
        last = min(first + cutting.tile_q, len(mask) * self.planned.batch.group) - 1
        rows = mask[first // self.planned.batch.group : last // self.planned.batch.group + 1]
        tiles = [rows[:, i : i + cutting.tile_kv] for i in range(0, mask.shape[1], cutting.tile_kv)]
        return np.array([t.any() for t in tiles], bool), np.array([not t.all() for t in tiles], bool)

    def row_blocks(self, request: int) -> int:
        return -(-len(self.masks[request]) * self.planned.batch.group // self.planned.cutting.tile_q)


def mask_of(kind: str, rows: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    row, token = np.arange(rows)[:, None], np.arange(tokens)[None]
    if kind == "causal":
        return token <= tokens - rows + row
    if kind == "blocks":
        size = int(rng.integers(1, 300))
        return row // size == token // size
    if kind == "islands":
        return rng.random((rows // 40 + 1, tokens // 200 + 1))[row // 40, token // 200] < 0.2
    return rng.random((rows, tokens)) < {"random": 0.5, "sparse": 0.001, "nothing": -1.0, "everything": 2.0}[kind]


KINDS = ("causal", "blocks", "islands", "random", "sparse", "nothing", "everything")


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
        *(q_lens, kv_lens, num_kv_heads * group, num_kv_heads),
        page_size=0,
        has_custom_mask=True,
        q_start=draw(st.integers(0, 3)),
        window_left=draw(st.sampled_from((-1, 200))),
    )
    cutting = Cutting(
        num_ctas=draw(st.sampled_from((1, 5, 132, 600))),
        walk=RUNS,
        tile_q=draw(st.sampled_from((64, 128))),
        tile_kv=draw(st.sampled_from(TOKENS)),
        wave_tokens=draw(st.sampled_from((0, 500))),
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
    taken: list[int] = [0, 1]
    for request in range(len(masked.masks)):
        for block in range(masked.row_blocks(request)):
            visible, mixed = masked.expected(request, block)
            words = -(-len(visible) // 32)
            cells = range(cell := masked.cell(request, block), cell + words)
            taken += cells
            found = masked.cells[cell : cell + words].view(np.uint32).reshape(words, 2)
            bits = np.unpackbits(found.T.copy().view(np.uint8), bitorder="little").reshape(2, -1)
            assert (bits[:, : len(visible)] == (visible, mixed)).all(), (request, block)
            assert not bits[:, len(visible) :].any()
    assert len(taken) == len(set(taken)), "two row blocks share a cell"
    assert max(taken) < masked.params.queue_begin


@examples
@given(masked_batches(), st.sampled_from((1, 2)))
def test_units_are_queued_once_and_the_long_ones_first(masked: Masked, grid: int) -> None:
    for _ in range(2):  # the second run finds what the first one left
        masked.find(grid)
    planned, tile_q, tile_kv = masked.planned, masked.planned.cutting.tile_q, masked.planned.cutting.tile_kv
    num_units, claimed, arrived, _ = masked.cells[:2].view(np.uint32)
    expected = []
    for cta in planned.ctas:
        for index in range(cta["begin"], cta["end"]):
            item = planned.items[index]
            blocks = masked.row_blocks(item["request"])
            partial_row = item["partial_row"] + (cta["partial_row"] if item["partial_row"] >= 0 else 0)
            for unit in range(item["num_units"]):
                at = item["first_packed_row"] // tile_q + unit
                expected.append((index, at % blocks, item["kv_head"] + cta["kv_head"] + at // blocks, partial_row))
    assert (num_units, claimed, arrived) == (len(expected), 0, 0)
    queue = masked.cells[masked.params.queue_begin :][: 4 * num_units].view(np.int32).reshape(num_units, 8)
    assert sorted(map(tuple, queue[:, :4].tolist())) == sorted(expected)
    fewest = np.inf
    for index, block, _, _, cell, *_ in queue:
        item = planned.items[index]
        assert cell == masked.cell(item["request"], block)
        visible, _ = masked.expected(item["request"], block)
        count = visible[item["kv_begin"] // tile_kv : -(-item["kv_end"] // tile_kv)].sum()
        assert count <= fewest * 1.125 + 0.5
        fewest = min(fewest, count)


class Visited(ctypes.Structure):
    _fields_ = [("first_token", ctypes.c_int32), ("is_last", ctypes.c_int16), ("is_mixed", ctypes.c_int16)]


@examples
@given(
    st.integers(0, 4000).flatmap(lambda tiles: st.tuples(st.just(tiles), st.integers(0, tiles), st.integers(0, tiles))),
    st.sampled_from((0.0, 0.001, 0.05, 0.9)),
    st.integers(0, 99),
)
def test_visible_tiles_are_visited(sizes: tuple[int, int, int], density: float, seed: int) -> None:
    """More tiles than a warp takes at a time, and units that begin anywhere."""
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
    expected = [(tile * 80, bool(hidden[tile])) for tile in range(begin, min(tiles, begin + count)) if visible[tile]]
    if not expected:
        expected = [(begin * 80, True)]
    if tiles == 0:  # reads a cell that nobody wrote; the tile is hidden by its range
        assert found == 1 and visited[0].first_token == 0
        return
    assert [(v.first_token, bool(v.is_mixed)) for v in visited[:found]] == expected
    assert [bool(v.is_last) for v in visited[:found]] == [False] * (len(expected) - 1) + [True]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("window_left", [-1, 30])
@pytest.mark.parametrize("group", [1, 3])
def test_bits_of_a_mixed_tile(tokens: int, window_left: int, group: int) -> None:
    """Of a row's last tile too, whose bits end inside a word, and of rows that start at any bit."""
    rng = np.random.default_rng(0)
    q_len, kv_len = 77, 301
    batch = Batch(
        np.array([5, q_len]), np.array([3, kv_len]), group, 1, 0, window_left=window_left, has_custom_mask=True
    )
    masks = [mask_of("random", int(q), int(kv), rng) for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True)]
    cutting = Cutting(num_ctas=1, walk=RUNS, tile_q=128, tile_kv=tokens)
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
                    *(ctypes.byref(params), ctypes.c_void_p(item.ctypes.data), 128, 0, 0, first_row, first, tokens),
                    ctypes.c_void_p(visible.ctypes.data),
                )
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
    """A CPU's plan serves: what the kernel finds there is every unit, and no more memory is used than there is."""
    mask = torch.tril(torch.ones(500, 500)).bool().ravel()
    wrapper = wrapper_with_mask(fixed_split_size, torch.cat([mask, mask]), [500, 500])
    planner = wrapper._planner
    combination = planner.active[0]
    params = host.MaskTilesParams()
    tiles = combination.mask_tiles
    tiles.bind(params, planner, combination)
    cells = tiles._cells
    native().find_mask_tiles(ctypes.byref(params), 3)
    num_units = int(cells[0]) & 0xFFFFFFFF
    assert num_units == int(combination.make_plan().work_items()["num_units"].sum())
    assert params.queue_begin + 4 * num_units <= cells.numel()
    tiles.bind(params, planner, combination)
    assert tiles._cells is cells, "the same memory for every layer"


def test_graph_mode_has_memory_for_the_largest_batch() -> None:
    """What a captured launch is given stays the same, whatever is planned later."""
    buffers = {"qo_indptr_buf": torch.zeros(3, dtype=torch.int32), "kv_indptr_buf": torch.zeros(3, dtype=torch.int32)}
    mask_buffer = torch.zeros(80000, dtype=torch.uint8)
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(
        *(torch.empty(1 << 20, dtype=torch.uint8), "NHD", True),
        **buffers,
        custom_mask_buf=mask_buffer,
        mask_indptr_buf=torch.zeros(3, dtype=torch.int32),
    )
    bound = []
    for q_lens in ([500, 500], [3, 700], [1, 1]):
        q_indptr = torch.tensor([0, *q_lens]).cumsum(0)
        wrapper.plan(q_indptr, q_indptr, 6, 2, 64, custom_mask=torch.ones(sum(q * q for q in q_lens)).bool())
        planner = wrapper._planner
        params = host.MaskTilesParams()
        planner.active[0].mask_tiles.bind(params, planner, planner.active[0])
        bound.append((bytes(params), params.cells))
    assert len(set(bound)) == 1
    assert params.custom_mask == mask_buffer.data_ptr()
