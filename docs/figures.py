"""Draws the charts of docs/assets and writes the tables of docs/results.md from the lines of docs/results/*.jsonl.

`python docs/figures.py` writes the files; `--check` only says whether they are what the lines give. The lines come from
`--json` of tests/bench/gpu.py and tests/bench/host.py.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Line = dict[str, Any]

TITLES = {  # sections in the order of the page
    "decode": "Decode",
    "more-decode": "Decode, other shapes",
    "contexts": "Decode over the context",
    "prefill": "Prefill and append",
    "more-prefill": "Prefill and append, other shapes",
    "options": "Options that models need",
    "fp8-prefill": "Prefill with e4m3 queries, keys and values",
    "formats": "Caches of 4 and 8 bits",
    "mla": "Latent rows (MLA)",
    "sparse": "Latent rows of 656 bytes, by lists of tokens and by pages",
    "energy": "Energy of long prompts",
    "host": "Host time of plan and run",
    "sglang": "SGLang, tokens per second by attention backend",
    "vllm": "vLLM, tokens per second by attention backend",
    "parallel": "Decode over a context that lies on several cards",
    "ranks": "Engines of several ranks next to those of one",
}
UNITS = {"gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}
NAMES = {
    "flashinfer fa2": "FlashInfer",
    "flashinfer fa3": "FlashInfer fa3",
    "fa3": "FA3",
    "fa3 scheduled": "FA3 scheduled",
    "torch cudnn": "cuDNN",
    "flashmla": "FlashMLA",
}


def read_lines() -> list[Line]:
    """All lines, a later run of a case on the same card in place of an earlier one."""
    newest: dict[tuple[Any, ...], Line] = {}
    for path in sorted((HERE / "results").glob("*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            newest[
                line["section"], line["card"] or line["machine"], line["case"], line.get("batch", line.get("ranks"))
            ] = line
    return list(newest.values())


def name(label: str) -> str:
    return NAMES.get(label, label)


# ------------------------------------------------------------------------------------------------------------- tables


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def origin(lines: list[Line]) -> str:
    """The sentence that says where a table's figures come from."""
    runs = {(line["date"], line["commit"], line["command"]) for line in lines}
    texts = [f"{date}, commit {commit}, `{command}`" for date, commit, command in sorted(runs)]
    versions = {f"{key} {value}" for line in lines for key, value in line["versions"].items()}
    clocks = [line["clocks"] for line in lines if line["clocks"]]
    text = f"{lines[0]['machine']}; {'; '.join(texts)}. Versions: {', '.join(sorted(versions))}."
    if clocks:
        spans = [
            f"{min(c[key] for c in clocks):.0f} to {max(c[key] for c in clocks):.0f} {unit}"
            for key, unit in (("sm_mhz", "MHz"), ("watts", "W"), ("celsius", "degrees Celsius"))
        ]
        text += f" The card after each case: {', '.join(spans)}."
    return text


def card_table(lines: list[Line]) -> str:
    peers = sorted({label for line in lines for label in line["us"] if label != "flashpage"})
    units = {line["unit"]: UNITS[line["unit"]] for line in lines}
    unit = next(iter(units.values())) if len(units) == 1 else "rate"
    rows = []
    for line in lines:
        times = [f"{line['us'][peer]:,.1f}" if peer in line["us"] else "" for peer in peers]
        ratio = f"{line['ratio']:.3f}" if line["ratio"] else ""
        own = f"{line['us']['flashpage']:,.1f}"
        errors = [
            f"{line['errors'][who]:.1e}" if who in line["errors"] else "" for who in ("flashpage", line["best_peer"])
        ]
        rate = f"{line['rate']:,.0f}" + ("" if len(units) == 1 else f" {units[line['unit']]}")
        rows.append([line["case"], own, rate, *times, ratio, *errors])
    header = ["case", "flashpage us", unit, *(f"{name(p)} us" for p in peers), "best peer / flashpage"]
    header += ["error", "best peer's"]
    text = table(header, rows)
    if ratios := [line["ratio"] for line in lines if line["ratio"]]:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text += f"\n\nGeometric mean of the ratios {mean:.3f}, lowest {min(ratios):.3f}."
    return text


def host_table(lines: list[Line]) -> str:
    """Host times with their targets, and FlashInfer's times if any line has them."""
    has_peer, rows = any("flashinfer" in line["us"] for line in lines), []
    for line in lines:
        own, peer = line["us"]["flashpage"], line["us"].get("flashinfer")
        cells = [f"{peer:.1f}", f"{peer / own:.2f}"] if peer else ["", ""]
        targets = [line["must"], line["goal"] or ""]
        rows.append([line["case"], line["batch"], f"{own:.1f}", *(cells if has_peer else []), *targets])
    peer_header = ["FlashInfer us", "FlashInfer / flashpage"] if has_peer else []
    return table(["what", "batch", "us", *peer_header, "must", "goal"], rows)


def energy_table(lines: list[Line]) -> str:
    """Time and energy of a call, next to the peer's."""
    rows = []
    for line in lines:
        own, peer = "flashpage", next(label for label in line["us"] if label != "flashpage")
        cells = [f"{line[key][who]:{form}}" for key, form in _ENERGY.items() for who in (own, peer)]
        ratios = [f"{line[key][peer] / line[key][own]:.3f}" for key in ("us", "joules")]
        rows.append([line["case"], name(peer), *cells, *ratios])
    columns = [f"{who}{unit}" for unit in ("us", "J", "W", "MHz") for who in ("", "peer's ")]
    words = "Each library is called for a second in turn, three times; joules are the board's counter (NVML)."
    header = ["case", "peer", *columns, "peer's time / flashpage's", "peer's energy / flashpage's"]
    return f"{words}\n\n{table(header, rows)}"


