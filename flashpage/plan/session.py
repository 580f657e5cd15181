"""The plan side of a wrapper: workspaces, lengths, and one plan for every set of options in use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import jit, native
from ..base.errors import FlashpageError, PlanError, RunError
from ..base.memory import allocate, is_capturing
from ..kernels.options import OptionOverride, Options
from ..kernels.spec import KernelSpec
from .batch import NO_BOUNDS, NO_LIMIT, Batch, Longest
from .capacity import Capacity
from .device_lengths import TableLengths
from .lengths import Given, Lengths, Names
from .option_plan import OptionPlan
from .option_plans import OptionPlans
from .page_indices import Mask
from .workspaces import Workspaces

_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # torch's CPU builds lack it


def current_stream(device_index: int) -> int:
    """The raw stream of a CUDA device (torch.cuda.current_stream() would cost three microseconds); 0 on the CPU."""
    return _raw_stream(device_index) if device_index >= 0 else 0


class Planner(OptionPlans):
    """Plans of one wrapper, made by one thread at a time."""

    def __init__(self, device: torch.device, is_graph: bool, names: Names, float_buffer: torch.Tensor) -> None:
        self.generation = 1  # number of the plan; structs of another number are bound again; 0: none
        self.is_planned = False
        workspaces = Workspaces(device, float_buffer)
        super().__init__(Batch(device, is_graph, names, workspaces), workspaces)
        self.device_index, self.mask, self.indices = self.batch.device_index, self.batch.mask, self.batch.pages
        self._take_pages: Callable[[], None] | None = None  # when the plan is published
        self._last = 0  # number of the last complete plan
        self._indices_name = names.indices
        self.batch.struct.is_paged = bool(self._indices_name)
        self._block_tables: tuple[int, torch.Tensor | None] = (-1, None)  # with the number of the plan that had them

    # ---------------------------------------------------------------- workspaces

    def use_float_buffer(self, buffer: torch.Tensor) -> None:
        self.workspaces.use_float_buffer(buffer)
        self._workspaces_changed()

    def use_int_buffer(self, buffer: torch.Tensor) -> None:
        """Takes another workspace; the plan in the old one is lost."""
        may_be_read = self.is_graph or any(known.call.was_captured for known in self._known.values())
        if self._slot is not None and may_be_read:  # without a slot, nothing was planned into it
            self._kept.append(self.workspaces.int_buffer)
        self.workspaces.use_int_buffer(buffer)
        self._workspaces_changed()
        if self._slot is not None:
            self._slot.attach(self.active[0].call, buffer)
        others = [known for known in self._known.values() if hasattr(known, "slot") and known is not self.active[0]]
        self._forget(others)  # their plans need as much room
        self._idle = []

    def _workspaces_changed(self) -> None:
        self.invalidate()
        for option_plan in self.active:
            option_plan.choose_again()

    def use_capacity(self, capacity: Capacity, reads_tables: bool = False) -> None:
        """Graph mode: makes the memory that captured launches read large enough for the largest batch.
        `reads_tables`: every plan is from block tables, which launches read in place."""
        self.batch.use_capacity(capacity)
        if self._indices_name and not reads_tables:
            what = "the buffer of page numbers"
            self.indices.use_buffer(allocate(capacity.entries, torch.int32, self.device, what, zeroed=False))

    @property
    def capacity(self) -> Capacity | None:
        """Graph mode: limits of all batches; None: buffers fix the batch."""
        return self.batch.capacity

    # ---------------------------------------------------------------- plans

    def invalidate(self) -> None:
        """Until the next complete plan nothing may run."""
        self.generation += 1
        self.is_planned = False

    def configure(self, options: Options) -> None:
        """Takes options that differ from the last plan's."""
        self.invalidate()
        self._use_options(options)

    @property
    def options(self) -> Options:
        """The options of plan."""
        return self.active[0].options

    @property
    def result(self) -> native.PlanResult:
        """Numbers of the present plan."""
        return self.active[0].call.result

    @property
    def block_tables(self) -> torch.Tensor | None:
        """The block tables of the present plan, given in addition to page numbers or instead of them."""
        generation, tables = self._block_tables
        return tables if generation == self.generation else None

    @block_tables.setter
    def block_tables(self, tables: torch.Tensor | None) -> None:
        self._block_tables = self.generation, tables

    @property
    def total_q(self) -> int:
        """Rows of the present plan."""
        return self.active[0].call.result.total_q

    @property
    def first_row(self) -> int:
        """Where the present plan's rows begin in q."""
        struct = self.batch.struct
        has_indptr = self.batch.tables is None and struct.q_indptr.data
        return struct.rows_end - struct.rows if has_indptr else 0

    @property
    def most_rows(self) -> int | None:
        """Graph mode without capacities: rows of the first plan; None: no limit."""
        most = self.batch.struct.most_total_rows
        return None if most == NO_LIMIT or self.capacity is not None else most

    @most_rows.setter
    def most_rows(self, rows: int | None) -> None:
        if self.is_graph:
            self.batch.struct.most_total_rows = NO_LIMIT if rows is None else rows

    @property
    def kv_end(self) -> int:
        """The end of the present plan's kv_indptr: pages; ragged: tokens."""
        return self.active[0].call.result.total_pages

    def plan(self, given: Given, kv_indices: Any, non_blocking: bool, longest: Longest = NO_BOUNDS) -> None:
        """Plans lengths and page numbers, for the options of plan and for those that runs have used."""
        self.generation += 1
        self.is_planned = False
        batch, first = self.batch, self.active[0]
        batch.tables, batch.generation = None, self.generation
        if self.device_index >= 0:
            batch.stream = _raw_stream(self.device_index)
        if longest != batch.longest:
            batch.use_bounds(longest)
        status = first.plan(batch, given, kv_indices)
        if status == native.OTHER_TENSORS and (host := batch.copied_to_host(given, self.options.page_span)) is not None:
            given, status = host, first.plan(batch, host, kv_indices)
        if status:
            self._plan_judged(status, given, kv_indices, non_blocking)
        else:
            self.indices.tensor = kv_indices if self.indices.buffer is None else self.indices.buffer
            if len(self.active) > 1 or self.is_graph:
                self._plan_others()
        self._last = self.generation
        self.is_planned = True

    def _plan_judged(self, status: int, given: Given, kv_indices: Any, non_blocking: bool) -> None:
        """A plan that one foreign call could not make: lengths or page numbers in another place, another kernel, or an
        error. Memory of captured launches is written last."""
        batch, first = self.batch, self.active[0]
        is_for_others = status in (native.OTHER_BATCH, native.WORKSPACE_TOO_SMALL)  # plan_held makes what is missing
        are_pages_taken = is_for_others or not self._indices_name
        if status == native.OTHER_TENSORS:
            batch.take_judged(Lengths(*given), self.options.page_span)
        elif status != native.OTHER_PAGES:
            first.check(native.OK if is_for_others else status, batch)
        end, max_page = batch.struct.kv_end, -1
        if not are_pages_taken and end <= batch.struct.most_entries:
            max_page = self.indices.judge(kv_indices, batch.struct.kv_begin, end, self._indices_name)
        first.plan_held(batch)
        if len(self.active) > 1 or self.is_graph:
            self._plan_others()
        if are_pages_taken:
            self.indices.tensor = kv_indices if self.indices.buffer is None else self.indices.buffer
            return
        self._take_pages = functools.partial(self.indices.take, kv_indices, end, max_page, non_blocking)
        if not self._waits:
            self._take_pages()

    def _plan_others(self) -> None:
        """Plans the options of runs. Captured launches see the plans of all options, or of none if one is refused."""
        batch = self.batch
        if self.is_graph:
            self._take_pages = None
            batch.most_rows = max(batch.most_rows, self.active[0].call.result.total_q)
            if batch.capacity is None and batch.struct.q_indptr.data and batch.struct.most_total_rows == NO_LIMIT:
                batch.struct.most_total_rows = batch.struct.rows_end  # captured launches have the first plan's rows
        if len(self.active) > 1:
            self._keep_used(lambda other: other.plan_held(batch))
            if self.is_graph and not self._waits:
                self.publish()

    def wait(self) -> None:
        """Graph mode: later plans wait for `publish`, so that those of several objects reach launches together."""
        self._waits = self.batch.struct.is_staged = True

    def publish_at_once(self) -> None:
        """Ends `wait`; a plan that was made before is published by `publish` alone."""
        self._waits = False
        self._stage()

    def publish(self) -> None:
        """Copies the newest plan to where captured launches read it; the page numbers follow."""
        for option_plan in self.active:
            option_plan.publish(self.batch)
        if self._take_pages is not None:
            self._take_pages()

    def _keep_used(self, plan: Callable[[OptionPlan], None]) -> None:
        """Plans the options that runs have used since the last plan, and all of a graph's; forgets the others."""
        for other in self.active[1:]:
            is_needed = self.is_graph or other.call.was_captured
            try:
                if is_needed or other.used_at >= self._last:
                    plan(other)
                    continue
            except FlashpageError:  # also a kernel for these rows that is not built, or that no compiler makes
                if is_needed:
                    raise
            self._forget([other])  # if planning failed, the next run with these options raises the error

    def plan_on_device(self, tables: TableLengths) -> None:
        """Plans on the device, from lengths there, for the options of plan and for those that runs have used. The last
        lengths are planned again by the launches alone, unless pages are used that runs were not checked for."""
        batch, struct = self.batch, self.batch.struct
        is_last = tables is batch.tables and self.is_planned and self._last == self.generation
        try:
            tables.read_again()
            if is_last and tables.max_page <= struct.max_page:
                self._plan_again(tables)
                return
        except BaseException:
            self.invalidate()
            raise
        self.invalidate()
        has_limit = self.is_graph and batch.capacity is None and tables.q_indptr is not None
        if has_limit and tables.max_rows > struct.most_total_rows:
            raise PlanError(
                f"max_rows={tables.max_rows} but the wrapper's first plan (use_cuda_graph=True) had "
                f"{struct.most_total_rows} rows: plan the largest batch first."
            )
        batch.tables, batch.generation, batch.stream = tables, self.generation, current_stream(self.device_index)
        self.active[0].prepare_on_device(batch, tables)
        self._keep_used(lambda other: other.prepare_on_device(batch, tables))
        for option_plan in self.active:
            option_plan.plan_on_device(batch, tables, self.plan_kernel)
        if has_limit and struct.most_total_rows == NO_LIMIT:
            struct.most_total_rows = tables.max_rows  # captured launches have the first plan's rows
        self.indices.use_tables(tables.read, tables.max_page)
        self.block_tables = tables.tables
        self._last = self.generation
        self.is_planned = True

    def _plan_again(self, tables: TableLengths) -> None:
        """The kernels, the sizes of memory and all that runs have bound stay as they are."""
        self.batch.struct.max_page = tables.max_page
        self.batch.stream = current_stream(self.device_index)
        for option_plan in self.active:
            option_plan.plan_on_device(self.batch, tables, self.plan_kernel)

    @functools.cached_property
    def plan_kernel(self) -> int | None:
        """The kernel that plans; None: the CPU needs none."""
        return None if self.device_index < 0 else jit.get_kernel(KernelSpec("plan"), self.device).handle

    def page_numbers_of(self, tables: Any, lengths: Given, indices: Any) -> Any:
        """Page numbers of a batch that has tables, [requests, pages]; given `indices` must be equal to them."""
        return self.indices.from_tables(tables, lengths[1], indices, self._indices_name)

    @property
    def needs_judged_mask(self) -> bool:
        """Whether a mask is judged before the plan: captured launches read it, or its kernel may not be compiled."""
        return self.is_graph or not self.active[0].generation

    def judge_mask(self, mask: Mask, lengths: Given) -> None:
        """Raises for a mask that does not fit the next lengths. It changes nothing that captured launches read."""
        if self.is_graph and self.mask.buffer is None:
            self.invalidate()
            raise PlanError("custom_mask with use_cuda_graph=True needs custom_mask_buf: pass it to the constructor.")
        self._judge_lengths(lengths)
        if not bool((bits := self.bits()).lt(0).any()):  # otherwise the planner reports the wrong lengths
            self.mask.packed(mask, bits)

    def _judge_lengths(self, lengths: Given) -> None:
        self.invalidate()
        self.batch.tables = None
        host = self.batch.copied_to_host(lengths, self.options.page_span)
        self.batch.take_judged(Lengths(*lengths) if host is None else host, self.options.page_span)
        self.batch.check_requests(self.batch.struct.requests)

    def set_mask(self, mask: Mask | None, non_blocking: bool) -> None:
        """Takes the present plan's custom mask or None; nothing may run before that has succeeded."""
        self.is_planned = False
        self.mask.set(None if mask is None else self.mask.packed(mask, self.bits()), non_blocking)
        if mask is not None:
            self.batch.stream = current_stream(self.device_index)
            for option_plan in self.active:
                option_plan.find_mask_tiles(self.batch)
        self.is_planned = True

    def bits(self) -> torch.Tensor:
        """Mask bits of each request of the present plan, q_len x kv_len, int64."""
        q_indptr, _, kv_lens = self.batch.numbers(self.options.page_span)
        return q_indptr.diff() * kv_lens

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_indptr, kv_indptr and last_page_len of the present plan, int64 on the host."""
        q_indptr, kv_indptr, kv_lens = self.batch.numbers(self.options.page_span)
        page_size = max(1, self.options.page_span)
        return q_indptr, kv_indptr, torch.where(kv_lens > 0, (kv_lens - 1) % page_size + 1, 0)

    def kv_lens(self) -> torch.Tensor:
        """Tokens of each request of the present plan, int64 on the host."""
        return self.batch.numbers(self.options.page_span)[2]

    def find(self, override: OptionOverride) -> OptionPlan:
        """The plan for a run's options. New ones are planned now, and at later plans as long as runs use them between
        two plans."""
        found = self._of_overrides.get(override)
        if found is None:
            found = self._option_plan_of(override.over(self.options))
        if found.generation != self.generation:
            if is_capturing(self.device):
                raise RunError(
                    f"{override.differences(self.options)} is new to this wrapper while a graph is being captured. "
                    "Run once with it before the capture, or pass it to plan."
                )
            self._activate(found)
        self._of_overrides[override] = found
        found.used_at = self.generation
        return found

    def _activate(self, option_plan: OptionPlan) -> None:
        """Plans these options for the present batch; afterwards they count as active."""
        is_new, has_plan = option_plan not in self.active, hasattr(option_plan, "slot")
        if is_new:
            option_plan.slot = self._own_slot(option_plan)
            option_plan.choose_again()
        batch = self.batch
        batch.stream = current_stream(self.device_index)
        try:
            if batch.tables is None:
                option_plan.plan_held(batch)
                if batch.struct.is_staged:
                    option_plan.publish(batch)
                if self.options.has_mask:
                    option_plan.find_mask_tiles(batch)
            else:
                option_plan.prepare_on_device(batch, batch.tables)
                option_plan.plan_on_device(batch, batch.tables, self.plan_kernel)
        except BaseException:
            if not has_plan:
                self._forget([option_plan])
            raise
        if is_new:
            self._add(option_plan)
