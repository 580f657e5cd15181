"""How much the rows of a batch see, and what a kernel does about it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from .spec import KernelSpec, inner_loop
from .tiles import SHORT_TILE_TOKENS, InnerLoop

if TYPE_CHECKING:
    from .problem import Options

PAIRS_NOTE = "two CTAs of a cluster read K and V together, each with half of the rows: one CTA below"
SHORT_NOTE = f"rows see few tokens: tiles of {SHORT_TILE_TOKENS}"


class Contexts(enum.Enum):
    """How many tokens the rows of a batch see (ContextLengths)."""

    USUAL = "neither of the others"
    SHORT = "so few that shorter tiles pay"
    LONG = "so many that tiles at the edge of a mask hardly count, and pairs of CTAs pay"


# Tokens that a row sees x group size. CTAs in pairs read K and V once for both, which takes 2 to 5% less time (of fp8
# more: tests/bench/NOTES.md), but compute on 64 / group_size hidden tokens more a unit where masks are causal.
_LONG_CONTEXT, _LONG_FP8_CONTEXT = 3200, 1600
_ROWS_FOR_PAIRS = 1024  # packed: a request's last pair may have half of its rows
# Tokens that a row sees; the latter where packed rows are no more than two units for each of an H200's SMs. Shorter
# tiles take 2 to 5% less time there, 2% more elsewhere (tests/bench/NOTES.md).
_SHORT_CONTEXT, _SHORT_CONTEXT_OF_FEW, _FEW_PACKED_ROWS = 320, 640, 2 * 132 * 128


class ContextLengths:
    """How much rows of many tiles see, on average. Made once for options, asked at every plan."""

    __slots__ = (
        *("_heads", "_hidden", "_least_rows", "_least_tokens", "_may_be_long", "_may_be_short"),
        *("_rows_of_prefill", "may_differ"),
    )

    def __init__(self, options: Options) -> None:
        is_fp8, group = options.q_dtype.is_fp8 and options.kv_dtype.is_fp8, options.group_size
        least = (_LONG_FP8_CONTEXT if is_fp8 else _LONG_CONTEXT) / group
        has_short_window = 0 <= options.window_left < least - 1
        self.may_differ = not (options.uniform_q_len or options.is_batch_invariant)  # from batch to batch
        self._may_be_long = self.may_differ and not has_short_window
        # Where no kernel has other tiles for them (has_long_tiles), the same one would be prepared twice.
        self._may_be_short = (
            self.may_differ and options.head_dim_qk == options.head_dim_vo == 128 and not options.kv_dtype.is_fp8
        )
        self._hidden = 0.5 if options.causal else 0.0  # of a request's rows: tokens that one does not see
        self._least_rows, self._least_tokens, self._heads = _ROWS_FOR_PAIRS / group, least, options.num_q_heads
        self._rows_of_prefill = 64 / group  # fewer are decode's

    def of(self, batch: int, total_rows: int, total_tokens: int) -> Contexts:
        if batch == 0:
            return Contexts.USUAL
        seen = (total_tokens - self._hidden * total_rows) / batch
        if self._may_be_long and seen >= self._least_tokens and total_rows >= self._least_rows * batch:
            return Contexts.LONG
        if self._may_be_short and seen <= _SHORT_CONTEXT_OF_FEW and total_rows > self._rows_of_prefill * batch:
            are_few = total_rows * self._heads <= _FEW_PACKED_ROWS
            return Contexts.SHORT if are_few or seen <= _SHORT_CONTEXT else Contexts.USUAL
        return Contexts.USUAL


def may_pair(spec: KernelSpec) -> bool:
    """Tiles of masks are visited by single CTAs; what else a variant brings has not been tried with two. Wide heads,
    and narrow ones of 16 bits, gain nothing by it (tests/bench/NOTES.md)."""
    loop = inner_loop(spec.mask_source, spec.position_encoding, spec.variant)
    is_light = spec.mask_source == "implicit" and loop in (InnerLoop.PLAIN, InnerLoop.TRANSFORM)
    widest = max(spec.head_dim_qk, spec.head_dim_vo)
    gains = spec.loader == "transposed" or (spec.loader == "boxes" and widest > 64)
    return is_light and gains and widest <= 192


def has_long_tiles(spec: KernelSpec) -> bool:
    """Plain kernels of 128 columns, whose tiles have the most tokens: the others were not tried."""
    is_plain = inner_loop(spec.mask_source, spec.position_encoding, spec.variant) is InnerLoop.PLAIN
    return is_plain and spec.loader == "boxes" and spec.head_dim_qk == spec.head_dim_vo == 128
