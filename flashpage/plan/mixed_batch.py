"""A mixed batch as two plans that run at the same time: requests of few rows for a kernel that reads K and V at the
speed of memory, requests of many rows for a kernel that is bound by the tensor cores.

Each part has a share of the CTAs, so that both end together (csrc/plan/parts.cpp). The two plans lie in one slot, and
one foreign call launches both: the first on a side stream, the second on the caller's. A batch with one kind of
requests, or with too little work of one kind, is planned as a whole.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, NamedTuple

from .. import native
from ..kernels import choose, schedules
from ..kernels.options import Options
from ..kernels.work import Problem
from .prepared_kernels import PreparedKernels

if TYPE_CHECKING:
    import torch

    from .report.plan import Plan

# By the cost model, which does not count the second launch and its events, and is wrong by some percent.
LEAST_GAIN_NS, LEAST_GAIN_SHARE = 6000.0, 0.02


def may_have_parts(options: Options, is_graph: bool = False) -> bool:
    """Not with masks, whose tiles are found for one plan; not if the batch must not choose tile and split; not for
    graphs, whose launches are the same for all batches."""
    return not (is_graph or options.uniform_q_len or options.is_batch_invariant or options.has_mask)


def most_few_rows(options: Options, device: torch.device) -> int:
    """Most rows of q with which a request belongs to the first part of a batch; 0: no batch has parts."""
    few, many = (choose.choose(Problem(options, rows), device).kernel for rows in (1, choose.MANY_ROWS))
    if few is many or not (few.runs_beside and many.runs_beside):
        return 0
    packed = few.most_packed_rows
    while choose.choose(Problem(options, packed), device).kernel is not few:
        packed //= 2
    return packed // options.group_size


def largest_schedules(options: Options, num_ctas: int, device: torch.device) -> list[native.Schedule]:
    """Schedules of both parts with the largest row tiles, to bound the memory of two plans. Empty: no batch has
    parts."""
    if not may_have_parts(options) or not (limit := most_few_rows(options, device)):
        return []
    sizes = limit * options.group_size, choose.MANY_ROWS
    choices = (choose.choose(Problem(options, rows), device) for rows in sizes)
    return [schedules.schedule(choice, options, num_ctas) for choice in choices]


class Fork:
    """The side stream of runs in two parts, and its events; made with the first plan that needs them."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index

    @functools.cached_property
    def handle(self) -> int | None:
        """None on the CPU."""
        if self._device_index < 0:
            return None
        library = native.load()
        handle: int = native.check_handle(library.fp_fork_create(self._device_index))
        native.destroy_with(self, library.fp_fork_destroy, handle)
        return handle


class Part(NamedTuple):
    """One plan of a batch with its launch: the whole batch's plan, or one of two."""

    prepared: PreparedKernels
    result: native.PlanResult
    num_ctas: int
    num_merges: int  # merges for a launch after it
    cluster_size: int = 0  # CTAs of each cluster of the launch; 0: no clusters
    offset: int = 0  # bytes, in the slot's memory
    partial_row: int = 0  # where its partial results begin


class MixedBatchPlan:
    """The parts of one set of options: the newest batch that was planned in two."""

    __slots__ = ("_address", "_prepared", "_struct", "most_few_rows")

    def __init__(self, limit: int) -> None:
        self.most_few_rows = limit
        self._struct = native.Parts(most_few_rows=limit)
        self._address = ctypes.addressof(self._struct)
        self._prepared: tuple[PreparedKernels, PreparedKernels, PreparedKernels]

    @property
    def address(self) -> int:
        """The struct that plans take and fill."""
        return self._address

    def count(self, problem_address: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Requests and rows of each part by which its kernel is chosen: one typical request of the first."""
        found = self._struct
        native.load().fp_parts_count(problem_address, self._address)
        return (1, found.few_typical_rows), (found.many_requests, found.many_rows)

    def use(self, whole: PreparedKernels, few: PreparedKernels, many: PreparedKernels) -> None:
        """Takes the kernels of the whole batch, of the requests with few rows, and of those with many."""
        struct = self._struct
        struct.whole, struct.few, struct.many = whole.schedule_address, few.schedule_address, many.schedule_address
        cost = few.choice.cost
        struct.full_speed_share, struct.reading_share = cost.cluster.full_speed_share, cost.reading_share
        struct.least_gain_ns, struct.least_gain_share = LEAST_GAIN_NS, LEAST_GAIN_SHARE
        self._prepared = whole, few, many

    def made(self) -> tuple[Part, Part]:
        """The two parts of the newest plan."""
        struct, (_, few, many) = self._struct, self._prepared
        first, second = struct.results
        place = struct.second_offset, struct.second_partial_row
        return (
            Part(few, first, first.num_ctas, few.merges_after(first)),
            Part(many, second, second.num_ctas, many.merges_after(second), 0, *place),
        )

    def make_plans(self, data: bytes) -> tuple[Plan, Plan]:
        """The public Plans, from the slot's bytes."""
        from .report.plan import Plan

        struct, made = self._struct, []
        for i, offset in enumerate((0, struct.second_offset)):
            prepared, result = self._prepared[1 + i], native.PlanResult.from_buffer_copy(struct.results[i])
            schedule = native.Schedule.from_buffer_copy(struct.schedules[i])
            plan_bytes = data[offset : offset + result.used_bytes]
            spec, notes = prepared.choice.spec, prepared.choice.reasons
            made.append(Plan(prepared.problem, schedule, result, plan_bytes, spec=spec, notes=notes))
        return made[0], made[1]

    def reasons(self) -> tuple[str, ...]:
        """Reasons for two plans, for Plan.explain()."""
        found = self._struct
        return (
            f"two plans at the same time: {found.few_requests} requests of at most {found.most_few_rows} rows on "
            f"{found.schedules[0].num_ctas} CTAs, {found.many_requests} of more on {found.schedules[1].num_ctas}",
            f"by the cost model {found.parts_ns / 1e3:.3g} us, as one plan {found.whole_ns / 1e3:.3g} us",
        )
