"""The sets of options of a wrapper that are planned, and the memory of their plans."""

from __future__ import annotations

from typing import Any

import torch

from ..base.memory import allocate
from ..kernels.options import OptionOverride, Options
from .batch import Batch
from .buffers import PlanBuffer
from .option_plan import OptionPlan
from .workspaces import Workspaces

_MOST_KNOWN = 64  # sets of options kept with their kernels


class OptionPlans:
    """One plan for every set of options in use."""

    def __init__(self, batch: Batch, workspaces: Workspaces) -> None:
        self.batch, self.workspaces = batch, workspaces
        self.device, self.is_graph = batch.device, batch.is_graph
        self.active: list[OptionPlan] = []  # planned at every plan; the first one has plan's options
        self._known: dict[Options, OptionPlan] = {}
        self._of_overrides: dict[OptionOverride, OptionPlan] = {}  # of runs, by how their options differ
        self._idle: list[OptionPlan] = []  # graph mode: earlier ones, which batches of the present options cannot have
        self._slot: PlanBuffer | None = None  # the first one's; without graphs whatever its options
        self._kept: list[PlanBuffer | torch.Tensor] = []  # plans that a graph may read
        self._waits = False  # whether plans wait for `publish`

    def _use_options(self, options: Options) -> None:
        """Takes options that differ from the last plan's. Options of runs are planned again when a run uses them."""
        first = self._option_plan_of(options)
        others: list[OptionPlan] = []
        if self._slot is None:
            self._slot = PlanBuffer(self.batch.device_index, self.workspaces.int_buffer, first.call)
        else:
            self._slot, others = self._memory_after(self.active[0], first)
        self.active, self._of_overrides = [first, *others], {}
        self.batch.use_options(options)
        self._stage()
        self._slot.attach(first.call)
        first.slot = self._slot
        for option_plan in self.active:
            option_plan.choose_again()

    def _memory_after(self, before: OptionPlan, first: OptionPlan) -> tuple[PlanBuffer, list[OptionPlan]]:
        """The memory for plans of `first`, which replaces `before`, and what is planned in addition. A graph's launches
        read the plans of their own options: these are planned on, or stay as they are if they need other lengths."""
        is_read = self.is_graph and bool(before.used_at or before.call.was_captured)
        if not self.is_graph:
            self._forget(self.active[1:])
        others = [found for found in (*self.active, *self._idle) if found not in (first, before)]
        slot = self._own_slot(first) if is_read or hasattr(first, "slot") else before.slot
        if is_read:
            others.append(before)
        else:
            del before.slot
            before.generation = 0
        of_batch = [found for found in others if _batch_of(found.options) == _batch_of(first.options)]
        self._idle = [found for found in others if found not in of_batch]
        return slot, of_batch

    def _own_slot(self, option_plan: OptionPlan) -> PlanBuffer:
        """Memory for the plans of these options only."""
        if hasattr(option_plan, "slot"):
            return option_plan.slot
        workspace = self.workspaces.int_buffer
        memory = allocate(workspace.shape, workspace.dtype, self.device, "a plan of other options", zeroed=False)
        return PlanBuffer(self.batch.device_index, memory, option_plan.call)

    def _stage(self) -> None:
        """Several plans of a graph are published together."""
        self.batch.struct.is_staged = self._waits or (self.is_graph and len(self.active) > 1)

    def _add(self, option_plan: OptionPlan) -> None:
        """Plans it from now on."""
        self.active.append(option_plan)
        self._stage()

    def _forget(self, option_plans: list[OptionPlan]) -> None:
        """Plans them no longer, until a run uses them again; frees their memory, unless a graph may read it."""
        for option_plan in option_plans:
            option_plan.generation = 0
            if self.is_graph or option_plan.call.was_captured:
                self._kept.append(option_plan.slot)
            del option_plan.slot
        self.active = [option_plan for option_plan in self.active if option_plan not in option_plans]
        self._of_overrides = {key: found for key, found in self._of_overrides.items() if found not in option_plans}
        self._stage()

    def _option_plan_of(self, options: Options) -> OptionPlan:
        found = self._known.get(options)
        if found is None:
            if len(self._known) >= _MOST_KNOWN and not self.is_graph:
                kept = (known for known in self._known.values() if known.call.was_captured or known in self.active)
                self._known = {known.options: known for known in kept}
            found = self._known[options] = OptionPlan(options, self.batch)
        return found


def _batch_of(options: Options) -> tuple[Any, ...]:
    """Options that lengths and masks of a batch must fit."""
    return options.kv_source, options.page_size, options.uniform_q_len, options.has_mask
