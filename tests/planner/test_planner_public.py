"""The public Plan and plan_lengths show what was planned."""

from __future__ import annotations

import re
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
from planner_batches import Batch
from planner_checks import all_units

from flashpage.base.dtypes import DType
from flashpage.errors import CapabilityError, PlanError
from flashpage.kernels import ATTENTION
from flashpage.kernels import tile as tiles
from flashpage.kernels.prefill_sm90 import FEW_NOTE, PAIRS_NOTE, SHORT_NOTE
from flashpage.plan import Plan, plan_lengths

DECODE = [100, 4096, 300, 20_000, 17, 1, 0, 900]
PREFILL = ([300, 1, 0, 64, 129, 7], [1024, 5000, 300, 64, 100, 0])
PLANS = {
    "decode": lambda: plan_lengths(None, DECODE),
    "decode, window": lambda: plan_lengths(None, DECODE, window_left=200),
    "prefill": lambda: plan_lengths(*PREFILL, num_q_heads=6, num_kv_heads=2),
    "prefill, all visible": lambda: plan_lengths(*PREFILL, causal=False, window_left=50, page_size=0),
    "fixed split": lambda: plan_lengths(*PREFILL, fixed_piece_tokens=256, num_ctas=7),
    "cpu": lambda: plan_lengths(*PREFILL, backend="cpu", num_ctas=8, head_dim_vo=64),
}


@pytest.fixture(params=PLANS, scope="module")
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def visible_pairs(plan: Plan) -> int:
    """(query head row, token) pairs by the definition of causal and window."""
    options, pairs = plan.options, 0
    items = plan.work_items()
    for request in np.unique(items["request"]):
        one = items[items["request"] == request][0]
        for row in range(one["q_len"]):
            position = one["kv_len"] - one["q_len"] + row
            tokens = np.arange(one["kv_len"])
            seen = tokens <= position if options.causal else np.ones(len(tokens), bool)
            if options.window_left >= 0:
                seen &= tokens >= position - options.window_left
            pairs += int(seen.sum()) * options.num_q_heads
    return pairs


def test_items_cover_the_batch(plan: Plan) -> None:
    items = plan.work_items()
    lens = np.array(DECODE if plan.options.uniform_q_len else PREFILL[1])
    q_lens = np.ones(len(lens), np.int64) if plan.options.uniform_q_len else np.array(PREFILL[0])
    assert set(items["request"]) == set(np.flatnonzero(q_lens))
    assert (items["kv_len"] == lens[items["request"]]).all() and (items["q_len"] == q_lens[items["request"]]).all()
    heads = (plan.options.num_q_heads, plan.options.num_kv_heads)
    units = all_units(Batch(q_lens, lens, *heads), plan.schedule.tile_q)
    first_pieces = items[items["piece"] == 0]
    assert first_pieces["num_units"].sum() == len(units["request"])
    assert len(plan.merge_items()) == plan.result.num_merges


def test_loads_are_the_planner_s_own(plan: Plan) -> None:
    loads = plan.cta_loads()
    assert loads.shape == (plan.schedule.num_ctas,)
    if plan.schedule.fixed_piece_tokens == 0:  # pieces of a fixed split are priced by the token while they are cut
        assert loads.max() == pytest.approx(plan.result.cost_max_ns, rel=0.01)
        assert loads.sum() == pytest.approx(plan.result.cost_total_ns, rel=0.01)


def test_flops_count_visible_pairs(plan: Plan) -> None:
    options = plan.options
    exact = 2 * visible_pairs(plan) * (options.head_dim_qk + options.head_dim_vo)
    assert plan.traffic().flops == pytest.approx(exact, rel=0.002)


def test_bytes_of_decode() -> None:
    traffic = plan_lengths(None, DECODE).traffic()
    assert traffic.kv_bytes == sum(DECODE) * 8 * 2 * 128 * 2
    assert traffic.row_bytes == len(DECODE) * 32 * 2 * 128 * 2
    assert plan_lengths(None, DECODE, window_left=99).traffic().kv_bytes == sum(min(n, 100) for n in DECODE) * 8 * 512


def test_explain_names_what_was_decided(plan: Plan) -> None:
    text = plan.explain()
    tile = f"tile {plan.schedule.tile_q} packed rows x {plan.schedule.tile_kv} tokens"
    over = 100 * (plan.cta_loads().max() / plan.cta_loads().mean() - 1)
    for part in (tile, "units: ", "split: ", f"(+{over:.1f}%)", "bytes: ", "GFLOP", "floor on H200", "bound by"):
        assert part in text
    assert "floor" not in plan.explain(device="a card without measured ceilings")
    pieces = int(re.search(r"into (\d+) pieces", text).group(1))
    assert pieces == (plan.work_items()["partial_row"] >= 0).sum()


def test_picture_rows_are_ctas(plan: Plan) -> None:
    lines = plan.picture(80, max_rows=1000, color=False).splitlines()
    loads = plan.cta_loads()
    loads = loads[loads > 0]  # CTAs without work have no row
    assert len(lines) == len(loads) + 1
    assert (f"{len(loads)} of {plan.schedule.num_ctas} CTAs" in lines[-1]) == (len(loads) < plan.schedule.num_ctas)
    bars = [line.split("|")[1] for line in lines[:-1]]
    assert all(len(line) <= 80 for line in lines[:-1])
    longest = max(len(bar) for bar in bars)
    for bar, load in zip(bars, loads, strict=True):
        assert abs(len(bar) - longest * load / loads.max()) <= 1
    pieces = plan.work_items()["partial_row"] >= 0
    assert any(bar != bar.lower() for bar in bars) == bool(pieces.any())


