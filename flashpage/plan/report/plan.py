"""The public Plan: the decisions of `plan`, item by item, with reasons; `plan_lengths` plans without a wrapper."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import native
from ...base.checks import shown, whole
from ...base.dtypes import DType
from ...base.errors import PlanError
from ...base.text import counted
from ...kernels import choose, devices
from ...kernels.context_lengths import ContextLengths
from ...kernels.devices import Device
from ...kernels.options import SPLIT_NEVER, Options, check_options
from ...kernels.schedules import NO_CLUSTERS, Clusters
from ...kernels.spec import KernelSpec
from ...kernels.tile import Cost, Tile
from ...kernels.work import Problem
from .on_card import plan_arrays, schedule_on_card
from .page import Fact, frame, page
from .picture import Segment, svg, terminal
from .units import PlanBytes, Traffic, Units, item_costs, traffic_of, units_of

_MOST_ITEMS_IN_NOTEBOOKS = 100_000
_PRODUCTS_REACHED = 0.8  # share of datasheet flops: 788 of 989 TFLOP/s on an H200 (cuBLAS, bf16, 8192^3)


class Plan:
    """One planned batch, read from the bytes that the kernels read, so it shows exactly what runs."""

    def __init__(
        self,
        problem: Problem,
        schedule: native.Schedule,
        result: native.PlanResult,
        data: bytes,
        *,
        spec: KernelSpec | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.options: Options = problem.options
        self.schedule = schedule
        self.result = result
        self.spec = spec
        self.notes = tuple(notes)
        self.num_ctas = schedule.num_ctas
        self._bytes = PlanBytes.of(data, schedule.num_ctas)

    def __repr__(self) -> str:
        result = self.result
        return f"<Plan: {result.num_items} work items, {result.num_merges} merges, {result.num_ctas} CTAs>"

    @functools.cached_property
    def _items(self) -> np.ndarray:
        return self._bytes.items_by_cta()

    @functools.cached_property
    def _units(self) -> Units:
        return units_of(self._items, self.options, self.schedule.tile_q)

    @functools.cached_property
    def _costs(self) -> np.ndarray:
        return item_costs(self._items, self._units, self.options, self.schedule)

    def work_items(self) -> np.ndarray:
        """The work items as a structured array, one row a (CTA, work item), in the order of each CTA's work.

        Fields: `cta`, and those of WorkItem: request, q_begin, q_len, kv_len, first_packed_row, kv_head, num_units,
        kv_begin, kv_end, partial_row (-1: not cut), piece, kv_offset, mask_offset, merge (the first of its rows in
        merge_items(); -1: not cut).
        """
        return self._items.copy()

    def merge_items(self) -> np.ndarray:
        """A structured array: the packed rows whose partial results are merged, and the places of the partials."""
        return self._bytes.merges.copy()

    def cta_loads(self) -> np.ndarray:
        """Nanoseconds of each CTA by the planner's cost model, [schedule's CTAs]."""
        return np.bincount(self._items["cta"], self._costs, self.num_ctas)

    def traffic(self) -> Traffic:
        """The bytes and floating-point operations of one run."""
        partial_rows = 0 if self.result.cluster_size else self.result.num_partial_rows
        return traffic_of(self._items, self._units, self.options, partial_rows)

    def explain(self, device: str = "H200") -> str:
        """Reasons for the kernel, tile and split; the CTAs' load; bytes, flops and the least time of a run on `device`.

        `device`: a card of kernels/devices.py or a driver's name of one; other cards get no least time.
        """
        return "\n".join([*self.notes, *self._explain_split(), *self._explain_loads(), *self._explain_floor(device)])

    def _explain_split(self) -> list[str]:
        schedule, items = self.schedule, self._items
        heads = self.options.num_kv_heads
        if size := self.result.cluster_size:
            of_unit = "a CTA of its own" if size == 1 else f"{size} neighbouring CTAs of its own"
            taken = f"each unit has {of_unit}"
        elif not schedule.heads_on_axis:
            taken = f"{heads} neighbouring CTAs take the {heads} KV heads of one token range at the same step"
        elif schedule.are_claimed:
            taken = "CTAs claim (KV head, row tile) units, those that see the most tiles first"
        elif self._has_whole_units():
            taken = "each (KV head, row tile) unit by itself, the longest ones first"
        elif self._has_dealt_tail():
            taken = "each CTA takes a run of (KV head, row tile) units, then some of the last ones, the longest first"
        else:
            taken = "each CTA takes a run of (KV head, row tile) units"
        cut = items[items["partial_row"] >= 0]
        units = len(np.unique(cut[["request", "kv_head", "first_packed_row"]]))
        if schedule.fixed_piece_tokens > 0:
            split = f"batch-invariant: every unit is cut at multiples of {schedule.fixed_piece_tokens} tokens"
        elif schedule.fixed_piece_tokens < 0:
            split = "no unit is cut, as requested"
        elif self.result.cluster_size:
            split = "equal pieces, as there are few units" if self.result.num_partial_rows else "no unit is cut"
        elif schedule.are_claimed and not len(cut):
            split = "no unit is cut: a CTA that is done claims the next unit"
        elif self._has_whole_units() or self._has_dealt_tail():
            split = f"no unit is cut: merging would take {_time(schedule.ns_per_merge)}"
        else:
            split = f"cut where a piece ({_time(schedule.ns_per_piece)}) costs less than the imbalance it removes"
        pieces = f"{counted(units, 'unit')} cut into {counted(len(cut), 'piece')}"
        pieces += f"; {counted(self.result.num_partial_rows, 'partial row')}"
        merges = counted(self.result.num_merges, "merge item")
        if self.result.cluster_size > 1 and len(cut):
            merges = f"a unit's are merged inside a cluster of {self.result.cluster_size} CTAs"
        return [f"units: {taken}", f"split: {split}", f"split: {pieces}, {merges}"]

    def _has_whole_units(self) -> bool:
        """Whether each CTA has whole units only, dealt by include/flashpage/plan/whole_units.h or by chance."""
        return self._may_be_dealt() and bool((self._items["num_units"] == 1).all())

    def _has_dealt_tail(self) -> bool:
        """Whether a CTA's run of units is followed by units that lie before it on the axis, longest first."""
        items = self._items
        here, after = (items[part][["cta", "request", "kv_head"]] for part in (slice(-1), slice(1, None)))
        goes_back = (here == after) & (np.diff(items["first_packed_row"]) < 0)
        return self._may_be_dealt() and bool(goes_back.any())

    def _may_be_dealt(self) -> bool:
        """Whether the planner was free to deal units, and cut none."""
        schedule, items = self.schedule, self._items
        may_deal = schedule.heads_on_axis and schedule.ns_per_merge > 0 and schedule.fixed_piece_tokens == 0
        return may_deal and not schedule.are_claimed and bool(len(items) and (items["partial_row"] < 0).all())

    def _explain_loads(self) -> list[str]:
        loads, result = self.cta_loads(), self.result
        mean, most = float(loads.mean()), float(loads.max(initial=0.0))
        over = 100.0 * (most / mean - 1.0) if mean > 0.0 else 0.0
        working = len(np.unique(self._items["cta"]))
        return [
            f"work: {counted(len(self._units.item), 'unit')} in {counted(result.num_items, 'item')}, "
            f"{result.used_bytes} bytes of plan",
            f"load: {working} of {len(loads)} CTAs work; mean {_time(mean)}, costliest {_time(most)} "
            f"(+{over:.1f}%), by the cost model {_time(self.schedule.ns_per_unit)} a unit + "
            f"{self.schedule.ns_per_token:.3g} ns a token{self._few_rows_cost()}",
        ]

    def _few_rows_cost(self) -> str:
        schedule = self.schedule
        if schedule.few_rows_cost == 1.0:
            return ""
        return f" (x {schedule.few_rows_cost:.3g} of requests with at most {schedule.tile_q // 2} packed rows)"

    def _explain_floor(self, device: str) -> list[str]:
        traffic = self.traffic()
        lines = [
            f"bytes: {_size(traffic.bytes)} (KV {_size(traffic.kv_bytes)}, rows {_size(traffic.row_bytes)}, partials "
            f"{_size(traffic.partial_bytes)}); {traffic.flops / 1e9:.3g} GFLOP",
        ]
        if (card := devices.row_of(device)) is not None:
            memory, tensor = traffic.bytes / card.gbps, traffic.flops / (card.tflops * _PRODUCTS_REACHED * 1e3)
            bound = "memory" if memory > tensor else "tensor cores"
            other = " (this plan is for the CPU)" if self.spec is not None and self.spec.backend == "cpu" else ""
            lines.append(
                f"floor on {card.name}{other}: {_time(max(memory, tensor))}, bound by {bound} (memory {_time(memory)}, "
                f"tensor cores {_time(tensor)})"
            )
        return lines

    def segments(self) -> list[Segment]:
        """The segments that pictures draw, one for each (CTA, work item)."""
        items, costs = self._items, self._costs
        ends = np.cumsum(costs)
        starts = ends - costs
        first = np.searchsorted(items["cta"], items["cta"])
        starts, ends = starts - starts[first], ends - starts[first]
        columns = (items["cta"], items["request"], starts, ends, items["partial_row"] >= 0)
        return [Segment(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def picture(self, width: int = 100, *, max_rows: int = 40, color: bool | None = None) -> str:
        """The plan as text for a terminal: CTAs as rows, work items coloured by request.

        `color` None: colours if stdout is a terminal. Without, letters stand for requests, capitals for cut units.
        """
        return terminal(self.segments(), self.num_ctas, width, max_rows, color)

    def to_svg(self, path: str | Path) -> None:
        """Draws the plan to a file: CTAs as rows, time to the right, one colour a request, an edge around each item."""
        Path(path).write_text(svg(self.segments(), self.num_ctas, repr(self)[1:-1]))

    def to_html(self, path: str | Path, device: str = "H200") -> None:
        """Writes the plan as one page that needs no network: its work items on hover, search for a request, zoom, and
        the reasons of `explain(device)`."""
        Path(path).write_text(self._page(device))

    def _repr_html_(self) -> str:
        """The page, for notebooks; a large plan is named only, as its page would be larger than the notebook."""
        if self.result.num_items > _MOST_ITEMS_IN_NOTEBOOKS:
            return f"<code>{repr(self)[1:-1]}: Plan.to_html(path) writes it as a page</code>"
        return frame(self._page("H200"))

    def _page(self, device: str) -> str:
        items, group = self._items, self.options.group_size
        title = f"Plan of {counted(len(np.unique(items['request'])), 'request')} on {counted(self.num_ctas, 'CTA')}"
        return page(title, items, self._costs, self.num_ctas, group, self._facts(), self.explain(device))

    def _facts(self) -> list[Fact]:
        """Numbers above the page's picture, among them the cost of cuts and of their merges."""
        loads, items, traffic = self.cta_loads(), self._items, self.traffic()
        mean, most = float(loads.mean()), float(loads.max(initial=0.0))
        over = f"{100.0 * (most / mean - 1.0):.1f}% above the mean of {_time(mean)}" if mean else "no work"
        is_cut = items["partial_row"] >= 0
        starts = float(self.schedule.ns_per_piece) * int((items["piece"] > 0).sum())
        whole = items[["request", "kv_head", "first_packed_row"]]
        _, unit = np.unique(whole, return_inverse=True)
        uncut = max(mean, float(np.bincount(unit, self._costs).max(initial=0.0)))
        return [
            Fact(_time(most), f"the longest CTA, {over}"),
            Fact(_time(uncut), "at least, if no unit were cut"),
            Fact(f"{int(is_cut.sum())} of {len(items)}", "work items that are pieces of cut units"),
            Fact(_time(starts / max(1, self.num_ctas)), f"a CTA for the starts of pieces, {_time(starts)} in all"),
            Fact(f"{self.result.num_merges}", f"merges of {counted(self.result.num_partial_rows, 'partial row')}"),
            Fact(_size(traffic.partial_bytes), f"of partial results, of {_size(traffic.bytes)} in all"),
        ]


def plan_lengths(
    q_lens: Sequence[int] | None,
    kv_lens: Sequence[int],
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    *,
    head_dim_vo: int | None = None,
    page_size: int = 16,
    num_ctas: int | None = None,
    causal: bool = True,
    window_left: int = -1,
    backend: str = "cuda",
    card: Device | None = None,
    dtype: DType = DType.BFLOAT16,
    fixed_piece_tokens: int = 0,
    tile: Tile | None = None,
    cost: Cost | None = None,
    clusters: Clusters = NO_CLUSTERS,
) -> Plan:
    """Plans lengths on the host: no wrapper, no device, no kernel.

    `q_lens` None: one row for each request (decode). `tile`, `cost`: default to the backend's (kernels/tile.py).
    `page_size` 0: ragged. `card`: a row of kernels/devices.py (default: H200 for cuda). `num_ctas`: CTAs of the usual
    tile (default: as many as the card runs at once; on the CPU four a thread). `clusters`: those that the card runs at
    once; without them no unit gets CTAs of its own. PlanError if the lengths do not fit together.
    The result is one plan, even where a card would divide a mixed batch into two parts (plan/mixed_batch.py).
    """
    kv_lens = _lengths("kv_lens", kv_lens)
    rows = [1] * len(kv_lens) if q_lens is None else _lengths("q_lens", q_lens)
    if len(rows) != len(kv_lens):
        raise PlanError(f"q_lens has {len(rows)} entries but kv_lens has {len(kv_lens)}: pass one of each a request.")
    kinds = {"card": (card, Device), "tile": (tile, Tile), "cost": (cost, Cost), "clusters": (clusters, Clusters)}
    for name, (value, kind) in kinds.items():
        if value is not None and not isinstance(value, kind):
            raise PlanError(f"{name}={shown(value)} is a {type(value).__name__}: pass a {kind.__name__}, or leave it.")
    if not isinstance(backend, str) or backend not in ("cuda", "cpu"):
        raise PlanError(f"backend={shown(backend)} is unknown: pass 'cuda' or 'cpu'.")
    num_ctas = num_ctas if num_ctas is None else whole("num_ctas", num_ctas, 1)
    page_size = whole("page_size", page_size, 0)
    try:
        options = check_options(
            kv_source="paged" if page_size else "ragged",
            num_qo_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim_vo,
            page_size=page_size,
            q_data_type=dtype,
            kv_data_type=dtype,
            o_data_type=dtype,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=None,
            pos_encoding_mode="NONE",
            has_mask=False,
            variant=None,
            fixed_split_size=None,
            disable_split_kv=False,
            uniform_q_len=1 if q_lens is None else 0,
            dim_names=("head_dim", "head_dim_vo"),
        )
    except PlanError as error:
        error.use_names({"num_qo_heads": "num_q_heads", "q_data_type": "dtype"})
        raise
    pieces = whole("fixed_piece_tokens", fixed_piece_tokens, SPLIT_NEVER)
    options = dataclasses.replace(options, fixed_piece_tokens=pieces)
    card = (card or devices.H200) if backend == "cuda" else devices.CPU
    contexts = ContextLengths(options, card).of(rows, kv_lens)
    problem = Problem(options, choose.packed_rows(options, len(rows), sum(rows)), contexts=contexts)
    choice, schedule = schedule_on_card(problem, card, num_ctas, tile=tile, cost=cost, clusters=clusters)
    result, data = plan_arrays(options, schedule, rows, kv_lens)
    tile_note = (
        f"tile {schedule.tile_q} packed rows x {schedule.tile_kv} tokens, "
        f"for about {problem.packed_rows} packed rows a request and KV head"
    )
    others = (note for note in choice.reasons if not note.startswith("tile "))
    notes = (*others, tile_note)
    return Plan(problem, schedule, result, data, spec=choice.spec, notes=notes)


def _lengths(name: str, values: Any) -> list[int]:
    """Checked lengths of requests."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise PlanError(f"{name}={shown(values)} is a {type(values).__name__}: pass a list of integers.")
    return [whole(f"{name}[{i}]", value, 0) for i, value in enumerate(values)]


def _time(ns: float) -> str:
    for limit, unit in ((1e3, "ns"), (1e6, "us"), (1e9, "ms")):
        if ns < limit:
            return f"{ns / limit * 1e3:.3g} {unit}"
    return f"{ns / 1e9:.3g} s"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
