"""One set of options of a wrapper, and its plan for the present batch.

A wrapper has the options that were planned, and one more set for each combination of run-time options (causal,
window_left, ...) that needs another plan or another kernel.
"""

from __future__ import annotations

import ctypes
import math
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import native
from ..base.errors import KernelMissingError, PlanError
from ..base.log import LOGGER
from ..base.memory import is_capturing
from ..kernels import choose
from ..kernels.context_classes import CLASSES, ContextClass
from ..kernels.context_lengths import ContextLengths
from ..kernels.options import Options
from ..native import fastcall
from ..variants.places import CALL, CHANGED, Places
from ..variants.spec import VariantSpec
from . import gather_rows, plan_errors
from .batch import Batch
from .bounds import Sizes, bounds_of
from .buffers import PlanBuffer
from .lengths import Given
from .mask_tiles import MaskTiles
from .mixed_batch import MixedBatchPlan, Part, may_have_parts, most_few_rows
from .prepared_kernels import PreparedKernels, prepare, trace
from .workspaces import partial_bytes

if TYPE_CHECKING:
    from .capacity import Capacity
    from .device_lengths import TableLengths
    from .report.plan import Plan

_ALL_MERGES = 2**31 - 1  # PreparedKernels.most_merge_ctas bounds the merge's grid
_MOST_PREPARED = 64  # classes of rows (powers of two) and variants
_NO_CLASS, _ANY_ROWS = native.RowClass(0, -1), native.RowClass(0, 2**62)
_HOW_TO_PASS = {"float": "to the constructor", "int": "with reset_workspace_buffer(float_workspace, int_workspace)"}
# Rows, variant, whether lengths are known, contexts, what its launches are fixed to, whether rows are gathered.
_Key: TypeAlias = tuple[int, VariantSpec | None, bool, ContextClass, tuple[int, int] | None, bool]


