"""docs/figures.py makes the charts and tables of results from the recorded lines, and they are up to date."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "docs" / "figures.py"
sys.path.append(str(PROGRAM.parent))  # it imports its tables and charts from there


def figures() -> Any:
    spec = importlib.util.spec_from_file_location("figures", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(section: str, case: str, **values: object) -> dict[str, Any]:
    return {
        "section": section,
        "case": case,
        "us": {"flashpage": 100.0, "fa3": 110.0, "torch cudnn": 125.0},
        "errors": {"flashpage": 0.002},
        "unit": "gb_per_s",
        "rate": 4000.0,
        "bytes": 400_000_000,
        "context": 1024,
        "best_peer": "fa3",
        "ratio": 1.1,
        "card": "Card",
        "machine": "Machine",
        "date": "2026-01-02",
        "commit": "abcdef0",
        "command": "gpu.py decode",
        "clocks": {"sm_mhz": 1980.0, "watts": 500.0, "celsius": 40.0},
        "versions": {"torch": "2.11"},
    } | values


def test_files_are_what_the_lines_give() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}python docs/figures.py writes them"


def test_charts_and_tables_say_the_figures() -> None:
    lines = [
        line("decode", "batch 1"),
        line("decode", "batch 2 <small>", ratio=0.9, best_peer="torch cudnn"),
        line("contexts", "batch 16, context 1,024"),
        line("contexts", "batch 16, context 2,048", context=2048),
        line("host", "plan, decode", batch=1, must=15, goal=10, us={"flashpage": 2.5}),
    ]
    texts = {path.name: text for path, text in figures().outputs(lines).items()}
    assert "| batch 1 | 100.0 | 4,000 | 110.0 | 125.0 | 1.100 | 2.0e-03 |" in texts["results.md"]
    assert "Geometric mean of the ratios 0.995, lowest 0.900." in texts["results.md"]
    assert "| plan, decode | 1 | 2.5 | 15 | 10 |" in texts["results.md"]
    assert "commit abcdef0, `gpu.py decode`" in texts["results.md"] and "1980 to 1980 MHz" in texts["results.md"]
    words = {name: " ".join(ElementTree.fromstring(text).itertext()) for name, text in texts.items() if ".svg" in name}
    assert "1.10 (FA3)" in words["ratio.svg"] and "0.90 (cuDNN)" in words["ratio.svg"]
    assert "batch 2 <small>" in words["ratio.svg"]
    assert "4,000" in words["bandwidth.svg"] and "2.5 us" in words["host.svg"]


def test_host_times_have_the_peers_column_if_a_line_has_it() -> None:
    common = {"batch": 1, "must": 9, "goal": None}
    lines = [
        line("host", "plan, decode", **common, us={"flashpage": 8.0}),
        line("host", "run, decode", **common, us={"flashpage": 4.0, "flashinfer": 30.0}),
    ]
    rows = figures().TABLES["host"](lines).splitlines()
    assert rows[0] == "| what | batch | us | FlashInfer us | FlashInfer / flashpage | must | goal |"
    assert rows[2:] == ["| plan, decode | 1 | 8.0 |  |  | 9 |  |", "| run, decode | 1 | 4.0 | 30.0 | 7.50 | 9 |  |"]
    assert figures().TABLES["host"](lines[:1]).splitlines()[0] == "| what | batch | us | must | goal |"


def test_first_calls_have_a_column_for_each_library() -> None:
    """A cached kernel has no time with torch, and a peer may have refused a call."""
    cold, cached = "decode, from an empty cache", "decode, a cached kernel"
    both = {"flashpage": 1.25, "flashinfer": 7.0}
    lines = [
        line("cold", cold, seconds=both, with_torch={"flashpage": 3.0, "flashinfer": 10.0}, must=1.5),
        line("cold", cached, seconds={"flashpage": 0.006}, with_torch={}, must=0.01),
    ]
    assert figures().TABLES["cold"](lines).splitlines()[2:] == [
        "| first call | flashpage s | FlashInfer s | flashpage s, with torch | FlashInfer s, with torch | must |",
        "| --- | --- | --- | --- | --- | --- |",
        "| decode, from an empty cache | 1.250 | 7.000 | 3.000 | 10.000 | 1.5 |",
        "| decode, a cached kernel | 0.006 |  |  |  | 0.01 |",
    ]
    assert "## First calls of a process: Card" in figures().page(lines)
    assert "First calls" not in figures().page([line("decode", "batch 1")])


def test_counters_have_a_row_for_each_kernel() -> None:
    kernels = [
        {"kernel": "attention", "counts": {"time us": 1234.5, "DRAM MB": 80.0}, "stalls": {"wait": 1.5, "gmma": 0.4}},
        {"kernel": "merge", "counts": {"time us": 4.0}, "stalls": {}},
    ]
    own = line("counters", "batch 1, flashmla", library="flashmla", kernels=kernels)
    assert figures().TABLES["counters"]([own]).splitlines()[2:] == [
        "| case | library | kernel | time us | DRAM MB | warps that wait |",
        "| --- | --- | --- | --- | --- | --- |",
        "| batch 1 | FlashMLA | attention | 1,234.5 | 80.0 | wait 1.5, gmma 0.4 |",
        "| batch 1 | FlashMLA | merge | 4.0 |  |  |",
    ]


def test_a_step_has_the_fastest_peer_of_each_part() -> None:
    own = line(
        "mixed",
        "1 x 4k, 128 decodes of 8k",
        us={"flashpage": 1000.0, "peers": 1350.0},
        parts={"decodes": {"flashinfer fa2": 1100.0}, "prompts": {"fa3": 260.0, "torch cudnn, contiguous": 250.0}},
        best={"decodes": "flashinfer fa2", "prompts": "torch cudnn, contiguous"},
        errors={"flashpage": 0.002, "peers": 0.003},
        ratio=1.35,
        must=1.35,
    )
    text = figures().TABLES["mixed"]([own])
    cells = "FlashInfer 1,100.0 | cuDNN, contiguous 250.0 | 1,350.0 | 1.350 | 1.35 | 2.0e-03 | 3.0e-03 |"
    assert f"| 1 x 4k, 128 decodes of 8k | 1,000.0 | {cells}" in text
    assert text.endswith("Geometric mean of the ratios 1.350, lowest 1.350.")


def test_a_sweep_has_a_summary_and_the_cases_behind() -> None:
    names = {
        "1.000 decode, b64 c100 one-long, 32/8, d128, page 16": 0.9,
        "1.001 decode, b2 c9000 one-long, 12/1, d192, page 128": 0.5,
        "1.002 append 2, b8 c5101 one-long, 128/32, d112, page 1": 1.01,
        "1.003 prefill, b4 c900 lognormal, 8/8, d64, ragged, cap 50": 0.95,
        "1.004 prefill, b4 c900 lognormal, 8/8, d64, ragged": 0.99,
        "1.005 decode, b64 c4096 uniform, 32/8, d128, page 16": 1.2,
    }
    lines = [line("sweep", case, ratio=ratio) for case, ratio in names.items()]
    lines.append(line("sweep", "1.006 decode, b1 c99 uniform, 8/8, d64, page 1", ratio=None, best_peer=""))
    lines.append(line("sweep", "1.007 prefill, b8 c90 zipf, 8/8, d64, ragged", ratio=2.0, best_peer="torch cudnn"))
    for found in lines:
        found.pop("clocks")  # as a sweep of several processes has none
    text = figures().page(lines)
    assert (
        "| FA3 | 6 | 0.895 | 4 (66.7%) | 5 (83.3%) |\n| cuDNN | 1 | 2.000 | 0 (0.0%) | 0 (0.0%) |\n| all | 7 |" in text
    )
    assert "8 cases were drawn, 7 of which" in text
    behind = [row.split(" | ") for row in text.splitlines() if row.startswith("| 1.0")]
    assert [(row[0][2:7], row[-1].rstrip(" |")) for row in behind] == [
        ("1.001", ""),
        ("1.000", ""),
        ("1.003", "soft cap"),
        ("1.004", ""),
        ("1.002", "each row tile reads single rows"),
    ]


def test_a_table_says_when_its_cards_were_read() -> None:
    """Lines of older runs have the card's state after a case and no UUID."""
    during = {"sm_mhz": 1700.0, "watts": 650.0, "celsius": 60.0, "samples": 20}
    lines = [
        line("decode", "batch 1"),
        line("decode", "batch 2", uuid="1a2b3c4d", clocks=during),
        line("decode", "batch 3", uuid="1a2b3c4d", clocks=during | {"sm_mhz": 1800.0}),
    ]
    others = "500 to 500 W, 40 to 40 degrees Celsius", "650 to 650 W, 60 to 60 degrees Celsius"
    words = f"The card after each case: 1980 to 1980 MHz, {others[0]}."
    words += f" The card inside of the timed rounds: 1700 to 1800 MHz, {others[1]}."
    text = figures().page(lines)
    assert f" Card 1a2b3c4d. {words}" in text
    assert "Cards 1a2b3c4d, ffffffff." in figures().page([*lines, line("decode", "batch 4", uuid="ffffffff")])


def test_a_later_run_replaces_an_earlier_one(tmp_path: Path) -> None:
    module = figures()
    module.HERE = tmp_path
    (tmp_path / "results").mkdir()
    rows = [line("decode", "batch 1", commit=commit) for commit in ("old", "new")]
    (tmp_path / "results" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [found["commit"] for found in module.read_lines()] == ["new"]
