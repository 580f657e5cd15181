"""The public Plan of a mixed batch: joins its two plans, which run at the same time (plan/mixed_batch.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ... import native
from .plan import Plan
from .units import Traffic


class PartedPlan(Plan):
    """`parts` are the plan of the requests with few rows and that of the others, each with its own kernel.

    CTAs, partial rows and merges of the second part are numbered after those of the first. Row tiles differ:
    `num_units` of an item counts row tiles of its part. `spec` and `schedule` are the first part's.
    """

    def __init__(
        self, parts: tuple[Plan, Plan], result: native.PlanResult, partial_row: int, notes: Sequence[str]
    ) -> None:
        first, second = self.parts = parts
        self.options, self.schedule, self.spec = first.options, first.schedule, first.spec
        self.result, self.notes = result, tuple(notes)
        self._partial_rows = (0, partial_row)
        self._first_ctas = (0, first.num_ctas)
        self._first_merges = (0, first.result.num_merges)
        self.num_ctas = first.num_ctas + second.num_ctas

    @functools.cached_property
    def _items(self) -> np.ndarray:
        moved = []
        for i, part in enumerate(self.parts):
            items = part.work_items()
            is_cut = items["partial_row"] >= 0
            items["cta"] += self._first_ctas[i]
            items["partial_row"][is_cut] += self._partial_rows[i]
            items["merge"][is_cut] += self._first_merges[i]
            moved.append(items)
        return np.concatenate(moved)

    @functools.cached_property
    def _costs(self) -> np.ndarray:
        return np.concatenate([part._costs for part in self.parts])

    def merge_items(self) -> np.ndarray:
        first, second = (part.merge_items() for part in self.parts)
        second["partial_row"] += self._partial_rows[1]
        return np.concatenate([first, second])

    def traffic(self) -> Traffic:
        return Traffic(*(sum(values) for values in zip(*(vars(p.traffic()).values() for p in self.parts), strict=True)))

    def explain(self, device: str = "H200") -> str:
        lines = list(self.notes)
        for name, part in zip(("few rows", "many rows"), self.parts, strict=True):
            lines += [f"-- {name} --", *part.notes, *part._explain_split(), *part._explain_loads()]
        return "\n".join([*lines, "-- both --", *self._explain_floor(device)])
