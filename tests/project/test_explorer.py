"""docs/plan-explorer.md: its table is current, and the planner in WebAssembly makes the plans of the host library."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashpage.cli import values
from flashpage.kernels import devices
from flashpage.plan import plan_lengths

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "explorer"
TABLE = json.loads((FOLDER / "table.json").read_text())
COLUMNS = ("request", "kv_head", "num_units", "first_packed_row", "kv_begin", "kv_end")
BATCHES = (
    {"card": "H200", "heads": "32/8", "head_dim": 128, "tokens": "zipf:48:6000", "rows": None},
    {"card": "A100", "heads": "28/4", "head_dim": 128, "tokens": "one-long:32:4096", "rows": None},
    {"card": "B200", "heads": "8/1", "head_dim": 64, "tokens": "4x131072", "rows": None},
    {"card": "H100", "heads": "64/8", "head_dim": 128, "tokens": "8x4096,0", "rows": "8x4096,0"},
    {"card": "RTX 4090", "heads": "32/32", "head_dim": 256, "tokens": "32x8192,2x2048", "rows": "32x1,2x2048"},
)
PROGRAM = """
const fs = require("fs"), [, , script, table, module, text] = process.argv;
const { Planner, lengths } = require(script);
Planner.load(fs.readFileSync(module), JSON.parse(fs.readFileSync(table))).then(planner => {
  const found = JSON.parse(text).map(batch => {
    const tokens = lengths(batch.tokens), rows = batch.rows && lengths(batch.rows);
    const { kernel, planner: ours, fixed } = planner.plan({ ...batch, tokens, rows, pieces: 3 });
    const listed = columns => Object.fromEntries(Object.entries(columns).map(([k, v]) => [k, [...v]]));
    for (const view of [ours, fixed]) view.columns = listed(view.columns);
    return { kernel, ours, fixed };
  });
  const errors = ["x", "4x", "zipf:3", "normal:3:4", "1e3", "-4", "99999x1"].map(text => {
    try { return lengths(text); } catch (error) { return error.message; }
  });
  console.log(JSON.stringify({ found, errors }));
});
"""


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"explorer_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def test_the_table_is_current() -> None:
    """One row of each card, with heads and head dims in turn."""
    table = module("table")
    for i, card in enumerate(table.CARDS):
        heads, head_dim = table.HEADS[i % len(table.HEADS)], table.HEAD_DIMS[i % len(table.HEAD_DIMS)]
        own = table.Table()
        row = own.row(devices.named(card), heads, head_dim)
        kept = TABLE["rows"][f"{card} {heads[0]}/{heads[1]} {head_dim}"]
        schedules = [list(schedule) for schedule in own.schedules]
        assert row["contexts"] == kept["contexts"], "run `python docs/explorer/table.py`"
        assert schedules[row["decode"]] == TABLE["schedules"][kept["decode"]], "run `python docs/explorer/table.py`"
        made = [[schedules[number] for number in numbers] for numbers in row["rows"]]
        listed = [[TABLE["schedules"][number] for number in numbers] for numbers in kept["rows"]]
        assert made == listed, "run `python docs/explorer/table.py`"


def expected(batch: dict[str, Any]) -> Any:
    heads = tuple(map(int, batch["heads"].split("/")))
    rows = None if batch["rows"] is None else values.lengths(batch["rows"])
    card = devices.named(batch["card"])
    return plan_lengths(rows, values.lengths(batch["tokens"]), *heads, batch["head_dim"], card=card)


@pytest.mark.skipif(not (shutil.which("em++") and shutil.which("node")), reason="needs emscripten and node")
def test_plans_are_those_of_the_host_library(tmp_path: Path) -> None:
    wasm = tmp_path / "planner.wasm"
    module("build").build(wasm)
    assert wasm.stat().st_size < 200_000
    arguments = [str(FOLDER / "explorer.js"), str(FOLDER / "table.json"), str(wasm), json.dumps(BATCHES)]
    done = subprocess.run(["node", "-", *arguments], input=PROGRAM, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    for batch, found in zip(BATCHES, answer["found"], strict=True):
        plan = expected(batch)
        items, ours = plan.work_items(), found["ours"]
        assert plan.spec is not None and found["kernel"] == plan.spec.kernel, batch
        for name in COLUMNS:
            assert np.array_equal(ours["columns"][name], items[name]), (batch, name)
        assert np.array_equal(ours["columns"]["piece"], np.where(items["partial_row"] >= 0, items["piece"], -1))
        first = np.asarray(ours["columns"]["first"])
        assert np.array_equal(np.diff(first), np.bincount(items["cta"], minlength=plan.num_ctas))
        numbers = ours["num_merges"], ours["num_partial_rows"], ours["num_units"]
        assert numbers == (plan.result.num_merges, plan.result.num_partial_rows, items["num_units"].sum())
        ends, busy = np.asarray(ours["columns"]["end"]), np.diff(first) > 0
        np.testing.assert_allclose(ends[first[1:][busy] - 1], plan.cta_loads()[busy], rtol=1e-5)
        check_fixed(found["fixed"], batch, plan)
    assert all("is not a list of lengths" in message for message in answer["errors"]), answer["errors"]


def check_fixed(fixed: Any, batch: dict[str, Any], plan: Any) -> None:
    """Each unit's pieces cover the tokens that the planner's units see, in at most three pieces of equal length."""
    columns = {name: np.asarray(column) for name, column in fixed["columns"].items()}
    tokens = columns["kv_end"] - columns["kv_begin"]
    assert fixed["pieces"] == 3 and columns["piece"].max() <= 2 and (tokens >= 0).all()
    units = np.stack([columns[name] for name in ("request", "kv_head", "first_packed_row")])
    found, inverse = np.unique(units, axis=1, return_inverse=True)
    assert found.shape[1] == fixed["num_units"] == len(plan._units.item) - _further_pieces(plan)
    assert np.bincount(inverse.ravel(), tokens).sum() == plan._units.tokens.sum()
    lane = np.repeat(np.arange(fixed["num_ctas"]), np.diff(columns["first"]))
    after = lane[1:] == lane[:-1]
    assert np.array_equal(columns["start"][1:][after], columns["end"][:-1][after]), "a CTA waits for nothing"


def _further_pieces(plan: Any) -> int:
    items = plan.work_items()
    return int(((items["partial_row"] >= 0) & (items["piece"] > 0)).sum())
