"""A batch, how to cut it, and the plan that the host library makes of them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np

from flashpage import native
from flashpage.native import records as plan_bytes


@dataclasses.dataclass
class Batch:
    """The lengths of a batch, and what its rows see."""

    q_lens: np.ndarray
    kv_lens: np.ndarray
    num_q_heads: int = 32
    num_kv_heads: int = 8
    page_size: int = 16
    causal: bool = False
    window_left: int = -1
    chunk: int = 0
    has_custom_mask: bool = False
    has_mask_tiles: bool = False
    q_start: int = 0
    kv_start: int = 0
    least_rows: int = 0  # of the requests that the plan serves
    most_rows: int = 0  # 0: any number

    @property
    def served_q_lens(self) -> np.ndarray:
        """Rows that the plan covers."""
        is_served = (self.q_lens >= self.least_rows) & ((self.q_lens <= self.most_rows) | (self.most_rows == 0))
        return np.where(is_served, self.q_lens, 0)

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads


@dataclasses.dataclass
class Cutting:
    """fp_schedule with defaults near the sm80 kernel's."""

    num_ctas: int = 132
    heads_on_axis: bool = False
    tile_q: int = 16
    tile_kv: int = 64
    ns_per_token: float = 3.6
    ns_per_unit: float = 400.0
    least_ns_of_unit: float = 0.0
    few_rows_cost: float = 1.0
    ns_per_piece: float = 1500.0
    ns_per_merge: float = 0.0
    min_piece_tokens: int = 128
    max_pieces: int = 0
    fixed_piece_tokens: int = 0
    merge_rows: int = 8
    row_jobs: int = 1
    wave_tokens: int = 0
    are_claimed: int = 0
    clusters: tuple[int, ...] = (0,) * 5
    cluster_rows: int = 0
    cluster_piece_tokens: int = 0
    full_speed_share: float = 1.0
    ns_per_cluster_unit: float = 0.0
    ns_per_cluster_merge: float = 0.0

    def struct(self) -> native.Schedule:
        return native.Schedule(**dataclasses.asdict(self))


@dataclasses.dataclass
class Planned:
    batch: Batch
    cutting: Cutting
    result: native.PlanResult
    header: np.void
    ctas: np.ndarray
    firsts: np.ndarray  # the first item of each CTA, as that CTA reads it
    items: np.ndarray
    merges: np.ndarray
    arrivals: np.ndarray


