"""Places that hold captured values, and whether they still hold the same objects."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

Read = Callable[[], Iterable[Any]]

END = (object(),)  # ends places whose number of values may change
CALL = operator.methodcaller("__call__")


class Places(NamedTuple):
    """Calls of builtins that read the places now, which takes no Python frame, and all values that they found."""

    reads: tuple[Read, ...]
    found: tuple[Any, ...]

    @staticmethod
    def of(*reads: Read) -> Places:
        """The places with what they hold now."""
        ended = (*reads, END.__iter__)
        return Places(ended, tuple(chain.from_iterable(map(CALL, ended))))

    def and_also(self, others: Places) -> Places:
        """All places of the two."""
        return Places(self.reads + others.reads, self.found + others.found)

    def are_unchanged(self) -> bool:
        """Whether all places hold what was found. OptionPlan.plan has this line too, as every call costs time there."""
        return all(map(operator.is_, chain.from_iterable(map(CALL, self.reads)), self.found))


CHANGED = Places((END.__iter__,), (None,))  # never unchanged