_ENERGY = {"us": ",.0f", "joules": ".3f", "watts": ".0f", "sm_mhz": ".0f"}


def engine_table(lines: list[Line]) -> str:
    """Rates of an engine with each attention backend; the ratio is flashpage's to the best other one's."""
    kinds, rows = ("new_per_s", "decode_per_s", "prefill_per_s"), []
    for line in lines:
        figures = line["figures"]
        for label, own in figures.items():
            ratios = [own[kind] / max(x[kind] for n, x in figures.items() if n != label) for kind in kinds]
            words = [f"{ratio:.3f}" if label == "flashpage" else "" for ratio in ratios]
            cells = [f"{own[kind]:,.0f}" for kind in kinds]
            rows.append([line["case"], line["ranks"], label, *cells, *words])
    header = ["trace", "cards", "attention", "new/s", "decode/s", "prefill/s", "ratio", "of decode", "of prefill"]
    words = "Whole runs of an engine by its host's clock; decode leaves out the time to the first tokens."
    return f"{words} Ratios are flashpage's rate to that of the best other backend.\n\n{table(header, rows)}"


def parallel_table(lines: list[Line]) -> str:
    """Times of the slowest rank, and of one card with the whole context."""
    rows = []
    for line in lines:
        times = [f"{us:,.1f}" for us in line["us"].values()]
        rows.append([line["case"], line["ranks"], *times, f"{line['ratio']:.2f}", f"{line['error']:.1e}"])
    return table(["case", "cards", *(f"{what} us" for what in lines[0]["us"]), "one / spread", "error"], rows)


def ranks_table(lines: list[Line]) -> str:
    """Tokens and log-probabilities of an engine next to those of another."""
    rows = []
    for line in lines:
        logprobs = [f"{line['median']:.4f}", f"{line['most']:.3f}", f"{line['gap']:.3f}" if line["gap"] else ""]
        rows.append([line["case"], line["ranks"], f"{line['equal']} of {line['prompts']}", *logprobs])
    words = "Log-probabilities are compared as long as the tokens are equal; the gap is between the best two tokens."
    header = ["engine", "ranks", "equal prompts", "median difference", "most", "most gap where tokens differ"]
    return f"{words}\n\n{table(header, rows)}"


def formats_table(lines: list[Line]) -> str:
    more = "; `append` are rows over a cached prefix, `fill` writes"
    return shares_table(lines, "float8_e4m3fn", f"Microseconds, and in brackets the share of e4m3's{more}.")


def sparse_table(lines: list[Line]) -> str:
    return shares_table(lines, "bf16", "Microseconds, and in brackets the share of bf16's.")


def shares_table(lines: list[Line], of: str, words: str) -> str:
    """Times by format, and their share of one format's."""
    names = list(dict.fromkeys(name for line in lines for name in line["us"]))
    rows = []
    for line in lines:
        us = line["us"]
        cells = [f"{us[name]:,.1f}" if name in us else "" for name in names]
        base = us.get(of)
        if base is not None:
            cells = [f"{cell} ({us[name] / base:.2f})" if cell else "" for cell, name in zip(cells, names, strict=True)]
        rows.append([line["case"], *cells])
    return f"{words}\n\n{table(['case', *names], rows)}"


TABLES = {  # of other sections: card_table
    "formats": formats_table,
    "sparse": sparse_table,
    "energy": energy_table,
    "host": host_table,
    "sglang": engine_table,
    "vllm": engine_table,
    "parallel": parallel_table,
    "ranks": ranks_table,
}


def page(lines: list[Line]) -> str:
    parts = [PREFACE]
    for section, title in TITLES.items():
        own = [line for line in lines if line["section"] == section]
        machines = list(dict.fromkeys(line["card"] or line["machine"] for line in own))
        for card in machines:
            group = [line for line in own if (line["card"] or line["machine"]) == card]
            body = TABLES.get(section, card_table)(group)
            parts.append(f"## {title}: {card}\n\n{origin(group)}\n\n{body}")
    return "\n\n".join(parts) + "\n"


PREFACE = """# Results

Every figure on this page is a line of JSON in `docs/results`, with its card, date, commit, command, clocks and
versions; `python docs/figures.py` writes the page and the charts from them. All libraries of a case get the same
tensors and take turns in one run, because a card's clock falls with heat and power: a ratio is a claim, a rate is for
reading. The time is the median of one call between two events, each after the L2 was filled with other data; decode is
the replay of a CUDA graph, merge included. The error is the relative norm against fp32. Older figures stand in
[history](history.md); [tries](tried.md) lists what was changed, also in vain.

![Ratio to the best peer](assets/ratio.svg)

![Bandwidth over the context](assets/bandwidth.svg)

![Host time of plan and run](assets/host.svg)"""

# ------------------------------------------------------------------------------------------------------------- charts

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
    note = f"Time of the fastest other library divided by flashpage's, in turns on one {card}. Longer is better."
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


def outputs(lines: list[Line]) -> dict[Path, str]:
    return {
        HERE / "results.md": page(lines),
        HERE / "assets" / "ratio.svg": ratio_chart(lines),
        HERE / "assets" / "bandwidth.svg": bandwidth_chart(lines),
        HERE / "assets" / "host.svg": host_chart(lines),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is not up to date")
    arguments = parser.parse_args()
    stale = []
    for path, words in outputs(read_lines()).items():
        if path.exists() and path.read_text() == words:
            continue
        stale.append(str(path.relative_to(HERE.parent)))
        if not arguments.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(words)
    print("\n".join(f"{path}: {'out of date' if arguments.check else 'written'}" for path in stale) or "up to date")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
