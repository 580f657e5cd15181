"""Causes of drawn cases that take longer than their best peer, if docs/tried.md names one for cases of their kind."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

SMS = 132  # of the cards that were timed
SHORT_TOKENS = 2048  # mean of a batch in which one request has most of the tokens, and the others a few hundred
FEW_ROWS = 32
NAME = re.compile(
    r"[\d.]+ (?P<work>decode|prefill|append)(?: (?P<rows>\d+))?, b(?P<batch>\d+) c(?P<tokens>\d+) (?P<lengths>[\w-]+),"
    r" \d+/(?P<kv_heads>\d+), (?P<more>.*)"
)


class Kind(NamedTuple):
    """What a case's name says: see `name_of` in tests/bench/sweep.py."""

    work: str
    rows: int  # mean of an append's, else 0
    batch: int
    tokens: int  # mean
    lengths: str
    kv_heads: int
    has_cap: bool
    best_peer: str


def kind_of(line: dict[str, Any]) -> Kind | None:
    found = NAME.fullmatch(line["case"])
    if found is None:
        return None
    rows, batch, tokens, kv_heads = (int(found[name] or 0) for name in ("rows", "batch", "tokens", "kv_heads"))
    return Kind(
        found["work"], rows, batch, tokens, found["lengths"], kv_heads, " cap " in found["more"], line["best_peer"]
    )


def cause(line: dict[str, Any]) -> str:
    """A few words, or nothing."""
    kind = kind_of(line)
    if kind is None:
        return ""
    is_one_long = kind.lengths == "one-long" and kind.batch > 1
    if kind.work == "decode":
        if is_one_long and kind.kv_heads <= 2:
            return "long merges by one CTA"
        has_short = is_one_long or kind.lengths == "lognormal"
        is_short = has_short and kind.tokens <= SHORT_TOKENS and kind.batch * kind.kv_heads > SMS
        return "short units" if is_short else ""
    if kind.work == "append":
        return "skewed rows" if is_one_long and kind.rows <= FEW_ROWS else ""
    if kind.has_cap:
        return "soft cap"
    is_small = kind.best_peer == "torch cudnn" and kind.tokens <= 256
    return "small prompts" if is_small else ""