def index_array(values: np.ndarray | None) -> native.IndexArray:
    if values is None:
        return native.IndexArray(None, 1, 0, 0)
    size = values.itemsize
    return native.IndexArray(values.ctypes.data, values.strides[0] // size, int(size == 8), len(values))


def indptr(lens: np.ndarray, start: int = 0) -> np.ndarray:
    return np.concatenate([[start], start + np.cumsum(lens, dtype=np.int64)])


def arrays_of(
    batch: Batch, dtype: type = np.int32, stride: int = 1, use_kv_lens: bool = False
) -> dict[str, np.ndarray | None]:
    """The index arrays that a caller would pass for these lengths."""
    pages = -(-batch.kv_lens // batch.page_size) if batch.page_size else batch.kv_lens
    last = batch.kv_lens - np.maximum(pages - 1, 0) * batch.page_size
    arrays = {
        "q_indptr": indptr(batch.q_lens, batch.q_start),
        "kv_indptr": indptr(pages, batch.kv_start),
        "last_page_len": last if batch.page_size and not use_kv_lens else None,
        "kv_lens": batch.kv_lens if use_kv_lens else None,
    }
    return {name: None if a is None else _spread(a, dtype, stride) for name, a in arrays.items()}


def _spread(values: np.ndarray, dtype: type, stride: int) -> np.ndarray:
    wide = np.full(max(1, len(values)) * stride, -(2**30), dtype)
    wide[::stride][: len(values)] = values
    return wide[::stride][: len(values)]


def problem_of(batch: Batch, arrays: dict[str, np.ndarray | None]) -> native.ProblemStruct:
    return native.ProblemStruct(
        len(batch.q_lens),
        0,
        *(index_array(arrays[name]) for name in ("q_indptr", "kv_indptr", "last_page_len", "kv_lens")),
        batch.page_size,
        batch.num_q_heads,
        batch.num_kv_heads,
        visibility_of(batch),
        int(batch.has_custom_mask),
        int(batch.has_mask_tiles),
        batch.least_rows,
        batch.most_rows,
    )


def visibility_of(batch: Batch) -> native.Visibility:
    return native.Visibility(int(batch.causal), batch.window_left, batch.chunk)


def call(problem: native.ProblemStruct, cutting: Cutting, capacity: int) -> tuple[int, np.ndarray, native.PlanResult]:
    buffer = np.full(capacity + 64, 0xA5, np.uint8)
    result = native.PlanResult()
    status = native.load().fp_plan(
        ctypes.byref(problem), ctypes.byref(cutting.struct()), buffer.ctypes.data, capacity, ctypes.byref(result)
    )
    assert (buffer[capacity:] == 0xA5).all(), "wrote past the buffer"
    return status, buffer, result


def plan(batch: Batch, cutting: Cutting, capacity: int | None = None, **forms: object) -> Planned:
    """Plans with exactly the capacities that fp_plan_bounds returns, which must be enough."""
    limit_bytes, limit_rows = bounds(batch, cutting)
    arrays = arrays_of(batch, **forms)
    status, buffer, result = call(problem_of(batch, arrays), cutting, limit_bytes if capacity is None else capacity)
    assert status == native.OK, native.last_error()
    assert result.num_partial_rows <= limit_rows
    return unpack(batch, cutting, buffer, result)


def unpack(batch: Batch, cutting: Cutting, buffer: np.ndarray, result: native.PlanResult) -> Planned:
    header = buffer[: plan_bytes.PLAN_HEADER.itemsize].view(plan_bytes.PLAN_HEADER)[0]

    def records(kind: np.dtype, offset: int, count: int) -> np.ndarray:
        return buffer[offset : offset + count * kind.itemsize].view(kind)

    starts = records(plan_bytes.CTA_START, header.nbytes, cutting.num_ctas)
    items = records(plan_bytes.WORK_ITEM, int(header["items_offset"]), int(header["num_items"]))
    merges = records(plan_bytes.MERGE_ITEM, int(header["merges_offset"]), int(header["num_merges"]))
    arrivals = records(np.dtype(np.uint32), int(header["merges_offset"]) + merges.nbytes, len(merges))
    return Planned(batch, cutting, result, header, starts["items"], starts["first"], items, merges, arrivals)


def bounds(batch: Batch, cutting: Cutting, one_row: bool = False) -> tuple[int, int]:
    plan_bytes, partial_rows = ctypes.c_int64(), ctypes.c_int64()
    status = native.load().fp_plan_bounds(
        len(batch.q_lens), 0 if one_row else max(1, int(batch.q_lens.sum())), int(batch.kv_lens.sum()),
        int(batch.kv_lens.max(initial=0)), batch.num_q_heads, batch.num_kv_heads,
        ctypes.byref(visibility_of(batch)), ctypes.byref(cutting.struct()),
        ctypes.byref(plan_bytes), ctypes.byref(partial_rows),
    )  # fmt: skip
    assert status == native.OK
    return plan_bytes.value, partial_rows.value


def typical_rows(q_lens: Sequence[int], kv_lens: Sequence[int], *, group: int = 1, window_left: int = -1) -> int:
    """The rows of a request by which a batch's kernel is chosen (csrc/plan/typical_rows.h)."""
    batch = Batch(np.array(q_lens), np.array(kv_lens), 2 * group, 2, window_left=window_left)
    arrays, parts = arrays_of(batch), native.Parts(most_few_rows=1 << 30)
    problem = problem_of(batch, arrays)
    native.load().fp_parts_count(ctypes.addressof(problem), ctypes.addressof(parts))
    assert parts.few_requests == sum(n > 0 for n in q_lens)
    found: int = parts.few_typical_rows
    return found
