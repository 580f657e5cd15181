"""The plan side of a wrapper: workspaces, lengths in, one plan for every combination of options in use."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import jit, native
from ..base.errors import PlanError, RunError
from ..kernels.options import Options, Variation
from ..kernels.spec import KernelSpec
from . import lengths
from .batch import Batch
from .buffers import PlanSlot
from .capacity import Capacity
from .device_lengths import TableLengths
from .lengths import Given, Lengths
from .option_plan import Combination
from .page_indices import KvIndices
from .workspaces import Workspaces

_MOST_KNOWN = 64  # combinations kept with their kernels
_INDICES_NAME = {"indptr": "indices", "paged_kv_indptr": "paged_kv_indices"}


def current_stream(device_index: int) -> int:
    """The raw stream of a CUDA device (torch.cuda.current_stream() would cost three microseconds); 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(device_index) if device_index >= 0 else 0


class Planner:
    """Plans of one wrapper; made by one thread at a time."""

    def __init__(
        self, device: torch.device, is_graph: bool, length_names: tuple[str, str, str, str], float_buffer: torch.Tensor
    ) -> None:
        self.device, self.is_graph = device, is_graph
        self.generation = 1  # of plans; structs bound to an older one are bound again, 0: to none
        self.is_planned = False
        self.workspaces = Workspaces(device, float_buffer)
        self.batch = Batch(device, is_graph, length_names, self.workspaces)
        self.device_index, self.mask = self.batch.device_index, self.batch.mask
        self._slots = [PlanSlot(self.device_index, self.workspaces.int_buffer, self.batch.problem_address)]
        self._known: dict[Options, Combination] = {}
        self.active: list[Combination] = []  # planned at every plan; the first one is what plan was asked for
        self._variations: dict[Variation, Combination] = {}
        self._indices_name = _INDICES_NAME.get(length_names[1], "")
        self._block_tables: tuple[int, torch.Tensor | None] = (-1, None)  # the generation that had them
        self.indices = KvIndices(device)

    # ---------------------------------------------------------------- workspaces

    def use_float_buffer(self, buffer: torch.Tensor) -> None:
        self.workspaces.use_float_buffer(buffer)
        self.invalidate()

    def use_int_buffer(self, buffer: torch.Tensor) -> None:
        """Takes another workspace; the plan in the old one is gone."""
        self.workspaces.use_int_buffer(buffer)
        self.invalidate()
        self._slots[0].use_memory(buffer)

    def use_capacity(self, capacity: Capacity, is_paged: bool) -> None:
        """Graph mode: what captured launches read is as large as the largest batch needs."""
        self.batch.capacity = capacity
        if is_paged:
            self.indices.buffer = torch.empty(capacity.entries, dtype=torch.int32, device=self.device)

    @property
    def capacity(self) -> Capacity | None:
        """Graph mode: of all batches; None: buffers fix the batch."""
        return self.batch.capacity

    # ---------------------------------------------------------------- plans

    def invalidate(self) -> None:
        """From here to the next complete plan nothing may run."""
        self.generation += 1
        self.is_planned = False

    @property
    def options(self) -> Options:
        """What plan was asked for."""
        return self.active[0].options

    @property
    def result(self) -> native.PlanResult:
        """Numbers of the present plan."""
        return self._slots[0].result

    @property
    def block_tables(self) -> torch.Tensor | None:
        """What the present plan was given beside, or in place of, its page numbers."""
        generation, tables = self._block_tables
        return tables if generation == self.generation else None

    @block_tables.setter
    def block_tables(self, tables: torch.Tensor | None) -> None:
        self._block_tables = self.generation, tables

    @property
    def total_q(self) -> int:
        """Rows of the present plan."""
        return self._slots[0].result.total_q

    @property
    def kv_end(self) -> int:
        """Where the present plan's kv_indptr ends: pages, ragged: tokens."""
        return self._slots[0].result.total_pages

    def configure(self, options: Options) -> None:
        """Takes options that differ from the last plan's; run-time variations stay on top of them."""
        self.invalidate()
        same_heads = bool(self.active) and _heads(self.active[0].options) == _heads(options)
        remembered = [v for v in self._variations if same_heads]
        self.active, self._variations = [], {}
        self._make_active(self._combination(options))
        problem = self.batch.problem
        problem.page_size, problem.q_len_per_request = options.page_size, options.uniform_q_len
        problem.has_custom_mask = options.has_mask
        for variation in remembered:
            self._activate(variation)

    def plan(self, given: Given, kv_indices: Any, non_blocking: bool) -> None:
        """Lengths and page numbers -> a plan for every active combination."""
        self.invalidate()
        batch = self.batch
        batch.tables = None
        rows = batch.held.take(given)
        if rows is None:
            self._plan_from_device(Lengths(*given), kv_indices, non_blocking)
            return
        batch.rows, batch.generation, batch.stream = rows, self.generation, current_stream(self.device_index)
        for combination in self.active:
            combination.plan(batch)
        if self.is_graph:
            self._check_sizes()
        if self._indices_name:
            held = batch.lengths
            self.indices.set(kv_indices, held.kv_begin, held.kv_end, non_blocking, self._indices_name)
        self.is_planned = True

    def _plan_from_device(self, given: Lengths, kv_indices: Any, non_blocking: bool) -> None:
        """All index tensors that lie on the device come back in one copy."""
        page_size, last_page_len = self.batch.problem.page_size, given.last_page_len
        if page_size == 1 and last_page_len is not None and not last_page_len.is_cpu:
            given = given._replace(last_page_len=None)  # pages of one token: it says nothing
        self.plan(lengths.to_host(given), kv_indices, non_blocking)

    def _check_sizes(self) -> None:
        """Of a graph's plan."""
        self.batch.most_rows = max(self.batch.most_rows, self.total_q)
        if self.capacity is not None:
            self.capacity.check_sizes(self.total_q, self.kv_end, self.options)

    def plan_on_device(self, tables: TableLengths) -> None:
        """A plan for every active combination, made by the device from lengths that are there."""
        self.invalidate()
        batch = self.batch
        batch.tables, batch.generation, batch.stream = tables, self.generation, current_stream(self.device_index)
        for combination in self.active:
            combination.plan_on_device(batch, tables, self.plan_kernel)
        self.indices.use_tables(tables.tables, tables.max_page)
        self.block_tables = tables.tables
        self.is_planned = True

    @functools.cached_property
    def plan_kernel(self) -> int | None:
        """The kernel that plans; None: the CPU does without."""
        return None if self.device_index < 0 else jit.get_kernel(KernelSpec("plan"), self.device).handle

    def find_mask_tiles(self) -> None:
        """Once the plan's mask is there."""
        self.batch.stream = current_stream(self.device_index)
        for combination in self.active:
            combination.find_mask_tiles(self.batch)

    def check_longest(self, max_q_len: int | None, max_kv_len: int | None) -> None:
        """Bounds that the caller gave beside the lengths."""
        result = self._slots[0].result
        for name, bound, longest in (
            ("max_token_per_sequence", max_q_len, result.max_q_len),
            ("max_sequence_kv", max_kv_len, result.max_kv_len),
        ):
            if bound is not None and longest > bound:
                self.is_planned = False
                raise PlanError(
                    f"{name}={bound} but a request of the batch has {longest}: pass at least that, or None."
                )

    def bits(self) -> torch.Tensor:
        """Mask bits of each request of the present plan, q_len x kv_len, int64."""
        q_indptr, _, kv_lens = self._numbers()
        return q_indptr.diff() * kv_lens

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_indptr, kv_indptr and last_page_len of the present plan, int64 on the host."""
        q_indptr, kv_indptr, kv_lens = self._numbers()
        page_size = max(1, self.batch.problem.page_size)
        return q_indptr, kv_indptr, torch.where(kv_lens > 0, (kv_lens - 1) % page_size + 1, 0)

    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_indptr, kv_indptr and tokens of each request."""
        if self.batch.tables is not None:
            return self.batch.tables.numbers()
        q_indptr, kv_indptr, last_page_len, kv_lens = self.batch.held.by_request()
        problem = self.batch.problem
        page_size = problem.page_size
        if q_indptr is None:
            q_indptr = torch.arange(problem.batch + 1) * problem.q_len_per_request
        if kv_lens is None:
            kv_lens = kv_indptr.diff() * max(1, page_size)
            if page_size and last_page_len is not None:
                kv_lens = (kv_lens + last_page_len - page_size).clamp(min=0)
        return q_indptr, kv_indptr, kv_lens

    def find(self, variation: Variation) -> Combination:
        """The combination for a run's options; where it is new, it is planned now, and at every plan from now on."""
        found = self._variations.get(variation)
        if found is not None and found.generation == self.generation:
            return found
        known = self._combination(variation.over(self.active[0].options))
        if known.generation != self.generation and self.device_index >= 0 and torch.cuda.is_current_stream_capturing():
            raise self._new_in_capture(variation)
        self._activate(variation)
        if known.generation != self.generation:
            self._derive(known)
        return known

    def _activate(self, variation: Variation) -> None:
        combination = self._combination(variation.over(self.active[0].options))
        if combination not in self.active:
            self._make_active(combination)
        self._variations[variation] = combination

    def _make_active(self, combination: Combination) -> None:
        """Gives it the next of the slots."""
        if len(self._slots) == len(self.active):
            memory = torch.empty_like(self.workspaces.int_buffer)
            self._slots.append(PlanSlot(self.device_index, memory, self.batch.problem_address))
        combination.slot = self._slots[len(self.active)]
        self.active.append(combination)

    def _derive(self, combination: Combination) -> None:
        batch = self.batch
        batch.stream = current_stream(self.device_index)
        if batch.tables is None:
            combination.plan(batch)
            if self.options.has_mask:
                combination.find_mask_tiles(batch)
        else:
            combination.plan_on_device(batch, batch.tables, self.plan_kernel)

    def _new_in_capture(self, variation: Variation) -> RunError:
        planned = Variation.of_options(self.active[0].options)
        changed = ", ".join(
            f"{name}={value!r} (planned: {before!r})"
            for name, value, before in zip(Variation._fields, variation, planned, strict=True)
            if value != before
        )
        return RunError(
            f"{changed} is new to this wrapper while a graph is being captured: run once with it "
            "before the capture, or give "
            "it to plan."
        )

    def _combination(self, options: Options) -> Combination:
        found = self._known.get(options)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[options] = Combination(options, self.batch.card)
        return found


def _heads(options: Options) -> tuple[int, int]:
    return options.num_q_heads, options.num_kv_heads
