"""The sets of options of a wrapper that are planned, and the memory of their plans."""

from __future__ import annotations

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
        self._variations: dict[OptionOverride, OptionPlan] = {}  # with the options of runs
        # Graph mode: the two above for options of earlier plans, by their first one.
        self._earlier: dict[OptionPlan, tuple[list[OptionPlan], dict[OptionOverride, OptionPlan]]] = {}
        self._slot: PlanBuffer | None = None  # the first one's; without graphs whatever its options
        self._kept: list[PlanBuffer | torch.Tensor] = []  # plans that a graph may read
        self._waits = False  # whether plans wait for `publish`

    def _use_options(self, options: Options) -> None:
        """Takes options that differ from the last plan's. Options of runs are planned again when a run uses them."""
        first = self._combination(options)
        if self._slot is None:
            self._slot = PlanBuffer(self.batch.device_index, self.workspaces.int_buffer, first.call)
        else:
            self._slot = self._memory_after(self.active[0], first)
        self.active, self._variations = self._earlier.pop(first, ([first], {}))
        self.batch.use_options(options)
        self._stage()
        self._slot.attach(first.call)
        first.slot = self._slot
        for combination in self.active:
            combination.choose_again()

    def _memory_after(self, before: OptionPlan, first: OptionPlan) -> PlanBuffer:
        """The memory for plans of `first`, which replaces `before`. A graph's launches go on reading the last plan of
        their own options, which later plans of these replace."""
        may_be_read = before.used_at or before.call.was_captured or len(self.active) > 1
        if self.is_graph and (may_be_read or hasattr(first, "slot")):
            self._earlier[before] = self.active, self._variations
            return self._own_slot(first)
        self._forget(self.active[1:])
        slot = before.slot
        del before.slot
        before.generation = 0
        return slot

    def _own_slot(self, combination: OptionPlan) -> PlanBuffer:
        """Memory for the plans of these options only."""
        if hasattr(combination, "slot"):
            return combination.slot
        workspace = self.workspaces.int_buffer
        memory = allocate(workspace.shape, workspace.dtype, self.device, "a plan of other options", zeroed=False)
        return PlanBuffer(self.batch.device_index, memory, combination.call)

    def _stage(self) -> None:
        """Several plans of a graph are published together."""
        self.batch.struct.is_staged = self._waits or (self.is_graph and len(self.active) > 1)

    def _add(self, combination: OptionPlan) -> None:
        """Plans it from now on."""
        self.active.append(combination)
        self._stage()

    def _forget(self, combinations: list[OptionPlan]) -> None:
        """Plans them no longer, until a run uses them again; frees their memory, unless a graph may read it."""
        for combination in combinations:
            combination.generation = 0
            if self.is_graph or combination.call.was_captured:
                self._kept.append(combination.slot)
            del combination.slot
        self.active = [combination for combination in self.active if combination not in combinations]
        self._variations = {name: found for name, found in self._variations.items() if found not in combinations}
        self._stage()

    def _combination(self, options: Options) -> OptionPlan:
        found = self._known.get(options)
        if found is None:
            if len(self._known) >= _MOST_KNOWN and not self.is_graph:
                kept = (known for known in self._known.values() if known.call.was_captured or known in self.active)
                self._known = {known.options: known for known in kept}
            found = self._known[options] = OptionPlan(options, self.batch)
        return found
