"""How much the rows of a batch see: a kernel may have other tiles for short and long contexts."""

from __future__ import annotations

import enum

from .devices import Device
from .options import Options


class Contexts(enum.Enum):
    """How many tokens the rows of a batch see, and whether these are few (ContextLengths)."""

    USUAL = "none of the others"
    FEW = "not many, and the rows are so few that every unit has half of an SM for itself"
    SHORT = "so few that shorter tiles pay"
    LONG = "so many that tiles at the edge of a mask hardly count, and pairs of CTAs pay"


# Tokens that a row sees x group size. CTAs in pairs read K and V once for both, which takes 2 to 5% less time (of fp8
# more: docs/tried.md), but compute on 64 / group_size hidden tokens more a unit where masks are causal.
_LONG_CONTEXT, _LONG_FP8_CONTEXT = 3200, 1600
_ROWS_FOR_PAIRS = 1024  # packed: a request's last pair may have half of its rows
# Tokens that a row sees; the latter where packed rows are no more than two units for each SM. Shorter
# tiles take 2 to 5% less time there, 2% more elsewhere (docs/tried.md).
_SHORT_CONTEXT, _SHORT_CONTEXT_OF_FEW, _FEW_ROWS_OF_SM = 320, 640, 2 * 128
# Tokens that a row sees where packed rows are one unit for each half of an SM: 10 to 20% less time (there too). Longer
# units are cut anyway, and two warpgroups that take turns compute faster than two CTAs.
_CONTEXT_OF_FEWEST, _FEWEST_ROWS_OF_SM = 1200, 2 * 64
WIDEST_OF_HALVES = 192  # accumulators of wider heads take more than half of an SM's registers


class ContextLengths:
    """How much rows of many tiles see, on average. Made once for options, asked at every plan."""

    __slots__ = (
        "_few_rows",
        "_hidden",
        "_least_rows",
        "_least_tokens",
        "_may_be_long",
        "_may_be_short",
        "_rows_of_prefill",
        "may_differ",
        "most_rows_of_few",
    )

    def __init__(self, options: Options, card: Device) -> None:
        is_fp8, group = options.q_dtype.is_fp8 and options.kv_dtype.is_fp8, options.group_size
        least = (_LONG_FP8_CONTEXT if is_fp8 else _LONG_CONTEXT) / group
        has_short_window = 0 <= options.window_left < least - 1
        self.may_differ = not (options.uniform_q_len or options.is_batch_invariant)  # from batch to batch
        self._may_be_long = self.may_differ and not has_short_window
        # Only prefill_sm90 has tiles for this class, for these sizes; others would prepare the same kernel twice.
        self._may_be_short = (
            self.may_differ and options.head_dim_qk == options.head_dim_vo == 128 and not options.kv_dtype.is_fp8
        )
        heads = options.num_q_heads
        # Query rows of a batch that is so small that an SM has two CTAs; 0: no batch is.
        may_be_few = self.may_differ and _has_tiles_of_few(options)
        self.most_rows_of_few = _FEWEST_ROWS_OF_SM * card.sms // heads if may_be_few else 0
        self._few_rows = _FEW_ROWS_OF_SM * card.sms / heads
        self._hidden = 0.5 if options.causal else 0.0  # of a request's rows: tokens that one does not see
        self._least_rows, self._least_tokens = _ROWS_FOR_PAIRS / group, least
        self._rows_of_prefill = 64 / group  # fewer are decode's

    def of(self, batch: int, total_rows: int, total_tokens: int) -> Contexts:
        if batch == 0:
            return Contexts.USUAL
        seen = (total_tokens - self._hidden * total_rows) / batch
        is_prefill = total_rows > self._rows_of_prefill * batch
        if total_rows <= self.most_rows_of_few and seen <= _CONTEXT_OF_FEWEST and is_prefill:
            return Contexts.FEW
        if self._may_be_long and seen >= self._least_tokens and total_rows >= self._least_rows * batch:
            return Contexts.LONG
        if self._may_be_short and seen <= _SHORT_CONTEXT_OF_FEW and is_prefill:
            are_few = total_rows <= self._few_rows
            return Contexts.SHORT if are_few or seen <= _SHORT_CONTEXT else Contexts.USUAL
        return Contexts.USUAL


def _has_tiles_of_few(options: Options) -> bool:
    is_plain = not (options.has_mask or options.needs_variant or options.position_encoding != "NONE")
    widest = max(options.head_dim_qk, options.head_dim_vo)
    # A unit takes whole rows of the group.
    return is_plain and not options.kv_dtype.is_fp8 and widest <= WIDEST_OF_HALVES and options.group_size <= 64
