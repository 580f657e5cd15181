"""How much the rows of a batch see: a kernel may have other tiles for short and long contexts."""

from __future__ import annotations

import ctypes
import enum
import math

from .. import native
from .devices import Device
from .options import Options


class Contexts(enum.Enum):
    """How many tokens the rows of a batch see, and whether these are few (ContextLengths)."""

    USUAL = "none of the others"
    FEW = "not many, and the rows are so few that every unit has half of an SM for itself"
    SHORT = "so few that shorter tiles pay"
    LONG = "so many that tiles at the edge of a mask hardly count, and pairs of CTAs pay"


_CLASSES = tuple(Contexts)  # a class is its place here (csrc/plan_call.h, fp_context_row)
_ANY = 2**63 - 1

# Tokens that a row sees x group size. CTAs in pairs read K and V once for both, which takes 2 to 5% less time (of fp8
# more: docs/tried.md), but compute on 64 / group_size hidden tokens more a unit where masks are causal.
_LONG_CONTEXT, _LONG_FP8_CONTEXT = 3200, 1600
_ROWS_FOR_PAIRS = 1024  # packed: a request's last pair may have half of its rows
# Tokens that a row sees; the latter where packed rows are no more than two units for each SM. Shorter
# tiles take 2 to 5% less time there, 2% more elsewhere (docs/tried.md).
_SHORT_CONTEXT, _SHORT_CONTEXT_OF_FEW, _FEW_ROWS_OF_SM = 320, 640, 2 * 128
# Tokens that a row sees where packed rows are one unit for each half of an SM: 10 to 20% less time (there too). Longer
# units are cut anyway, and two warpgroups that take turns compute faster than two CTAs.
ROWS_OF_HALVES = 64  # packed, of one CTA of two on an SM: one warpgroup's
_CONTEXT_OF_FEWEST, _FEWEST_ROWS_OF_SM = 1200, 2 * ROWS_OF_HALVES
WIDEST_OF_HALVES = 192  # accumulators of wider heads take more than half of an SM's registers


class ContextLengths:
    """How much rows of many tiles see, on average, as a table whose first fitting row tells a batch's class. Made once
    for options; the planner looks a batch up (csrc/plan/plan_call.cpp)."""

    __slots__ = ("address", "may_differ", "table")

    def __init__(self, options: Options, card: Device) -> None:
        is_fp8, group = options.q_dtype.is_fp8 and options.kv_dtype.is_fp8, options.group_size
        least_tokens = (_LONG_FP8_CONTEXT if is_fp8 else _LONG_CONTEXT) / group
        self.may_differ = not (options.uniform_q_len or options.is_batch_invariant)  # from batch to batch
        has_short_window = 0 <= options.window_left < least_tokens - 1
        is_prefill = math.nextafter(64 / group, math.inf)  # rows of a request; fewer are a decode's
        # Only prefill_sm90 has tiles for this class, for these sizes; others would prepare the same kernel twice.
        has_short = options.head_dim_qk == options.head_dim_vo == 128 and not options.kv_dtype.is_fp8
        # So few rows that an SM has two CTAs.
        few = _FEWEST_ROWS_OF_SM * card.sms // options.num_q_heads if _has_tiles_of_few(options) else 0
        few_of_sm = int(_FEW_ROWS_OF_SM * card.sms / options.num_q_heads)
        rows = [_row(Contexts.FEW, few, is_prefill, most_tokens=_CONTEXT_OF_FEWEST)]
        if not has_short_window:
            rows.append(_row(Contexts.LONG, _ANY, _ROWS_FOR_PAIRS / group, least_tokens=least_tokens))
        if has_short:
            rows.append(_row(Contexts.SHORT, few_of_sm, is_prefill, most_tokens=_SHORT_CONTEXT_OF_FEW))
            rows.append(_row(Contexts.SHORT, _ANY, is_prefill, most_tokens=_SHORT_CONTEXT))
        if not self.may_differ:
            rows = []
        self.table = native.ContextTable(count=len(rows), page_size=max(1, options.page_size))
        self.table.hidden = 0.5 if options.causal else 0.0  # of a request's rows: tokens that one does not see
        self.table.rows[: len(rows)] = rows
        self.address = ctypes.addressof(self.table)

    @property
    def most_rows_of_few(self) -> int:
        """Query rows of a batch that is so small that an SM has two CTAs; 0: no batch is."""
        return self.table.rows[0].most_rows if self.table.count else 0

    def of(self, batch: int, total_rows: int, total_tokens: int) -> Contexts:
        return _CLASSES[native.load().fp_contexts_of(self.address, batch, total_rows, total_tokens)]


def _row(contexts: Contexts, most_rows: int, least_rows: float, **tokens: float) -> native.ContextRow:
    limits = {"least_tokens": -math.inf, "most_tokens": math.inf} | tokens
    number = _CLASSES.index(contexts)
    return native.ContextRow(contexts=number, most_rows=most_rows, least_rows_of_request=least_rows, **limits)


def _has_tiles_of_few(options: Options) -> bool:
    is_plain = not (options.has_mask or options.needs_variant or options.position_encoding != "NONE")
    is_narrow = max(options.head_dim_qk, options.head_dim_vo) <= WIDEST_OF_HALVES
    has_whole_rows = options.group_size <= ROWS_OF_HALVES  # a unit takes whole rows of the group
    return is_plain and not options.kv_dtype.is_fp8 and is_narrow and has_whole_rows