def test_picture_shares_rows_and_keeps_the_costliest(plan: Plan) -> None:
    lines = plan.picture(60, max_rows=5, color=True).splitlines()
    assert len(lines) <= 6 and "\x1b[38;5;" in lines[0]
    drawn = {int(line.split("|")[0]) for line in lines[:-1]}
    assert int(plan.cta_loads().argmax()) in drawn or plan.cta_loads()[sorted(drawn)].max() == plan.cta_loads().max()


def test_an_empty_plan_can_be_looked_at(tmp_path: Path) -> None:
    plan = plan_lengths([], [], num_ctas=3)
    assert len(plan.work_items()) == 0 and plan.traffic().bytes == 0
    assert "0 of 3 CTAs" in plan.explain() and plan.picture(color=False).startswith("0 of 3 CTAs")
    plan.to_svg(tmp_path / "empty.svg")


def test_svg_has_one_box_an_item(plan: Plan, tmp_path: Path) -> None:
    plan.to_svg(tmp_path / "plan.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "plan.svg").getroot()
    boxes = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    assert len(boxes) == len(plan.work_items())


def test_tile_and_cost_may_be_given() -> None:
    tile = tiles.Tile(64, 32, 4, 1, 2)
    cost = tiles.Cost(True, 2.0, 100.0, 50.0, 32, merge_rows=16, max_pieces=3)
    plan = plan_lengths(None, [5000], tile=tile, cost=cost, num_ctas=64)
    assert (plan.schedule.tile_q, plan.schedule.tile_kv, plan.schedule.merge_rows) == (64, 32, 16)
    assert plan.work_items()["piece"].max() == 2


def test_wrong_lengths_are_plan_errors() -> None:
    with pytest.raises(PlanError, match="kv_lens"):
        plan_lengths(None, [5, -1])
    with pytest.raises(PlanError, match="q_lens"):
        plan_lengths([1, -2, 5], [5, 6, 7])


def test_long_contexts_are_planned_for_pairs_of_ctas() -> None:
    """If pairs of CTAs share their reads of K and V, a pair has twice the rows and counts as one."""
    short, long = (plan_lengths([length], [length], page_size=0) for length in (1500, 2048))
    assert (short.num_ctas, long.num_ctas) == (132, 66)
    assert long.spec is not None and short.spec is not None and long.spec.tile == short.spec.tile.paired()
    assert len(long.work_items()) > 0 and set(long.work_items()["cta"]) <= set(range(66))
    assert "pairs" not in short.explain() and PAIRS_NOTE in long.explain()


def test_short_contexts_are_planned_for_short_tiles() -> None:
    """A row may see 640 tokens if there are few units, and 320 if there are many."""

    def tokens_of_tile(lengths: list[int]) -> tuple[int, bool]:
        plan = plan_lengths(lengths, lengths, page_size=0)
        assert plan.spec is not None and plan.spec.tile is not None
        return plan.spec.tile.tile_kv, SHORT_NOTE in plan.explain()

    for lengths in ([1024], [529], [512] * 32, [640] * 8, [1024, 8]):
        assert tokens_of_tile(lengths) == (128, True), lengths
    for lengths in ([1300], [1024] * 16, [700] * 8):
        assert tokens_of_tile(lengths) == (160, False), lengths


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "are_few"),
    [
        ([512], [512], 32, True),
        ([1024], [1024], 16, True),
        ([64] * 8, [64] * 8, 32, True),
        ([128], [1152], 32, True),
        ([300, 1, 0], [300, 900, 5], 40, True),
        ([529], [529], 32, False),
        ([128], [1300], 32, False),
        ([8] * 4, [64] * 4, 32, False),
    ],
)
def test_few_rows_are_planned_for_two_ctas_an_sm(rows: list[int], tokens: list[int], heads: int, are_few: bool) -> None:
    """At most one unit of 64 rows for each half of an SM; decodes have another kernel."""
    plan = plan_lengths(rows, tokens, num_q_heads=heads, page_size=0)
    assert plan.spec is not None and plan.spec.tile is not None
    assert (plan.spec.tile.ctas_per_sm == 2) is (plan.num_ctas == 264) is (FEW_NOTE in plan.explain()) is are_few
    assert not are_few or plan.schedule.tile_q == 64 // (heads // 8) * (heads // 8)


@pytest.mark.parametrize(("backend", "first"), [("cuda", "attention_sm80"), ("cpu", "cpu_attention")])
def test_a_refusal_begins_with_the_most_useful_line(backend: str, first: str) -> None:
    """The kernel that takes the most where the work is; kernels of another backend are not named."""
    with pytest.raises(CapabilityError) as caught:
        plan_lengths(None, [100], dtype=DType.FLOAT8_E5M2, backend=backend)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == sum(kernel.backend == backend for kernel in ATTENTION)
    assert lines[0].startswith(f"  {first}: o_data_type float8_e5m2 is not among ")
    with pytest.raises(CapabilityError, match="^head_dim=520 is not supported: pass a multiple of 8 from 16 to 512"):
        plan_lengths(None, [100], head_dim=520, backend=backend)
