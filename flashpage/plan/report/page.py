"""A plan as one page of HTML that needs nothing else: plan.html, with the plan's numbers in it."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_TEMPLATE = Path(__file__).with_name("plan.html")
_MOST_ROWS = 200  # of the table of requests
_COLUMNS = ("request", "kv_head", "num_units", "first_packed_row", "kv_begin", "kv_end")


class Fact(NamedTuple):
    """A number above the picture."""

    value: str
    meaning: str


def page(
    title: str, items: np.ndarray, costs: np.ndarray, num_ctas: int, group: int, facts: list[Fact], reasons: str
) -> str:
    """`items`: CTA_WORK_ITEM in the order of CTAs; `costs`: nanoseconds of each."""
    loads = np.bincount(items["cta"], costs, num_ctas)
    data = {
        "columns": _columns(items, costs, num_ctas),
        "group": group,
        "longest": float(loads.max(initial=0.0)),
        "mean": float(loads.mean()) if num_ctas else 0.0,
        **_requests(items, costs),
    }
    shown = "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(meaning)}</span></div>" for value, meaning in facts
    )
    text = _TEMPLATE.read_text()
    # "<" could end the script; the data come last, because they are the longest text.
    given = {"title": html.escape(title), "facts": shown, "reasons": html.escape(reasons)}
    given["data"] = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    for name, value in given.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def frame(text: str) -> str:
    """A page inside of another one, for notebooks."""
    return f'<iframe srcdoc="{html.escape(text)}" style="width:100%;height:720px;border:0"></iframe>'


def _columns(items: np.ndarray, costs: np.ndarray, num_ctas: int) -> dict[str, Any]:
    first = np.searchsorted(items["cta"], np.arange(num_ctas + 1))
    ends = np.cumsum(costs)
    before = np.concatenate([np.zeros(1), ends])[first[items["cta"]]]  # the time of all CTAs before this one
    columns = {"first": first, **{name: items[name] for name in _COLUMNS}}
    columns["piece"] = np.where(items["partial_row"] >= 0, items["piece"], -1)
    found = {name: ["i4", _base64(column, np.int32)] for name, column in columns.items()}
    for name, column in (("start", ends - costs - before), ("end", ends - before)):
        found[name] = ["f4", _base64(column, np.float32)]
    return found


def _base64(column: np.ndarray, dtype: type) -> str:
    return base64.b64encode(np.ascontiguousarray(column).astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def _requests(items: np.ndarray, costs: np.ndarray) -> dict[str, Any]:
    """Tokens and rows of each request; and the costliest requests with their pieces, CTAs and time."""
    found, index, inverse, counts = np.unique(
        items["request"], return_index=True, return_inverse=True, return_counts=True
    )
    times = np.bincount(inverse, costs, len(found))
    pairs = np.unique(np.stack([inverse, items["cta"]]), axis=1)[0]
    ctas = np.bincount(pairs, minlength=len(found))
    rows, tokens = items["q_len"][index], items["kv_len"][index]
    costliest = np.argsort(-times, kind="stable")[:_MOST_ROWS]
    columns = (found, rows, tokens, counts, ctas, times)
    lengths = {int(r): [int(t), int(q)] for r, t, q in zip(found, tokens, rows, strict=True)}
    return {"requests": lengths, "table": [[float(c[i]) for c in columns] for i in costliest]}
