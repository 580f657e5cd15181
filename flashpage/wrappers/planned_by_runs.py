"""Plans that runs make: for a POD call's prefill, and for a shared prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..base.memory import is_capturing
from .base import Attention


class PlannedByRuns:
    """An Attention that runs plan again if shapes or options change.

    Such plans change without a call to plan, so a graph must not notice: after a captured run has read a plan, later
    plans are made in another Attention, and this one stays.

    Attributes:
        attention: of the newest plan.
    """

    def __init__(self, make: Callable[[], Attention]) -> None:
        self._make, self.attention = make, make()
        self._kept: list[Attention] = []
        self._key: Any = None  # of the newest plan; None: no run may use it again
        self._is_read = False  # whether a captured run reads it
        self._is_in_graph = False  # whether only replays of a graph make the newest plan

    def plan(self, key: Any, plan: Callable[[Attention], None]) -> Attention:
        """The Attention with the plan of this key; `plan` makes it unless it is the newest. None: always made."""
        captures = is_capturing(self.attention.device)
        if key is None or key != self._key or self._is_in_graph:
            if self._is_read and not (captures and self._is_in_graph):
                self._kept.append(self.attention)
                self.attention, self._is_read = self._make(), False
            self._key, self._is_in_graph = None, captures
            plan(self.attention)
            self._key = key
        return self.used()

    def used(self) -> Attention:
        """The Attention with the newest plan, which a run is about to read."""
        self._is_read |= is_capturing(self.attention.device)
        return self.attention

    def forget(self) -> None:
        """Makes the next run plan again."""
        self._key = None
