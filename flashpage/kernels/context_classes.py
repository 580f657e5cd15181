"""Classes of batches by how many tokens their rows see: a kernel may have other tiles for short and long contexts."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from .. import native


class ContextClass(enum.Enum):
    """How many tokens the rows of a batch see, and whether the rows are few (ContextLengths)."""

    USUAL = "none of the others"
    FEW = "not many, and either they or the rows are so few that two CTAs on an SM pay"
    SHORT = "so few that shorter tiles pay"
    LONG = "so many that tiles at the edge of a mask hardly count, and pairs of CTAs pay"
    OTHER_HEIGHT = "not few, and row tiles of another height are less work: rows fill them better, or a window is short"
    EQUAL = "any number, for equally many rows of each request: row tiles of a request are computed side by side"
    TINY = "so few, for so few rows, that a launch mostly starts, ends and merges"


CLASSES = tuple(ContextClass)  # a class's number is its index here (csrc/plan_call.h, fp_context_row)
ANY_ROWS = 2**63 - 1


class Padding(NamedTuple):
    """The batches of which row tiles of `tile` packed rows compute at most `most` times as much as usual ones: a
    request's last tile computes as much as a full one."""

    tile: int
    usual_tile: int
    most: float


def context_row(
    contexts: ContextClass,
    most_rows: int,
    least_rows_of_request: float,
    least_tokens: float = -math.inf,
    most_tokens: float = math.inf,
    has_equal_rows: bool = False,
    padding: Padding | None = None,
) -> native.ContextRow:
    """The batches of a class: at most so many query rows, of requests with at least so many on average over all rows,
    and so many tokens that a row sees (csrc/plan/contexts.h). `has_equal_rows`: only batches whose requests have
    equally many rows. A kernel lists its rows in AttentionKernel.context_rows."""
    number = CLASSES.index(contexts)
    sizes = most_rows, least_rows_of_request, least_tokens, most_tokens
    return native.ContextRow(number, *sizes, has_equal_rows, *(padding or ()))