class OptionPlan:
    """Options, the slot with their plan, and the kernels for each class of rows so far."""

    __slots__ = (
        "_address",
        "_captured",
        "_checked_for",
        "_contexts",
        "_fixed_for",
        "_frozen_rows",
        "_gather_policy",
        "_parts",
        "_plan",
        "_planned_variant",
        "_prepared",
        "_serves_every_plan",
        "_whole",
        "call",
        "fork",
        "gathered",
        "generation",
        "mask_tiles",
        "options",
        "slot",
        "used_at",
    )

    def __init__(self, options: Options, batch: Batch) -> None:
        self.options = options
        self.slot: PlanBuffer  # while it is active
        self.generation = 0  # number of the session's plan that it belongs to
        self.used_at = 0  # the generation whose runs last used these options
        self.fork: int | None = None  # for runs of two parts, on a card
        self.mask_tiles = MaskTiles(batch.device)
        self.gathered: gather_rows.Copy | None = None  # of the present plan; None: K and V are read in place
        self._whole: PreparedKernels  # kernels of the present plan, if it has one part
        self._serves_every_plan = False  # whether launches have one shape: of a graph, or planned on the device
        self._parts: MixedBatchPlan | None = None  # known after the first plan's kernels
        self._contexts = ContextLengths(options, batch.card)
        self._gather_policy = gather_rows.GatherPolicy(options, batch.card)
        # If a batch cannot change the class of rows, it is known now.
        is_constant = options.uniform_q_len or options.is_batch_invariant
        self._frozen_rows = choose.packed_rows(options, 0, 0) if is_constant else 0
        self._fixed_for: tuple[int, int] | None = None  # graph: requests and rows for which its launches were made
        self._prepared: dict[_Key, PreparedKernels] = {}
        self._checked_for: tuple[PreparedKernels, tuple[int, int]] | None = None  # with the sizes of the workspaces
        self._captured = Places((), ()) if options.variant is None else CHANGED  # what _planned_variant was made from
        self._planned_variant: VariantSpec | None = None
        self._plan = fastcall.builtins().plan
        self.call = self._make_call(batch)
        self._address = ctypes.addressof(self.call)

    def _make_call(self, batch: Batch) -> native.PlanCall:
        options = self.options
        call = native.PlanCall(batch=batch.address, context_table=self._contexts.address, row_class=_NO_CLASS)
        problem = call.problem
        problem.page_size, problem.q_len_per_request = options.page_span, options.uniform_q_len
        problem.has_custom_mask, problem.visibility = options.has_mask, options.visibility
        problem.num_q_heads, problem.num_kv_heads = options.num_q_heads, options.num_kv_heads
        call.weighs_rows = not (batch.is_graph or batch.capacity or options.is_latent or options.is_batch_invariant)
        may_gather = not batch.is_graph and gather_rows.runs_on(batch.device)
        least = self._gather_policy.least() if may_gather else (math.inf, math.inf)
        call.gathered_rows_of_request, call.gathered_rows = least
        return call

    # ---------------------------------------------------------------- the present plan

    @property
    def parts(self) -> tuple[Part, ...]:
        """The present plan's parts, one or two, in the order of their launches."""
        if self._parts is not None and self.call.made_parts:
            return self._parts.made()
        whole, result = self._whole, self.call.result
        if self._serves_every_plan:  # all CTAs; those without work in a plan return at once
            return (Part(whole, result, whole.schedule.num_ctas, _ALL_MERGES, whole.cluster_size),)
        return (Part(whole, result, result.num_ctas, whole.merges_after(result), result.cluster_size),)

    @property
    def prepared(self) -> PreparedKernels:
        """Kernels of the present plan, or of its first part."""
        return self.parts[0].prepared

    @property
    def scale_alignment(self) -> int:
        """Bytes on which the scales of formats must start for the present plan's kernel."""
        return self.prepared.choice.kernel.scale_alignment if self.options.has_formats else 1

    # ---------------------------------------------------------------- plan

    def plan(self, batch: Batch, lengths: Given, page_numbers: Any) -> int:
        """Plans a batch in one foreign call if the kernels of the last plan fit it; otherwise returns a status that
        says what is missing (csrc/plan_call.h, fp_py_plan)."""
        reads, found = self._captured
        if reads and not all(map(is_, chain.from_iterable(map(CALL, reads)), found)):
            self._follow_variant(batch)
        status = self._plan(self._address, batch.stream, *lengths, page_numbers)
        if status == native.OK:
            self.generation = batch.generation
            if self._whole.mask_tiles is not None:
                self._use_mask_tiles(batch)
        return status

    def plan_held(self, batch: Batch) -> None:
        """Plans the batch whose lengths were taken, with other kernels if it needs them."""
        if self.options.variant is not None:
            self._follow_variant(batch)
        status = self.slot.plan(self._address, batch.stream, False)
        if status == native.OTHER_BATCH:
            self._choose_for(batch)
            status = self._planned(batch)
            if self.gathered is not None and status == native.OVER_LIMIT:  # no room in addition to the partial results
                self._choose(batch, None)
                status = self._planned(batch)
        elif status == native.WORKSPACE_TOO_SMALL:
            status = self._planned(batch)
        self.check(status, batch)
        if self.call.made_parts:
            self.gathered = None
        if batch.is_graph:
            self.call.row_class = _ANY_ROWS
        self.generation = batch.generation
        self._use_mask_tiles(batch)

    def _planned(self, batch: Batch) -> int:
        """The status of a plan with the kernels that were chosen, for which int memory may grow."""
        status = self.slot.plan(self._address, batch.stream, True)
        if status == native.WORKSPACE_TOO_SMALL and self._make_int_room(batch, self.call.result.used_bytes):
            status = self.slot.plan(self._address, batch.stream, True)
        return status

    def _use_mask_tiles(self, batch: Batch) -> None:
        """Allocates the memory for a mask's tiles, together with the plan."""
        if self._whole.mask_tiles is not None:
            self.mask_tiles.bind(batch, self._whole, self.slot)

    def choose_again(self) -> None:
        """Makes the next plan choose its kernels and check the workspaces again."""
        self.call.row_class = _NO_CLASS

    def _choose_for(self, batch: Batch) -> None:
        """Plans the call with the kernels that fit the batch. K and V are copied if the batch is worth it, unless the
        kernels for that are not built and cannot be compiled here."""
        gathered = self._rows_to_gather(batch)
        if gathered is not None:
            try:
                self._choose(batch, gathered)
                return
            except KernelMissingError as error:
                LOGGER.info("reads K and V in place: %s", error)
                self._gather_policy.may_be = False  # a search for the kernels at every plan would take milliseconds
                self.call.gathered_rows_of_request, self.call.gathered_rows = self._gather_policy.least()
        self._choose(batch, None)

    def _choose(self, batch: Batch, gathered: gather_rows.Copy | None) -> None:
        """Plans the call with the kernels that fit the batch."""
        call, struct, options = self.call, batch.struct, self.options
        requests, rows = struct.requests, struct.rows
        batch.check_rows(options.group_size)
        call.row_class = _NO_CLASS  # if a compile fails or is interrupted, the next plan chooses again
        contexts, call.contexts = ContextClass.USUAL, -1
        if self._contexts.may_differ and not batch.is_graph:
            contexts = self._contexts.of_batch(self._address)
            call.contexts = CLASSES.index(contexts)
        self.gathered, self._serves_every_plan = gathered, batch.is_graph
        typical = (1, struct.typical_rows) if call.weighs_rows else (requests, rows)
        self._whole = whole = self._prepared_for(batch, *typical, contexts=contexts, gathers=gathered is not None)
        call.schedule = whole.schedule_address
        call.problem.has_mask_tiles = whole.choice.spec.mask_source == "function"
        room = batch.workspaces.partial_rows(options.head_dim_vo)
        if gathered is not None:
            partial_out, _ = batch.workspaces.partials(options.head_dim_vo)
            room = min(room, (gathered.k - partial_out) // (options.head_dim_vo * 4))
        call.most_partial_rows = room
        # The next plan's gathered rows lie elsewhere. A graph's kernels are those of its first plan that succeeds.
        is_for_one = gathered is not None or (batch.is_graph and self.generation == 0)
        call.row_class = _NO_CLASS if is_for_one else _class_of(options, self._frozen_rows, whole)
        if self._parts is None and may_have_parts(options, batch.is_graph):
            self._parts = MixedBatchPlan(most_few_rows(options, batch.device))
            call.parts = self._parts.address if self._parts.most_few_rows else None
        if self._parts is not None and call.parts:
            self._choose_parts(batch, self._parts, whole)

    def _choose_parts(self, batch: Batch, parts: MixedBatchPlan, whole: PreparedKernels) -> None:
        """Kernels of the requests with few rows and of those with many, for a batch with both kinds."""
        call, struct = self.call, batch.struct
        call.few_class = call.many_class = _NO_CLASS
        if not struct.least_rows <= parts.most_few_rows < struct.most_rows:
            return
        # Neither kernel may use pairs of CTAs: the other launch leaves only scattered SMs free.
        try:
            few, many = (self._prepared_for(batch, *sizes) for sizes in parts.count(ctypes.addressof(call.problem)))
        except KernelMissingError as error:
            LOGGER.info("plans requests of few rows and of many together: %s", error)
            call.parts = None
            return
        if few.mask_tiles or many.mask_tiles:  # a launch before finds their tiles, with one plan
            call.parts = None
            return
        parts.use(whole, few, many)
        self.fork = batch.fork.handle  # also if this batch stays whole: plan may divide the next one by itself
        call.few_class, call.many_class = (_class_of(self.options, 0, prepared) for prepared in (few, many))

    def _follow_variant(self, batch: Batch) -> None:
        """Chooses again if a captured tensor has changed its type since the last plan, which may need another
        kernel."""
        spec = trace(self.options, 1.0, batch.device).spec
        self._captured = self.options.variant.places()
        if spec != self._planned_variant:
            self._planned_variant = spec
            self.choose_again()

    def _rows_to_gather(self, batch: Batch) -> gather_rows.Copy | None:
        """Memory for a copy of K and V, if the batch is worth it; rows may also see a part of their pages alone."""
        if batch.is_graph or batch.row_runs is not None or not gather_rows.runs_on(batch.device):
            return None
        partials = batch.workspaces.partials(self.options.head_dim_vo)
        return self._gather_policy.copy_for(batch.struct, batch.entries, partials)

    def _make_int_room(self, batch: Batch, needed: int) -> bool:
        """Gives the slot more memory for a plan of that many bytes, unless a graph may read it; returns whether it
        did."""
        slot, workspaces = self.slot, batch.workspaces
        if is_capturing(batch.device) or (batch.is_graph and slot.is_used):
            return False
        is_workspace = slot.memory is workspaces.int_buffer
        slot.grow(needed)
        if is_workspace:
            workspaces.use_int_buffer(slot.memory)
        return True

    def check(self, status: int, batch: Batch) -> None:
        """Raises the error of a plan's status."""
        if status != native.OK:
            raise plan_errors.error_of(status, self.call, batch, self.options)

    def publish(self, batch: Batch) -> None:
        """Copies the plan that was staged to where launches read it."""
        native.check(native.load().fp_plan_publish(self._address, batch.stream))

    def prepare_on_device(self, batch: Batch, tables: TableLengths) -> None:
        """Chooses the kernels for lengths on the device, and checks that the workspaces suffice."""
        self.gathered, self._serves_every_plan, self.call.made_parts = None, True, 0
        self.choose_again()
        self._whole = self._prepared_for(batch, tables.typical_requests, tables.max_rows, has_known_lengths=False)
        tables.take(self.options)
        self._check_tables(batch, self._whole, tables)

    def plan_on_device(self, batch: Batch, tables: TableLengths, kernel: int | None) -> None:
        """Plans by a launch that a graph may capture, after prepare_on_device; `kernel`: None on the CPU."""
        tables.take(self.options)
        self.slot.plan_tables(self._whole, tables, kernel, batch.stream, batch.card.has_pdl)
        self.call.was_captured |= is_capturing(batch.device)
        self.generation = batch.generation
        self._use_mask_tiles(batch)

    def find_mask_tiles(self, batch: Batch) -> None:
        """Finds the tiles of the newest plan's bits, after they were copied."""
        self.mask_tiles.find(batch, self._whole)

    def _check_tables(self, batch: Batch, prepared: PreparedKernels, tables: TableLengths) -> None:
        """The device cannot report an overflow, so the workspaces must fit the largest batch."""
        int_bytes, partial_rows = ctypes.c_int64(), ctypes.c_int64()
        native.check(
            native.load().fp_tables_bounds(
                tables.address, prepared.schedule_address, ctypes.byref(int_bytes), ctypes.byref(partial_rows)
            )
        )
        needed = partial_bytes(partial_rows.value, self.options.head_dim_vo), int_bytes.value
        self._check_workspaces(batch, needed, "batches of these sizes")

    def _prepared_for(
        self,
        batch: Batch,
        requests: int,
        total_rows: int,
        *,
        has_known_lengths: bool = True,
        contexts: ContextClass = ContextClass.USUAL,
        gathers: bool = False,
    ) -> PreparedKernels:
        options = self.options
        capacity = batch.capacity
        if capacity is not None:
            requests, total_rows = capacity.batch, capacity.rows_of(options)
        rows = self._frozen_rows or choose.packed_rows(options, requests, total_rows)
        if batch.is_graph:
            if self.generation == 0:  # no plan has succeeded yet
                rows, self._fixed_for = choose.packed_rows(options, requests, total_rows), (requests, total_rows)
            self._frozen_rows = rows  # one kernel for all batches of a graph, and one shape of its launches
        variant = None if options.variant is None else trace(options, 1.0, batch.device).spec
        key = rows, variant, has_known_lengths and not batch.is_graph, contexts, self._fixed_for, gathers
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = prepare(options, rows, batch.device, *key[2:])
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            self._prepared[key] = prepared
        if capacity is not None:
            self._check_capacity(batch, capacity, prepared)
        return prepared

    def _check_capacity(self, batch: Batch, capacity: Capacity, prepared: PreparedKernels) -> None:
        """Checks at the first plan that the workspaces hold the plan of any batch within the capacity."""
        options, bytes_now = self.options, (batch.workspaces.float_bytes, self.call.capacity)
        if self._checked_for == (prepared, bytes_now):
            return
        tokens = capacity.tokens_of(options)
        needed = bounds_of(prepared, Sizes(capacity.batch, capacity.rows_of(options), tokens, capacity.longest))
        self._check_workspaces(batch, needed, f"a batch of max_batch={capacity.batch} requests")
        self._checked_for = (prepared, (bytes_now[0], self.call.capacity))

    def _check_workspaces(self, batch: Batch, needed: tuple[int, int], what: str) -> None:
        """Checks the workspaces' sizes; `needed`: bytes of the float and the int workspace."""
        sizes = batch.workspaces.float_bytes, self.call.capacity
        for name, has, needs in zip(("float", "int"), sizes, needed, strict=True):
            if has < needs and not (name == "int" and self._make_int_room(batch, needs)):
                raise PlanError(
                    f"{name}_workspace_buffer has {has} bytes but {what} may need {needs}. "
                    f"Pass a larger one {_HOW_TO_PASS[name]}."
                )

    def make_plan(self) -> Plan:
        """The public Plan, from the bytes of the newest plan."""
        from .report.plan import Plan

        data = self.slot.last_bytes()  # first, as it also gives `result` the numbers of a plan that the device made
        result = native.PlanResult.from_buffer_copy(self.call.result)
        if self._parts is not None and len(parts := self.parts) > 1:
            from .report.mixed import PartedPlan

            return PartedPlan(self._parts.make_plans(data), result, parts[1].partial_row, self._parts.reasons())
        prepared = self._whole
        spec, notes = prepared.choice.spec, prepared.choice.reasons
        return Plan(prepared.problem, prepared.schedule, result, data, spec=spec, notes=notes)


def _class_of(options: Options, frozen_rows: int, prepared: PreparedKernels) -> native.RowClass:
    """Sets the limits within which these kernels fit a batch."""
    return _ANY_ROWS if frozen_rows else native.RowClass(*choose.requests_of(options, prepared.problem.packed_rows))
