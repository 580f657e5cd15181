"""Batches under a mask, and the tiles that the kernel finds for them on the host."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
from native_build import mask_tiles as native
from planner_batches import Batch, Cutting, Planned, arrays_of, bounds, call, problem_of, unpack

from flashpage import native as host

GUARD = 2**64 - 1
TOKENS = (48, 80, 128)  # in a tile
KINDS = ("causal", "blocks", "islands", "random", "sparse", "nothing", "everything")


@dataclasses.dataclass(repr=False)
class Masked:
    """A batch with masks, its plan, and memory for its tiles."""

    planned: Planned
    masks: list[np.ndarray]  # per request [q_len, kv_len] bool
    mask_bytes: np.ndarray  # with garbage before and after the masks
    params: host.MaskTilesParams
    cells: np.ndarray  # uint64
    after: np.ndarray
    plan_bytes: np.ndarray

    @staticmethod
    def make(batch: Batch, cutting: Cutting, masks: list[np.ndarray], first_byte: int) -> Masked:
        packed = [
            np.packbits(np.append(mask.ravel(), np.ones(-mask.size % 8, bool)), bitorder="little") for mask in masks
        ]
        garbage = np.full(8, 0b10110101, np.uint8)
        mask_bytes = np.concatenate([garbage[: 4 + first_byte], *packed, garbage])
        assert mask_bytes.ctypes.data % 4 == 0
        planned, plan_bytes = plan_of(batch, cutting)
        params, cells, after = memory_of(planned, tile_heads=1)
        params.plan, params.custom_mask = plan_bytes.ctypes.data, mask_bytes.ctypes.data + 4 + first_byte
        return Masked(planned, masks, mask_bytes, params, cells, after, plan_bytes)

    def find(self, grid: int) -> None:
        native().find_mask_tiles(ctypes.byref(self.params), grid)
        assert self.after[0] == GUARD, "wrote past the memory"

    def item_of(self, request: int) -> np.ndarray:
        items = self.planned.items
        return items[items["request"] == request][:1]

    def cell(self, request: int, row_tile: int, kv_head: int = 0) -> int:
        item = self.item_of(request)
        address = ctypes.c_void_p(item.ctypes.data)
        return native().tile_cell(ctypes.byref(self.params), address, int(row_tile), int(kv_head))

    def expected(self, request: int, row_tile: int, kv_head: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Visible and mixed: a boolean for each tile."""
        cutting, mask = self.planned.cutting, self.masks[request]
        first = row_tile * cutting.tile_q
        last = min(first + cutting.tile_q, len(mask) * self.planned.batch.group) - 1
        rows = mask[first // self.planned.batch.group : last // self.planned.batch.group + 1]
        tiles = [rows[:, i : i + cutting.tile_kv] for i in range(0, mask.shape[1], cutting.tile_kv)]
        return np.array([t.any() for t in tiles], bool), np.array([not t.all() for t in tiles], bool)

    def row_tiles(self, request: int) -> int:
        batch = self.planned.batch
        return -(-int(batch.q_lens[request]) * batch.group // self.planned.cutting.tile_q)

    def check_tiles(self) -> None:
        """Every row tile's mask tiles; each row tile has its own cells."""
        taken: list[int] = [0, 1]
        for request in range(len(self.planned.batch.q_lens)):
            for block in range(self.row_tiles(request)):
                for head in range(self.params.tile_heads):
                    visible, mixed = self.expected(request, block, head)
                    words = -(-len(visible) // 32)
                    cells = range(cell := self.cell(request, block, head), cell + words)
                    taken += cells
                    found = self.cells[cell : cell + words].view(np.uint32).reshape(words, 2)
                    bits = np.unpackbits(found.T.copy().view(np.uint8), bitorder="little").reshape(2, -1)
                    assert (bits[:, : len(visible)] == (visible, mixed)).all(), (request, block, head)
                    assert not bits[:, len(visible) :].any()
        assert len(taken) == len(set(taken)), "two row tiles share a cell"
        assert max(taken) < self.params.queue_begin

    def check_lanes(self) -> None:
        """The bits of every row of a mixed tile. Each lane has two of every eight tokens, in words of its own."""
        tokens, taken = self.planned.cutting.tile_kv, set()
        word = np.dtype(np.uint64 if tokens > 128 else np.uint32)
        memory, group = self.cells.view(np.uint8), self.planned.batch.group
        for request, mask in enumerate(self.masks):
            for block in range(self.row_tiles(request)):
                visible, hidden = self.expected(request, block)
                first = block * self.planned.cutting.tile_q
                last = min(first + self.planned.cutting.tile_q, len(mask) * group) - 1
                for row, tile in itertools.product(
                    range(first // group, last // group + 1), np.nonzero(visible & hidden)[0]
                ):
                    begin, end = (at := self.quad_at(request, row, int(tile))), at + 4 * word.itemsize
                    assert 8 * self.params.lanes_begin <= begin and end <= len(memory)
                    seen = np.zeros(8 * 4 * word.itemsize, bool)  # of the largest tile for a lane's word
                    seen[: min(tokens, mask.shape[1] - tile * tokens)] = mask[row, tile * tokens :][:tokens]
                    of_lanes = seen.reshape(-1, 4, 2).transpose(1, 0, 2).reshape(4, -1)
                    expected = np.packbits(of_lanes, axis=1, bitorder="little").reshape(-1)
                    assert (memory[begin:end] == expected).all(), (request, row, tile)
                    taken.add((request, row, tile, begin))
        assert len({t[:3] for t in taken}) == len({t[3] for t in taken}), "two rows share words"

    def quad_at(self, request: int, row: int, tile: int) -> int:
        item = self.item_of(request)
        return native().quad_at(ctypes.byref(self.params), ctypes.c_void_p(item.ctypes.data), row, tile)

    def check_queue(self) -> None:
        """Checks that every unit occurs once with its tiles, and that units with the most visible tiles come first."""
        planned, tile_q, tile_kv = self.planned, self.planned.cutting.tile_q, self.planned.cutting.tile_kv
        num_units, claimed, arrived, _ = self.cells[:2].view(np.uint32)
        expected = []
        for cta in planned.ctas:
            for index in range(cta["begin"], cta["end"]):
                item = planned.items[index]
                blocks = self.row_tiles(item["request"])
                partial_row = item["partial_row"] + (cta["partial_row"] if item["partial_row"] >= 0 else 0)
                for unit in range(item["num_units"]):
                    at = item["first_packed_row"] // tile_q + unit
                    expected.append((index, at % blocks, item["kv_head"] + cta["kv_head"] + at // blocks, partial_row))
        assert (num_units, claimed, arrived) == (len(expected), 0, 0)
        queue = self.cells[self.params.queue_begin :][: 4 * num_units].view(np.int32).reshape(num_units, 8)
        assert sorted(map(tuple, queue[:, :4].tolist())) == sorted(expected)
        fewest = np.inf
        for index, block, kv_head, _, cell, *_ in queue:
            item = planned.items[index]
            assert cell == self.cell(item["request"], block, kv_head)
            visible, _ = self.expected(item["request"], block, kv_head)
            count = visible[item["kv_begin"] // tile_kv : -(-item["kv_end"] // tile_kv)].sum()
            assert count <= fewest * 1.125 + 0.5
            fewest = min(fewest, count)


@dataclasses.dataclass(repr=False)
class FunctionMasked(Masked):
    """A batch whose mask is a function; `masks` are its values, [num_q_heads, q_len, kv_len] each."""

    ask: Callable[[host.MaskTilesParams, int], None] = lambda params, grid: None
    in_range: list[np.ndarray] = dataclasses.field(default_factory=list)  # what causal and window leave visible

    def find(self, grid: int) -> None:
        self.ask(self.params, grid)
        assert self.after[0] == GUARD, "wrote past the memory"

    def expected(self, request: int, row_tile: int, kv_head: int = 0) -> tuple[np.ndarray, np.ndarray]:
        cutting, group = self.planned.cutting, self.planned.batch.group
        seen, in_range = self.masks[request], self.in_range[request]
        if self.params.tile_heads == 1:
            kv_head = 0  # all heads see the same
        first = row_tile * cutting.tile_q
        packed = np.arange(first, min(first + cutting.tile_q, seen.shape[1] * group))
        rows, heads = packed // group, kv_head * group + packed % group
        visible, hidden = seen[heads, rows] & in_range[rows], ~seen[heads, rows] & in_range[rows]
        begins = range(0, seen.shape[2], cutting.tile_kv)
        of_tiles = [[part[:, i : i + cutting.tile_kv].any() for i in begins] for part in (visible, hidden)]
        return np.array(of_tiles[0], bool), np.array(of_tiles[1], bool)


def plan_of(batch: Batch, cutting: Cutting) -> tuple[Planned, np.ndarray]:
    """The plan and its bytes."""
    arrays = arrays_of(batch)  # kept alive: the struct has addresses
    problem = problem_of(batch, arrays)
    status, plan_bytes, result = call(problem, cutting, bounds(batch, cutting)[0])
    assert status == host.OK, host.last_error()
    return unpack(batch, cutting, plan_bytes, result), plan_bytes


def memory_of(planned: Planned, tile_heads: int) -> tuple[host.MaskTilesParams, np.ndarray, np.ndarray]:
    """The struct with its sizes, the cells that it needs, and the memory after them."""
    batch, result, params = planned.batch, planned.result, host.MaskTilesParams()
    masked = host.MaskedBatch(
        mask_bytes=result.mask_bytes,
        tile_cells=result.tile_cells,
        rows=result.total_q,
        requests=len(batch.q_lens),
        num_q_heads=batch.num_q_heads,
        num_kv_heads=batch.num_kv_heads,
        has_custom_mask=batch.has_custom_mask,
        tile_heads=tile_heads,
    )
    schedule = planned.cutting.struct()
    count = host.load().fp_mask_cells(ctypes.byref(masked), ctypes.byref(schedule), ctypes.byref(params))
    memory = np.full(count + 2, GUARD, np.uint64)
    memory = memory[memory.ctypes.data // 8 % 2 :]  # starts on 16 bytes
    memory[:2] = 0
    params.cells, params.causal, params.window_left = memory.ctypes.data, batch.causal, batch.window_left
    return params, memory[:count], memory[count:]


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
