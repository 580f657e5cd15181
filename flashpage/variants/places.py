"""Places that hold captured values, and whether they still hold the same objects.

A place is a call that reads its values now, without Python frames, and the values that were found, followed by END: a
missing or an additional value is then a difference too.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Places: TypeAlias = "tuple[tuple[Callable[[], Iterable[Any]], tuple[Any, ...]], ...]"
END = (object(),)
CHANGED: Places = ((tuple, (None,)),)  # never unchanged


def places_of(*reads: Callable[[], Iterable[Any]]) -> Places:
    """The places with what they hold now."""
    return tuple((read, (*read(), *END)) for read in reads)


def are_unchanged(places: Places) -> bool:
    """Whether the places hold what was found. OptionPlan.plan has this loop too, as every call costs a plan time."""
    return all(all(map(operator.is_, itertools.chain(read(), END), found)) for read, found in places)
