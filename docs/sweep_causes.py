"""Causes of drawn cases that take longer than their best peer, if docs/tried.md names one for cases of their kind."""

from __future__ import annotations

import re
from typing import Any

# As `name_of` in tests/bench/sweep.py writes them.
NAME = re.compile(r"[\d.]+ (?P<work>decode|prefill|append)(?: \d+)?, b\d+ c(?P<tokens>\d+) [\w-]+, (?P<more>.*)")


def cause(line: dict[str, Any]) -> str:
    """A few words, or nothing."""
    found = NAME.fullmatch(line["case"])
    if found is None:
        return ""
    words = found["more"].split(", ")
    if any(word.startswith("cap ") for word in words):
        return "soft cap"
    if found["work"] == "append" and "page 1" in words:
        return "each row tile reads single rows"
    is_small = line["best_peer"] == "torch cudnn" and int(found["tokens"]) <= 256
    return "small prompts" if is_small else ""
