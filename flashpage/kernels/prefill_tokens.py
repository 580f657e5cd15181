"""The tokens of prefill_sm90's row tiles of two warpgroups."""

from __future__ import annotations

import dataclasses

from ..variants.source import takes_many_registers
from .kernel import COLUMN_POSITIONS, COLUMNS
from .options import Options
from .work import InnerLoop, Work, inner_loop


@dataclasses.dataclass(frozen=True)
class _Row:
    """Tokens of a tile of two warpgroups, as many as fit the registers, which hold scores and accumulators of a row.
    The first row that fits the work is taken (docs/tried.md has the measurements)."""

    tokens: int
    widest: int = 256  # largest head dim
    values: int = 256  # largest head dim of V
    needs: frozenset[str] = frozenset()  # words of shape_of's facts, all of which must hold
    why: str = ""


def _when(*words: str) -> frozenset[str]:
    return frozenset(words)


# Loaders that bring K and V as they are multiplied: boxes by tensor maps, or rows one by one.
STORED = (
    _Row(128, 64, needs=_when("light", "function"), why="a lane holds a mask function's answers for 128 tokens"),
    _Row(112, 128, needs=_when("light", "heavy function"), why="a mask function for each head also takes registers"),
    _Row(128, 128, needs=_when("light", "function"), why="a lane holds a mask function's answers for 128 tokens"),
    _Row(128, 128, needs=_when("light", "bits by rows"), why="144 tokens spill where single rows are loaded"),
    _Row(144, 128, needs=_when("light", "narrow keys by rows"), why="addresses of rows of two sizes take registers"),
    _Row(160, 128, needs=_when("light", "whole")),
    _Row(144, 128, needs=_when("light"), why="a last panel that is not full, or a mask's bits next to a transform"),
    _Row(96, 64, why="masks or RoPE for every token"),
    _Row(96, 128, needs=_when("loads")),
    _Row(80, 128),
    _Row(128, 192, 128, needs=_when("plain", "whole")),
    _Row(112, 192, 128, needs=_when("light")),
    _Row(80, 192, 128),
    _Row(64, 192, needs=_when("light", "narrow keys by rows")),
    _Row(80, 192, needs=_when("light")),
    _Row(48, 192),
    _Row(32, needs=_when("loads", "masked")),
    _Row(80, needs=_when("plain")),
    _Row(64, needs=_when("light", "stages"), why="a soft cap after another transform"),
    _Row(80, needs=_when("light", "whole")),
    _Row(64, needs=_when("light")),
    _Row(48),
)
# fp8 that is converted to fp16. Multiples of 32 if possible, so that all four loading warps convert the same amount.
CONVERTED = (
    _Row(128, 128, needs=_when("light")),
    _Row(96, 64),
    _Row(96, 128, needs=_when("heavy")),
    _Row(64, 128),
    _Row(96, 192, 128, needs=_when("plain")),
    _Row(64, 192, needs=_when("plain")),
    _Row(64, 192, 128),
    _Row(48, 192),
    _Row(64, needs=_when("plain")),
    _Row(48),
)
# e4m3 products. Multiples of 32, the terms of one product's sum; at most 128, which is the longest row of V's columns.
TRANSPOSED = (
    _Row(128, 128, needs=_when("light")),
    _Row(96, 128, needs=_when("heavy")),
    _Row(64, 128),
    _Row(96, 192, needs=_when("light")),
    _Row(64, 192),
    _Row(64, needs=_when("light")),
    _Row(32),
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The properties of the work on which the rows above depend."""

    loop: InnerLoop
    facts: frozenset[str]


def shape_of(work: Work, loader: str) -> Shape:
    options, has_function = work.options, work.mask_source == "function"
    mask_source = (
        "implicit" if work.mask_source == "packed_bits" and visits_tiles(options, loader) else work.mask_source
    )
    loop = inner_loop(mask_source, "none", work.variant)  # loading warps rotate, not the inner loop
    # A mask function's answers take about as many registers as loading warps take for RoPE.
    lacks_room = (has_function and loop is not InnerLoop.LOADING) or (work.rotates and loop is InnerLoop.TRANSFORM)
    if work.widest > 192 and lacks_room and loader in ("boxes", "rows"):
        loop = InnerLoop.HEAVY
    is_plain, has_bits = loop is InnerLoop.PLAIN, work.mask_source == "packed_bits"
    columns_are_whole = options.head_dim_qk % 64 == options.head_dim_vo % 64 == 0
    words = {
        "plain": is_plain,
        "light": loop in (InnerLoop.PLAIN, InnerLoop.TRANSFORM),
        "heavy": loop is InnerLoop.HEAVY,
        "loads": loop is InnerLoop.LOADING,
        "masked": work.mask_source != "implicit",
        "function": has_function,
        "heavy function": has_function and takes_many_registers(work.variant),
        "stages": "\n" in work.variant.logit,
        "bits by rows": has_bits and not is_plain and loader == "rows",
        "narrow keys by rows": loader == "rows" and options.head_dim_qk < options.head_dim_vo,
        "whole": columns_are_whole and (is_plain or not has_bits),
    }
    return Shape(loop, frozenset(word for word, holds in words.items() if holds))


def visits_tiles(options: Options, loader: str) -> bool:
    """Whether the kernel skips tiles of a mask that no row sees, which another kernel finds before."""
    return loader in ("boxes", "rows") and options.position_encoding != "ROPE_LLAMA"


def tokens_of(rows: tuple[_Row, ...], work: Work, shape: Shape) -> int:
    values = work.options.head_dim_vo
    return next(
        row.tokens for row in rows if work.widest <= row.widest and values <= row.values and row.needs <= shape.facts
    )


def rotated_tokens(head_dim_qk: int, loader: str, most: int) -> int:
    """A lane of the loading warps rotates eight rows at a time, or two or four. In shared memory K has a third stage,
    and loaders of rows have tables."""
    if head_dim_qk > 192:
        most = min(most, 32 if loader == "rows" else 64)
    wanted = (96, 64, 32) if head_dim_qk > 128 else (128, 64, 32)
    return next(tokens for tokens in wanted if tokens <= most)


def whole_columns(work: Work) -> str | None:
    """Refuses copies of V by columns that do not lie as the loader reads them."""
    options = work.options
    if not options.has_value_columns:
        return None
    if options.page_size % COLUMN_POSITIONS:
        return f"page_size {options.page_size} is not a multiple of {COLUMN_POSITIONS}, as V by columns needs"
    if work.widest > 128:
        return f"it reads V by columns under head dims of at most 128, and not {work.widest}"
    tokens = tokens_of(TRANSPOSED, work, shape_of(work, COLUMNS))
    return None if tokens == 128 else f"its tile has {tokens} tokens, and boxes of V by columns have 128"
