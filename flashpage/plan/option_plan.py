"""One combination of options of a wrapper, and the plan it has for the present batch.

A wrapper has the combination that was planned, and one more for each set of run-time options (causal, window_left,
...) that asked for another plan or another kernel.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, TypeAlias

import torch

from .. import native
from ..base.errors import PlanError
from ..kernels import choose, devices
from ..kernels.context_classes import ContextLengths, Contexts
from ..kernels.devices import Device
from ..kernels.options import Options
from ..kernels.schedules import most_units, with_one_cluster_size
from ..kernels.schedules import schedule as schedule_of
from ..kernels.work import Problem
from ..variants.spec import VariantSpec
from . import gather_rows
from .batch import Batch
from .buffers import PlanSlot
from .mask_tiles import MaskTiles
from .mixed_batch import Part, Parts, largest_schedules, may_have_parts, most_few_rows
from .prepared_kernels import Prepared, trace
from .workspaces import Workspaces, partial_bytes

if TYPE_CHECKING:
    from .capacity import Capacity
    from .device_lengths import TableLengths
    from .report.plan import Plan

_ALL_MERGES = 2**31 - 1  # the launcher bounds the merge's grid itself
_MOST_PREPARED = 64  # classes of rows (powers of two) and variants
_HOW_TO_PASS = {"float": "to the constructor", "int": "with reset_workspace_buffer(float_workspace, int_workspace)"}


# Rows, variant, whether lengths are known, contexts, what its launches are fixed for, whether rows are gathered.
_Key: TypeAlias = tuple[int, VariantSpec | None, bool, Contexts, tuple[int, int] | None, bool]


class Combination:
    """Options, the slot that holds their plan, and the kernels for each class of rows met so far."""

    __slots__ = (
        *("_checked_for", "_fixed_for", "_context_lengths", "_frozen_rows", "_may_have_parts", "_parts", "_prepared"),
        *("_worth_gathering", "cluster_size", "fork", "gathered", "generation", "mask_tiles"),
        *("num_ctas", "num_merges", "options", "prepared", "second", "slot"),
    )

    def __init__(self, options: Options, card: Device) -> None:
        self.options = options
        self.slot: PlanSlot  # while it is active
        self.prepared: Prepared  # of a batch in two parts: the first one's
        self.second: Part | None = None  # of the present plan
        self.fork: int | None = None  # for runs of both parts, on a card
        self._may_have_parts = may_have_parts(options)
        self._parts: Parts | None = None  # known at the first batch whose requests differ in rows
        self.mask_tiles = MaskTiles()
        self.generation = 0  # of the wrapper's plan that this one belongs to
        self.num_ctas = self.num_merges = 0
        self.cluster_size = 0  # of the launch; 0: no clusters
        # Where a batch does not change the class of rows, it is known now.
        is_constant = options.uniform_q_len or options.is_batch_invariant
        self._frozen_rows = choose.packed_rows(options, 0, 0) if is_constant else 0
        self._context_lengths = ContextLengths(options, card)
        self._worth_gathering = gather_rows.Worth(options, card)
        self.gathered: gather_rows.Rows | None = None  # of the present plan; None: K and V are read where they are
        self._fixed_for: tuple[int, int] | None = None  # graph: requests and rows that its launches were made for
        self._prepared: dict[_Key, Prepared] = {}
        self._checked_for: tuple[Prepared, tuple[int, int]] | None = None  # a capacity, in workspaces of these sizes

    def plan(self, batch: Batch) -> None:
        """Plans the batch into the slot."""
        lengths = batch.lengths
        self.second = self.gathered = None
        if self._worth_gathering.may_be_for(batch.problem.batch, batch.rows):
            self.gathered = self._rows_to_gather(batch)
        self._prepare(batch)
        is_uneven = self._may_have_parts and lengths.least_rows != lengths.most_rows
        if not (is_uneven and self._plan_parts(batch)):
            self._plan_whole(batch)
            partial_rows = self.slot.result.num_partial_rows
            if self.gathered is not None and not self._has_room(batch.workspaces, self.gathered, partial_rows):
                self.gathered = None
                self._prepare(batch)
                self._plan_whole(batch)
                partial_rows = self.slot.result.num_partial_rows
            if partial_rows and partial_bytes(partial_rows, self.options.head_dim_vo) > batch.workspaces.float_bytes:
                raise self._too_many_partials(batch.workspaces, partial_rows)
        self.generation = batch.generation

    def _prepare(self, batch: Batch) -> None:
        """Takes the kernels for the batch, and has the struct say what is planned for."""
        options, problem = self.options, batch.problem
        requests, rows = problem.batch, batch.rows
        contexts = Contexts.USUAL
        if self._context_lengths.may_differ and not batch.is_graph:
            lengths = batch.lengths
            tokens = (lengths.kv_end - lengths.kv_begin) * max(1, options.page_size)
            contexts = self._context_lengths.of(requests, rows, tokens)
        gathers = self.gathered is not None
        self.prepared = prepared = self._prepared_for(batch, requests, rows, contexts=contexts, gathers=gathers)
        if batch.problem_of is not prepared:
            batch.problem_of = prepared
            problem.causal, problem.window_left = options.causal, options.window_left
            problem.num_q_heads, problem.num_kv_heads = options.num_q_heads, options.num_kv_heads
            problem.has_mask_tiles = prepared.choice.spec.mask_source == "function"

    def _rows_to_gather(self, batch: Batch) -> gather_rows.Rows | None:
        """Memory for the gathered rows, if the batch is worth gathering and the workspace has room. None too if lengths
        are given in addition to page numbers: some of the numbers are then unused, and may be anything."""
        lengths, problem = batch.lengths, batch.problem
        entries = lengths.kv_end - lengths.kv_begin
        is_known = not batch.is_graph and problem.kv_lens.data is None and gather_rows.runs_on(batch.device)
        if not is_known or not self._worth_gathering.is_for(problem.batch, batch.rows, entries):
            return None
        _, partial_lse = batch.workspaces.partials(self.options.head_dim_vo)
        rows = gather_rows.Rows.below(partial_lse, lengths.kv_begin, lengths.kv_end, self.options)
        return rows if self._has_room(batch.workspaces, rows, 0) else None

    def _has_room(self, workspaces: Workspaces, rows: gather_rows.Rows, partial_rows: int) -> bool:
        """Between the partial outputs, from the beginning of the workspace on, and their LSEs, which follow the last
        ones that there is room for."""
        partial_out, _ = workspaces.partials(self.options.head_dim_vo)
        return rows.k >= partial_out + partial_rows * self.options.head_dim_vo * 4

    def _plan_whole(self, batch: Batch) -> None:
        prepared, result = self.prepared, self.slot.result
        self.slot.plan(prepared, batch.stream, batch.names)
        if batch.is_graph:
            # A captured launch serves every later plan: all CTAs, which leave at once where the plan has less for them.
            self._take_shape_of_all(prepared)
        else:
            self.num_ctas, self.num_merges = result.num_ctas, result.num_merges
            self.cluster_size = result.cluster_size

    def _take_shape_of_all(self, prepared: Prepared) -> None:
        """Of launches that serve every plan."""
        self.num_ctas, self.num_merges = prepared.schedule.num_ctas, _ALL_MERGES
        self.cluster_size = prepared.cluster_size

    def _plan_parts(self, batch: Batch) -> bool:
        """Plans a batch of requests with few rows and requests with many in two, where that is better."""
        if batch.is_graph:  # what a graph launches is the same for all its batches
            return False
        if self._parts is None:
            self._parts = Parts(most_few_rows(self.options, batch.device))
            self._may_have_parts = self._parts.most_few_rows > 0
        parts = self._parts
        if not batch.lengths.least_rows <= parts.most_few_rows < batch.lengths.most_rows:
            return False
        # Neither reads K and V by pairs of CTAs: the other launch leaves SMs here and there.
        few, many = (self._prepared_for(batch, *sizes) for sizes in parts.count(batch.problem_address))
        if few.mask_tiles or many.mask_tiles:  # which one launch before looks for, with one plan
            return False
        room = batch.workspaces.partial_rows(self.options.head_dim_vo)
        found = parts.plan(self.slot, batch.stream, (self.prepared, few, many), room)
        if found is None:
            return False
        first, self.second = found
        self.fork, self.gathered = batch.fork.handle, None
        self.prepared = first.prepared
        self.num_ctas, self.num_merges = first.result.num_ctas, first.result.num_merges
        self.cluster_size = 0
        return True

    def plan_on_device(self, batch: Batch, tables: TableLengths, kernel: int | None) -> None:
        """Plans from lengths that live on the device, by a launch that a graph may capture; `kernel`: None on the
        CPU."""
        self.second = self.gathered = None
        self.prepared = prepared = self._prepared_for(batch, tables.batch, tables.max_rows, has_known_lengths=False)
        tables.take(self.options)
        self._check_tables(batch.workspaces, prepared, tables)
        self.slot.plan_tables(prepared, tables, kernel, batch.stream, batch.card.has_pdl)
        self._take_shape_of_all(prepared)
        self.generation = batch.generation

    def find_mask_tiles(self, batch: Batch) -> None:
        """Looks at the bits of the newest plan, once they are there."""
        self.mask_tiles.find(batch, self.prepared, self.slot)

    def bind_mask_tiles(self, batch: Batch) -> None:
        """For runs that look for the tiles themselves."""
        self.mask_tiles.bind(batch, self.prepared, self.slot)

    def _check_tables(self, workspaces: Workspaces, prepared: Prepared, tables: TableLengths) -> None:
        """The device cannot report an overflow, so the workspaces must fit the largest batch."""
        int_bytes, partial_rows = ctypes.c_int64(), ctypes.c_int64()
        native.check(
            native.load().fp_tables_bounds(
                tables.address, prepared.schedule_address, ctypes.byref(int_bytes), ctypes.byref(partial_rows)
            )
        )
        needed = partial_bytes(partial_rows.value, self.options.head_dim_vo), int_bytes.value
        self._check_workspaces(workspaces, needed, "batches of these sizes")

    def _prepared_for(
        self,
        batch: Batch,
        requests: int,
        total_rows: int,
        *,
        has_known_lengths: bool = True,
        contexts: Contexts = Contexts.USUAL,
        gathers: bool = False,
    ) -> Prepared:
        options = self.options
        capacity = batch.capacity
        if capacity is not None:
            requests, total_rows = capacity.batch, capacity.rows_of(options)
        rows = self._frozen_rows or choose.packed_rows(options, requests, total_rows)
        if batch.is_graph:
            self._frozen_rows = rows  # one kernel for all batches of a graph, and one shape of its launches
            if self._fixed_for is None:
                self._fixed_for = requests, total_rows
        variant = None if options.variant is None else trace(options, 1.0, batch.device).spec
        key = rows, variant, has_known_lengths and not batch.is_graph, contexts, self._fixed_for, gathers
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = Prepared(options, rows, batch.device, *key[2:])
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            self._prepared[key] = prepared
        if capacity is not None:
            self._check_capacity(batch.workspaces, capacity, prepared)
        return prepared

    def _check_capacity(self, workspaces: Workspaces, capacity: Capacity, prepared: Prepared) -> None:
        """Workspaces that hold the plan of any batch within the capacity, told at the first one."""
        options, bytes_now = self.options, (workspaces.float_bytes, workspaces.int_bytes)
        if self._checked_for == (prepared, bytes_now):
            return
        sizes = (capacity.batch, capacity.rows_of(options), capacity.tokens_of(options))
        needed = bounds_of(prepared, *sizes)
        self._check_workspaces(workspaces, needed, f"a batch of max_batch={capacity.batch} requests")
        self._checked_for = (prepared, bytes_now)

    def _check_workspaces(self, workspaces: Workspaces, needed: tuple[int, int], what: str) -> None:
        """`needed`: bytes of the float and the int workspace."""
        sizes = workspaces.float_bytes, workspaces.int_bytes
        for name, has, needs in zip(("float", "int"), sizes, needed, strict=True):
            if has < needs:
                raise PlanError(
                    f"{name}_workspace_buffer has {has} bytes but {what} may need {needs}: pass a larger one, "
                    f"{_HOW_TO_PASS[name]}."
                )

    def _too_many_partials(self, workspaces: Workspaces, rows: int) -> PlanError:
        needed = partial_bytes(rows, self.options.head_dim_vo)
        return PlanError(
            f"float_workspace_buffer has {workspaces.float_bytes} bytes but this plan needs {needed}, for {rows} "
            "partial rows: pass a larger one (workspace_size gives a bound), or disable_split_kv=True."
        )

    def make_plan(self) -> Plan:
        """The public object, from the bytes that were planned last."""
        from .report.plan import Plan

        prepared, parts = self.prepared, self._parts
        data = self.slot.last_bytes()  # first: it gives `result` the numbers of a plan that the device made
        result = native.PlanResult.from_buffer_copy(self.slot.result)
        if self.second is not None and parts is not None:
            from .report.mixed import PartedPlan

            return PartedPlan(parts.make_plans(data), result, self.second.partial_row, parts.reasons())
        spec, notes = prepared.choice.spec, prepared.choice.reasons
        return Plan(prepared.problem, prepared.schedule, result, data, spec=spec, notes=notes)


def workspace_bounds(
    options: Options, batch: int, total_q: int, total_kv: int, device: torch.device
) -> tuple[int, int]:
    """Bytes of the float and the int workspace that no batch within these sizes exceeds, planned as a whole or in
    parts."""
    prepared = Prepared(options, choose.packed_rows(options, batch, total_q), device)
    float_bytes, int_bytes = bounds_of(prepared, batch, total_q, total_kv)
    units = most_units(options, prepared.schedule.tile_q, batch, total_q)
    of_graph = with_one_cluster_size(prepared.schedule, units)[0]
    float_of_graph, int_of_graph = _bounds(options, of_graph, batch, total_q, total_kv)
    float_bytes, int_bytes = max(float_bytes, float_of_graph), max(int_bytes, int_of_graph)
    float_of_few, int_of_few = _bounds_of_few(options, batch, total_q, total_kv, prepared.schedule.num_ctas, device)
    float_bytes, int_bytes = max(float_bytes, float_of_few), max(int_bytes, int_of_few)
    float_of_parts = int_of_parts = 0
    for schedule in largest_schedules(options, prepared.schedule.num_ctas, device):
        of_part = _bounds(options, schedule, batch, total_q, total_kv)
        float_of_parts += of_part[0]
        int_of_parts += -(-of_part[1] // 16) * 16  # a plan starts on 16 bytes
    return max(float_bytes, float_of_parts), max(int_bytes, int_of_parts)


def _bounds_of_few(
    options: Options, batch: int, total_q: int, total_kv: int, num_ctas: int, device: torch.device
) -> tuple[int, int]:
    """The same of batches of so few rows that an SM has smaller tiles than usual, and more CTAs. `num_ctas`: of usual
    ones."""
    rows = min(total_q, ContextLengths(options, devices.of(device)).most_rows_of_few)
    usual, few = (
        choose.choose(Problem(options, choose.MANY_ROWS, contexts=contexts), device)
        for contexts in (Contexts.USUAL, Contexts.FEW)
    )
    if rows == 0 or few.spec == usual.spec:
        return 0, 0
    assert few.spec.tile is not None and usual.spec.tile is not None
    schedule = schedule_of(few, options, num_ctas * few.spec.tile.ctas_per_sm // usual.spec.tile.ctas_per_sm)
    return _bounds(options, schedule, batch, rows, total_kv)


def bounds_of(prepared: Prepared, batch: int, total_q: int, total_kv: int) -> tuple[int, int]:
    """The same of a whole where kernel and schedule are known."""
    return _bounds(prepared.options, prepared.schedule, batch, total_q, total_kv)


def _bounds(options: Options, schedule: native.Schedule, batch: int, total_q: int, total_kv: int) -> tuple[int, int]:
    max_q_rows = 0 if options.uniform_q_len == 1 else total_q  # 0: one row a request, which bounds a fixed split closer
    plan_bytes, partial_rows = ctypes.c_int64(), ctypes.c_int64()
    native.check(
        native.load().fp_plan_bounds(
            *(batch, max_q_rows, total_kv, options.num_q_heads, options.num_kv_heads, ctypes.byref(schedule)),
            *(ctypes.byref(plan_bytes), ctypes.byref(partial_rows)),
        )
    )
    return partial_bytes(partial_rows.value, options.head_dim_vo), plan_bytes.value
