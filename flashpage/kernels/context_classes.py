"""How much the rows of a batch see, and what a kernel does about it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from .spec import KernelSpec, inner_loop
from .tile import SHORT_TILE_TOKENS, InnerLoop, Tile, sm90_few_rows_tile

if TYPE_CHECKING:
    from .options import Options

PAIRS_NOTE = "two CTAs of a cluster read K and V together, each with half of the rows: one CTA below"
SHORT_NOTE = f"rows see few tokens: tiles of {SHORT_TILE_TOKENS}"
FEW_NOTE = "rows are few: one warpgroup computes, and an SM has two CTAs"


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
# Tokens that a row sees; the latter where packed rows are no more than two units for each of an H200's SMs. Shorter
# tiles take 2 to 5% less time there, 2% more elsewhere (docs/tried.md).
_SHORT_CONTEXT, _SHORT_CONTEXT_OF_FEW, _FEW_PACKED_ROWS = 320, 640, 2 * 132 * 128
# Tokens that a row sees where packed rows are one unit for each half of an SM: 10 to 20% less time (there too). Longer
# units are cut anyway, and two warpgroups that take turns compute faster than two CTAs.
_CONTEXT_OF_FEWEST, _FEWEST_PACKED_ROWS = 1200, 2 * 132 * 64
_WIDEST_OF_HALVES = 192  # accumulators of wider heads take more than half of an SM's registers


class ContextLengths:
    """How much rows of many tiles see, on average. Made once for options, asked at every plan."""

    __slots__ = (
        *("_heads", "_hidden", "_least_rows", "_least_tokens", "_may_be_long", "_may_be_short", "_rows_of_prefill"),
        *("may_differ", "most_rows_of_few"),
    )

    def __init__(self, options: Options) -> None:
        is_fp8, group = options.q_dtype.is_fp8 and options.kv_dtype.is_fp8, options.group_size
        least = (_LONG_FP8_CONTEXT if is_fp8 else _LONG_CONTEXT) / group
        has_short_window = 0 <= options.window_left < least - 1
        self.may_differ = not (options.uniform_q_len or options.is_batch_invariant)  # from batch to batch
        self._may_be_long = self.may_differ and not has_short_window
        # Where no kernel has other tiles for them (tile_of), the same one would be prepared twice.
        self._may_be_short = (
            self.may_differ and options.head_dim_qk == options.head_dim_vo == 128 and not options.kv_dtype.is_fp8
        )
        self.most_rows_of_few = _FEWEST_PACKED_ROWS // options.num_q_heads if self._may_be_few(options) else 0
        self._hidden = 0.5 if options.causal else 0.0  # of a request's rows: tokens that one does not see
        self._least_rows, self._least_tokens, self._heads = _ROWS_FOR_PAIRS / group, least, options.num_q_heads
        self._rows_of_prefill = 64 / group  # fewer are decode's

    def _may_be_few(self, options: Options) -> bool:
        is_plain = not (options.has_mask or options.needs_variant or options.position_encoding != "NONE")
        widest = max(options.head_dim_qk, options.head_dim_vo)
        has_tiles = is_plain and not options.kv_dtype.is_fp8 and widest <= _WIDEST_OF_HALVES
        return self.may_differ and has_tiles and options.group_size <= 64  # whole rows of the group a unit

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
            are_few = total_rows * self._heads <= _FEW_PACKED_ROWS
            return Contexts.SHORT if are_few or seen <= _SHORT_CONTEXT else Contexts.USUAL
        return Contexts.USUAL


def tile_of(spec: KernelSpec, contexts: Contexts) -> tuple[Tile, str] | None:
    """Of prefill on Hopper, and what to say of it; None: the usual one."""
    assert spec.tile is not None
    if contexts is Contexts.FEW and _has_halves(spec):
        return sm90_few_rows_tile(spec.head_dim_qk, spec.head_dim_vo), FEW_NOTE
    if contexts is Contexts.LONG and _may_pair(spec):
        return spec.tile.paired(), PAIRS_NOTE
    if contexts is Contexts.SHORT and _has_long_tiles(spec):
        return spec.tile.shortened(), SHORT_NOTE
    return None


def _may_pair(spec: KernelSpec) -> bool:
    """Tiles of masks are visited by single CTAs; what else a variant brings has not been tried with two. Wide heads,
    and narrow ones of 16 bits, gain nothing by it (docs/tried.md)."""
    loop = inner_loop(spec.mask_source, spec.position_encoding, spec.variant)
    is_light = spec.mask_source == "implicit" and loop in (InnerLoop.PLAIN, InnerLoop.TRANSFORM)
    widest = max(spec.head_dim_qk, spec.head_dim_vo)
    gains = spec.loader == "transposed" or (spec.loader == "boxes" and widest > 64)
    return is_light and gains and widest <= 192


def _has_long_tiles(spec: KernelSpec) -> bool:
    """Plain kernels of 128 columns, whose tiles have the most tokens: the others were not tried."""
    return _is_plain(spec) and spec.head_dim_qk == spec.head_dim_vo == 128


def _has_halves(spec: KernelSpec) -> bool:
    """Of an SM."""
    is_plain = _is_plain(spec) and spec.mask_source == "implicit"
    return is_plain and max(spec.head_dim_qk, spec.head_dim_vo) <= _WIDEST_OF_HALVES


def _is_plain(spec: KernelSpec) -> bool:
    loop = inner_loop(spec.mask_source, spec.position_encoding, spec.variant)
    return loop is InnerLoop.PLAIN and spec.loader == "boxes"
