"""The charts of docs/results.md: lines of docs/results/*.jsonl in, SVG out."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from result_tables import TITLES
from table_parts import Line, name

STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 15px } .group { font-weight: 600 } .note { font-size: 11px; fill: #57606a }
.bar { fill: #0969da } .slower { fill: #bc4c00 } .grid { stroke: #d0d7de } .mark { stroke: #57606a; stroke-width: 2 }
.line { fill: none; stroke: #0969da; stroke-width: 2.5 } .other { fill: none; stroke: #8c959f; stroke-width: 2 }
.dot { fill: #0969da } .otherdot { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .note { fill: #9198a1 } .bar { fill: #4493f8 } .slower { fill: #f0883e }
.grid { stroke: #3d444d } .mark { stroke: #9198a1 } .line { stroke: #4493f8 } .dot { fill: #4493f8 } }
</style>"""
WIDTH, LABELS, ROW = 760, 316, 20
Row = tuple[str, float | None, str, float | None]


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def drawing(height: float, title: str, note: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    words = [f"<title>{html.escape(title)}</title>", text(8, 22, title, "title"), text(8, 40, note, "note")]
    return "\n".join([head, STYLE, *words, *parts, "</svg>"]) + "\n"


def bars(title: str, note: str, rows: list[Row], base: float, end: float) -> str:
    """Bars from 0 to `end`; `base` is a line (0: none). A row: name, value (None: the name is a heading), words after
    the bar, a mark of its own."""
    scale, top = (WIDTH - LABELS - 90) / end, 54
    parts = []
    for i, (label, value, words, mark) in enumerate(rows):
        y = top + i * ROW
        if value is None:
            parts.append(text(LABELS - 8, y + 14, label, "group", "end"))
            continue
        kind = "slower" if base and value < base else "bar"
        parts.append(text(LABELS - 8, y + 14, label, anchor="end"))
        parts.append(f'<rect class="{kind}" x="{LABELS}" y="{y + 3}" width="{value * scale:.1f}" height="14" rx="2"/>')
        if mark is not None:
            x = LABELS + mark * scale
            parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 1}" y2="{y + 19}"/>')
        parts.append(text(LABELS + max(value, mark or 0, base) * scale + 6, y + 14, words))
    bottom = top + len(rows) * ROW
    if base:
        x = LABELS + base * scale
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
    return drawing(bottom + 12, title, note, parts)


def ratio_chart(lines: list[Line]) -> str:
    own = [line for line in lines if line["section"] in ("decode", "prefill") and line["ratio"]]
    card = own[0]["card"] if own else ""
    own = [line for line in own if line["card"] == card]
    rows: list[Row] = []
    for section in ("decode", "prefill"):
        rows.append((TITLES[section], None, "", None))
        for x in own:
            if x["section"] == section:
                words = f"{x['ratio']:.2f} ({name(x['best_peer']).split()[0]})"
                rows.append((x["case"], x["ratio"], words, None))
    note = (
        f"Time of the fastest other library of a run divided by flashpage's, in turns on one {card}. Longer is better."
    )
    return bars("Speed next to the fastest peer", note, rows, 1.0, 1.1 * max([1.4, *(x["ratio"] for x in own)]))


def host_chart(lines: list[Line]) -> str:
    own = [line for line in lines if line["section"] == "host"]
    cards = [line for line in own if line["card"]] or own
    own = [line for line in cards if line["machine"] == cards[0]["machine"]] if cards else []
    rows: list[Row] = [
        (f"{x['case']}, batch {x['batch']}", x["us"]["flashpage"], f"{x['us']['flashpage']:.1f} us", float(x["must"]))
        for x in own
        if x["batch"] <= 256
    ]
    end = max([1.0, *(max(row[1] or 0, row[3] or 0) for row in rows)])
    return bars(
        "Host time of plan and run",
        "Microseconds: shorter is better, the mark is the most that it may take",
        rows,
        0.0,
        end,
    )


def bandwidth_chart(lines: list[Line]) -> str:
    own = sorted((x for x in lines if x["section"] == "contexts"), key=lambda x: x["context"])
    height, left, right, top, bottom = 330, 60, 40, 60, 290
    most = max([1.0, *(x["bytes"] / min(x["us"].values()) / 1e3 for x in own)])
    limit = math.ceil(most / 1000) * 1000
    steps = max(1, len(own) - 1)

    def x_of(i: int) -> float:
        return left + i * (WIDTH - left - right) / steps

    def y_of(rate: float) -> float:
        return bottom - rate / limit * (bottom - top)

    parts = []
    for rate in range(0, limit + 1, 1000):
        y = y_of(rate)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(left - 6, y + 4, f"{rate:,}", "note", "end"))
    fastest = {"flashpage": [x["us"]["flashpage"] for x in own], "fastest peer": [x["us"][x["best_peer"]] for x in own]}
    for label, times in fastest.items():
        points = [(x_of(i), y_of(x["bytes"] / us / 1e3)) for i, (x, us) in enumerate(zip(own, times, strict=True))]
        kind, dot, below = ("line", "dot", -14) if label == "flashpage" else ("other", "otherdot", 22)
        parts.append(f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
        parts += [f'<circle class="{dot}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points]
        parts += [
            text(x, y + below, label, anchor="middle") for x, y in points[len(points) // 2 : len(points) // 2 + 1]
        ]
    for i, line in enumerate(own):
        parts.append(text(x_of(i), bottom + 18, f"{line['context']:,}", "note", "middle"))
    card = own[0]["card"] if own else ""
    note = f"GB/s of keys and values over tokens a request, {own[0]['case'].split(',')[0] if own else ''}, {card}"
    return drawing(height, "Decode bandwidth over the context", note, parts)
