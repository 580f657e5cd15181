"""Stamps of CTAs: when each one of a run started, loaded, computed, wrote and merged.

Kernels with stamps are other kernels (KernelSpec.trace), which are compiled when they are first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..base.errors import RunError
from ..base.memory import is_capturing

if TYPE_CHECKING:
    from .binding import Binding

# The order of include/flashpage/params/stamp.h.
NAMES = ("start", "plan_known", "first_load", "first_tile", "last_tile", "written", "end", "sm")
_TIMES = len(NAMES) - 1
_LATEST = np.iinfo(np.int64).max


class StampedRun(NamedTuple):
    """One run: its plan, and for each part of it int64 [CTAs, NAMES] on the device, 0 where a CTA has no stamp."""

    plan: Any
    kernels: tuple[str, ...]
    parts: tuple[torch.Tensor, ...]
    cluster_ctas: tuple[int, ...]  # CTAs that a plan counts as one, for each part

    def steps(self) -> np.ndarray:
        """Nanoseconds after the first CTA's start, float64 [CTAs of all parts, NAMES without sm]; NaN: no stamp."""
        stamps = self.stamps()[:, :_TIMES]
        started = stamps[:, 0][stamps[:, 0] > 0]
        # The difference is taken of integers: a card's clock counts from 1970, and floats of it have steps of 256 ns.
        return np.where(stamps > 0, stamps - started.min(initial=_LATEST), np.nan)

    def places(self) -> np.ndarray:
        """The number of each CTA's SM or core."""
        return self.stamps()[:, _TIMES]

    def plan_ctas(self) -> np.ndarray:
        """The CTA of the plan that each CTA belongs to."""
        found, first = [], 0
        for part, ctas in zip(self.parts, self.cluster_ctas, strict=True):
            found.append(first + np.arange(len(part)) // ctas)
            first += len(part) // ctas
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def stamps(self) -> np.ndarray:
        """Nanoseconds of a clock and the SM, int64 [CTAs of all parts, NAMES]; 0: no stamp."""
        if not self.parts:
            return np.zeros((0, len(NAMES)), np.int64)
        return torch.cat(self.parts).cpu().numpy()


class Recorder:
    """Gives each run of an Attention stamps of its own; `Attention.recorder` is one while runs are recorded."""

    def __init__(self) -> None:
        self.runs: list[StampedRun] = []

    def record(self, bound: Binding) -> None:
        """Called when a run is bound. The binding is stale at once, so that the next run is bound again."""
        if is_capturing(bound.device):
            raise RunError("stamps cannot be recorded while a graph is being captured: record a run outside of it.")
        option_plan, launches = bound.option_plan, bound.launches
        parts = option_plan.parts
        stamps = tuple(
            torch.zeros(row.grid, len(NAMES), dtype=torch.int64, device=bound.device) for row in launches.attentions
        )
        bound.set_trace(stamps)
        bound.generation = 0
        specs = [part.prepared.choice.spec for part in parts]
        kernels, ctas = tuple(spec.kernel for spec in specs), tuple(spec.ctas for spec in specs)
        self.runs.append(StampedRun(option_plan.make_plan(), kernels, stamps, ctas))
