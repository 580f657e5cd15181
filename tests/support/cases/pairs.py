"""Rows that combine options: every pair of values occurs, by a greedy cover with a fixed seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from cases.case import Case

# Options that are compiled in, and options that are given at run time. Every pair of values of the first kind occurs in
# some row, and every value of the second kind with every row of the first.
COMPILED: dict[str, Sequence[Any]] = {
    "dtypes": (("bfloat16", ""), ("float16", ""), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2")),
    "scores": ({}, {"soft_cap": 5.0}, {"alibi": True}, {"variant": "head_gain"}),
    "position": ("NONE", "ROPE_LLAMA"),
    "mask": ("", "packed"),
    "entry": ("decode", "paged", "ragged"),
}
AT_RUN: dict[str, Sequence[Any]] = {
    "window_left": (-1, 0, 30, 130),
    "causal": (False, True),
    "scales": ("", "float", "per_head"),
    "sinks": (False, True),
    "group": (1, 3, 8),
    "page_size": (1, 5, 16, 64),
    "cache": ("tuple", "interleaved", "gapped"),
    "kv_layout": ("NHD", "HND"),
    "split": ({}, {"fixed_split_size": 3}, {"disable_split_kv": True}),
    "kv_lens": ((40, 0, 66), (200, 17, 129), (300,)),
}


def rows() -> list[Case]:
    compiled = cover(COMPILED, _possible)
    at_run = cover({"compiled": range(len(compiled)), **AT_RUN}, lambda row: True)
    return [_combination(i, {**compiled[row["compiled"]], **row}) for i, row in enumerate(at_run)]


def cover(factors: dict[str, Sequence[Any]], possible: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rows in which every possible pair of values of two factors occurs."""
    chooser = random.Random(20)
    names = list(factors)

    def pairs_of(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    def drawn(fixed: dict[str, int]) -> dict[str, int] | None:
        for _ in range(20):
            row = {name: fixed.get(name, chooser.randrange(len(factors[name]))) for name in names}
            if possible({name: factors[name][value] for name, value in row.items()}):
                return row
        return None

    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    rows = []
    while missing:
        first = min(missing)
        candidates = [drawn({first[0]: first[1], first[2]: first[3]}) for _ in range(30)]
        found = [row for row in candidates if row is not None]
        if not found:
            missing.discard(first)  # `possible` refuses it with any other values
            continue
        best = max(found, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append({name: factors[name][value] for name, value in best.items()})
    return rows


def _possible(row: dict[str, Any]) -> bool:
    """One position encoding at a time; the decode wrapper takes no custom mask."""
    if row["position"] != "NONE" and "alibi" in row["scores"]:
        return False
    return not (row["entry"] == "decode" and row["mask"])


def _combination(index: int, row: dict[str, Any]) -> Case:
    """A row of the cover as a case; options that an entry does not support keep their defaults."""
    scores = dict(row["scores"])
    position = "ALIBI" if scores.pop("alibi", False) else row["position"]
    entry = row["entry"]
    q_lens = tuple(
        1 if entry == "decode" else min(n, 1 + (29 * (i + index)) % 70) for i, n in enumerate(row["kv_lens"])
    )
    return Case(
        name=f"pairs-{index}",
        why="options combined: pairs that no earlier row covers",
        kv_lens=row["kv_lens"],
        q_lens=q_lens,
        entry=entry,
        num_q_heads=2 * row["group"],
        num_kv_heads=2,
        q_dtype=row["dtypes"][0],
        kv_dtype=row["dtypes"][1],
        position=position,
        mask=row["mask"],
        window_left=row["window_left"],
        causal=row["causal"] and entry != "decode",
        scales=row["scales"],
        sinks=row["sinks"] and entry != "ragged",
        page_size=row["page_size"],
        cache="gapped" if entry == "ragged" and row["cache"] != "tuple" else row["cache"],
        kv_layout=row["kv_layout"],
        reduced=index % 20 == 0,
        **scores,
        **row["split"],
    )
