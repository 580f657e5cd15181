"""Draws the charts of docs/assets and writes the tables of docs/results.md from the lines of docs/results/*.jsonl.

`python docs/figures.py` writes the files; `--check` only says whether they are what the lines give. The lines come from
`--json` of the programs in tests/bench.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from charts import bandwidth_chart, host_chart, ratio_chart
from result_tables import TABLES, TITLES, card_table, origin
from table_parts import Line

HERE = Path(__file__).resolve().parent


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
the replay of a CUDA graph, merge included. The error is the relative norm against fp32; over fp8 keys and values newer
runs compare with fp64. A cell is empty where a library refuses the case or was not in the run; FlashInfer's fa2 is left
out over ragged rows of 96 columns, over pages of 80 in prefill and in decode of 96 and 112, where 0.7.2 ends with an
illegal access of memory. Older figures stand in [history](history.md); [tries](tried.md) lists what was changed, also
in vain.

![Ratio to the best peer](assets/ratio.svg)

![Bandwidth over the context](assets/bandwidth.svg)

![Host time of plan and run](assets/host.svg)"""


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
