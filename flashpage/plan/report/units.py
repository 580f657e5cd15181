"""A plan's bytes as numpy records, and sums over them: items of each CTA, units, loads, traffic."""

from __future__ import annotations

import dataclasses

import numpy as np

from ... import native
from ...kernels.options import Options
from ...native import records as plan_bytes

CTA_WORK_ITEM = np.dtype(
    [("cta", np.int32), *((name, plan_bytes.WORK_ITEM[name]) for name in plan_bytes.WORK_ITEM.names or ())]
)


@dataclasses.dataclass(frozen=True)
class PlanBytes:
    """The arrays of a plan as kernels read them; include/flashpage/plan/work_item.h documents the fields."""

    header: np.void
    ctas: np.ndarray  # plan_bytes.CTA_ITEMS [schedule's num_ctas]
    items: np.ndarray  # plan_bytes.WORK_ITEM [num_items]
    merges: np.ndarray  # plan_bytes.MERGE_ITEM [num_merges]

    @staticmethod
    def of(data: bytes, num_ctas: int) -> PlanBytes:
        header = np.frombuffer(data, plan_bytes.PLAN_HEADER, 1)[0]

        def records(kind: np.dtype, count: int, offset: int) -> np.ndarray:
            return np.frombuffer(data, kind, count, offset) if count else np.zeros(0, kind)

        return PlanBytes(
            header,
            records(plan_bytes.CTA_START, num_ctas, header.nbytes)["items"],
            records(plan_bytes.WORK_ITEM, int(header["num_items"]), int(header["items_offset"])),
            records(plan_bytes.MERGE_ITEM, int(header["num_merges"]), int(header["merges_offset"])),
        )

    def items_by_cta(self) -> np.ndarray:
        """CTA_WORK_ITEM: each CTA's items in the order of its work, with that CTA's KV heads, partials and merges."""
        count = self.ctas["end"] - self.ctas["begin"]
        cta, step = _runs(count)
        items = self.items[self.ctas["begin"][cta] + step]
        out = np.empty(len(cta), CTA_WORK_ITEM)
        out["cta"] = cta
        for name in items.dtype.names or ():
            out[name] = items[name]
        out["kv_head"] += self.ctas["kv_head"][cta]
        is_cut = items["partial_row"] >= 0
        out["partial_row"] += np.where(is_cut, self.ctas["partial_row"][cta], 0)
        out["merge"] += np.where(is_cut, self.ctas["place"][cta].astype(np.int32) * self.header["merges_of_place"], 0)
        return out


@dataclasses.dataclass(frozen=True)
class Units:
    """The units of all items, one row each: a row tile of one KV head over one token range."""

    item: np.ndarray  # index in items_by_cta
    rows: np.ndarray  # packed rows
    tokens: np.ndarray  # visible to any row
    pairs: np.ndarray  # visible (packed row, token) pairs; heads of a query row in two units count in one


def units_of(items: np.ndarray, options: Options, tile_q: int) -> Units:
    """Expands items to units, and clips every unit as the kernel does."""
    item, step = _runs(items["num_units"])
    group = options.group_size
    q_len, kv_len = items["q_len"].astype(np.int64)[item], items["kv_len"].astype(np.int64)[item]
    tiles = -(-q_len * group // tile_q)
    first = (items["first_packed_row"][item] // tile_q + step) % tiles * tile_q
    rows = np.minimum(tile_q, q_len * group - first)
    begin, end = items["kv_begin"].astype(np.int64)[item], items["kv_end"].astype(np.int64)[item]
    shift = kv_len - q_len
    first_q, last_q = first // group, (first + rows - 1) // group
    if options.causal:
        end = np.minimum(end, np.maximum(0, shift + last_q + 1))
    if options.window_left >= 0:
        begin = np.maximum(begin, shift + first_q - options.window_left)
    end = np.maximum(begin, end)
    # Visible tokens of each query row, from one clipped edge to the other; all heads of a row see the same tokens.
    count = last_q - first_q + 1
    seen = end * count
    if options.causal:
        seen = _sum_clipped(shift + first_q + 1, count, begin, end)
    hidden = begin * count
    if options.window_left >= 0:
        hidden = _sum_clipped(shift + first_q - options.window_left, count, begin, end)
    return Units(item, rows, end - begin, np.maximum(0, seen - hidden) * rows // count)


def _sum_clipped(first: np.ndarray, count: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Sum of first, first + 1, ... (`count` numbers), each clipped to low..high."""
    below, up_to_high = np.clip(low - first, 0, count), np.clip(high - first, 0, count)
    inside = up_to_high - below
    rising = inside * (first + below) + inside * (inside - 1) // 2
    return below * low + rising + (count - up_to_high) * high


def item_costs(items: np.ndarray, units: Units, options: Options, schedule: native.Schedule) -> np.ndarray:
    """Nanoseconds of each item by the planner's cost model."""
    per_unit = np.where(items["piece"][units.item] > 0, schedule.ns_per_piece, schedule.ns_per_unit)
    has_few_rows = items["q_len"][units.item] * options.group_size <= schedule.tile_q // 2
    per_token = schedule.ns_per_token * np.where(has_few_rows, schedule.few_rows_cost, 1.0)
    costs = per_unit + per_token * units.tokens
    is_only = (items["partial_row"] < 0) & (items["q_len"] * options.group_size <= schedule.tile_q)
    costs = np.where(is_only[units.item], np.maximum(costs, schedule.least_ns_of_unit), costs)
    return np.bincount(units.item, costs, len(items))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The least that one run must move and compute."""

    kv_bytes: int  # each visible token of K and V once
    row_bytes: int  # q read, out written
    partial_bytes: int  # written, then read by the merge
    flops: int

    @property
    def bytes(self) -> int:
        return self.kv_bytes + self.row_bytes + self.partial_bytes


def traffic_of(items: np.ndarray, units: Units, options: Options, num_partial_rows: int) -> Traffic:
    token_bytes = options.token_bytes
    row_bytes = options.head_dim_qk * options.q_dtype.size + options.head_dim_vo * options.out_dtype.size
    _requests, index = np.unique(items["request"], return_index=True)
    kv_lens, q_lens = items["kv_len"][index].astype(np.int64), items["q_len"][index].astype(np.int64)
    if options.window_left >= 0:
        kv_lens = np.minimum(kv_lens, q_lens + options.window_left)
    return Traffic(
        kv_bytes=int(kv_lens.sum()) * options.num_kv_heads * token_bytes,
        row_bytes=int(q_lens.sum()) * options.num_q_heads * row_bytes,
        partial_bytes=2 * num_partial_rows * (options.head_dim_vo + 1) * 4,
        flops=2 * int(units.pairs.sum()) * (options.head_dim_qk + options.head_dim_vo),
    )


def _runs(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Run number and step within the run, for runs of `count` entries each."""
    run = np.repeat(np.arange(len(count)), count)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
