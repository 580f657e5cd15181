"""Mixed batches in two parts, by the wrappers: runs equal those of one plan, and what is refused. Both launches run on
the CPU; tests/card/test_card_parts.py has the card's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashpage
from flashpage.kernels import choose, cpu_attention
from flashpage.plan import mixed_batch, option_plan
from flashpage.plan.report.mixed import PartedPlan

pytestmark = pytest.mark.usefixtures("quick_kernels")

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
ROWS, KV_LENS = (1, 300, 1, 16, 0, 17, 1, 5), (900, 300, 2000, 16, 40, 3000, 0, 777)


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two rows with the CPU's kernel in the table: one for at most 64 packed rows, one for more."""
    many = dataclasses.replace(cpu_attention.KERNEL, runs_beside=True)
    monkeypatch.setattr(choose, "ATTENTION", [dataclasses.replace(many, most_packed_rows=64), many])
    monkeypatch.setattr(mixed_batch, "LEAST_GAIN_NS", -1e12)
    return iter(())


def indptr(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


class Step:
    """A mixed batch for the paged or the ragged wrapper."""

    def __init__(self, rows: tuple[int, ...] = ROWS, kv_lens: tuple[int, ...] = KV_LENS, ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows, self.ragged = indptr(rows), ragged
        counts = tuple(-(-n // PAGE) for n in kv_lens)
        total = sum(counts)
        self.q = torch.randn(sum(rows), HEADS, DIM, generator=generator)
        if ragged:
            self.lengths: tuple[torch.Tensor, ...] = (indptr(kv_lens),)
            self.kv = tuple(torch.randn(sum(kv_lens), KV_HEADS, DIM, generator=generator) for _ in range(2))
        else:
            last = torch.tensor([(n - 1) % PAGE + 1 if n else 0 for n in kv_lens]).int()
            self.lengths = (indptr(counts), torch.randperm(total, generator=generator).int(), last)
            self.kv = (torch.randn(total, 2, PAGE, KV_HEADS, DIM, generator=generator),)

    def planned(self, float_bytes: int = 16 << 20, **options: Any) -> Any:
        kind = flashpage.BatchPrefillWithRaggedKVCacheWrapper if self.ragged else None
        wrapper = (kind or flashpage.BatchPrefillWithPagedKVCacheWrapper)(torch.empty(float_bytes, dtype=torch.uint8))
        self.plan(wrapper, **options)
        return wrapper

    def plan(self, wrapper: Any, **options: Any) -> None:
        heads = (HEADS, KV_HEADS, DIM) if self.ragged else (HEADS, KV_HEADS, DIM, PAGE)
        wrapper.plan(self.rows, *self.lengths, *heads, q_data_type=torch.float32, **({"causal": True} | options))

    def run(self, wrapper: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = (torch.full(shape, torch.nan) for shape in (self.q.shape, self.q.shape[:2]))
        found: tuple[torch.Tensor, torch.Tensor] = wrapper.run(
            self.q, *self.kv, out=out, lse=lse, return_lse=True, **options
        )
        return found


def same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_left": 100},
        {"logits_soft_cap": 5.0},
        {"pos_encoding_mode": "ALIBI"},
        {"pos_encoding_mode": "ROPE_LLAMA"},
    ],
    ids=str,
)
def test_two_parts_give_what_one_gives(
    options: dict[str, Any], ragged: bool, two_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(ragged=ragged)
    wrapper = step.planned(**options)
    assert isinstance(wrapper.last_plan, PartedPlan)
    assert len(wrapper.last_plan.parts[1].merge_items()) > 0 or options.get("window_left")
    sinks = torch.linspace(-1.0, 1.0, HEADS)
    found = step.run(wrapper), step.run(wrapper, sinks=sinks)
    same(step.run(wrapper), found[0])
    monkeypatch.setattr(mixed_batch, "LEAST_GAIN_NS", 1e12)
    wrapper = step.planned(**options)
    assert not isinstance(wrapper.last_plan, PartedPlan)
    same(found[0], step.run(wrapper))
    same(found[1], step.run(wrapper, sinks=sinks))


def test_what_run_asks_for_otherwise_is_divided_too(two_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    wrapper = step.planned()
    found = step.run(wrapper, window_left=50)
    assert isinstance(wrapper.last_plan, PartedPlan) and wrapper.last_plan.options.window_left == 50
    monkeypatch.setattr(mixed_batch, "LEAST_GAIN_NS", 1e12)
    same(found, step.run(step.planned(window_left=50)))


def test_plans_of_both_kinds_follow_each_other(two_kernels: None) -> None:
    wrapper = Step().planned()
    for rows, kv_lens in (((1, 1), (50, 700)), (ROWS, KV_LENS), ((300, 90), (400, 90)), (ROWS[::-1], KV_LENS[::-1])):
        step = Step(rows, kv_lens)
        step.plan(wrapper)
        assert isinstance(wrapper.last_plan, PartedPlan) == (len(rows) > 2)
        same(step.run(wrapper), step.run(step.planned()))


def test_a_plan_in_parts_tells_of_both(two_kernels: None, tmp_path: Any) -> None:
    wrapper = Step().planned()
    plan = wrapper.last_plan
    first, second = plan.parts
    items, merges = plan.work_items(), plan.merge_items()
    assert plan.result.num_items == first.result.num_items + second.result.num_items
    assert len(items) == len(first.work_items()) + len(second.work_items())
    assert len(merges) == plan.result.num_merges
    assert set(items["request"]) == {i for i, rows in enumerate(ROWS) if rows}
    limit = 64 // (HEADS // KV_HEADS)
    assert (first.work_items()["q_len"] <= limit).all() and (second.work_items()["q_len"] > limit).all()
    assert ((items["q_len"] > limit) == (items["cta"] >= first.num_ctas)).all()
    cut = items[items["merge"] >= 0]
    assert len(cut) and (merges["request"][cut["merge"]] == cut["request"]).all()
    at = merges[cut["merge"]]
    assert (at["partial_row"] + cut["piece"] * at["partial_stride"] == cut["partial_row"]).all()
    assert plan.cta_loads().shape == (plan.num_ctas,) == (first.num_ctas + second.num_ctas,)
    assert plan.traffic().flops == first.traffic().flops + second.traffic().flops
    text = plan.explain()
    assert f"5 requests of at most {limit} rows on {first.num_ctas} CTAs, 2 of more on {second.num_ctas}" in text
    assert text.count("kernel cpu_attention") == 2 and "floor on H200" in text
    assert wrapper.resolved_backend == "cpu_attention + cpu_attention"
    assert f"{plan.num_ctas} CTAs as rows" in plan.picture()
    plan.to_svg(tmp_path / "plan.svg")


def test_what_is_planned_as_a_whole(two_kernels: None) -> None:
    step = Step()
    mask = torch.rand(sum(q * k for q, k in zip(ROWS, KV_LENS, strict=True))) < 0.9
    for options in ({"fixed_split_size": 16}, {"disable_split_kv": True}, {"custom_mask": mask}):
        assert not isinstance(step.planned(**options).last_plan, PartedPlan)
    graph = flashpage.BatchPrefillWithPagedKVCacheWrapper(
        float_workspace_buffer=torch.empty(16 << 20, dtype=torch.uint8),
        use_cuda_graph=True,
        max_batch=len(ROWS),
        max_pages=1000,
        max_rows=sum(ROWS),
    )
    step.plan(graph)
    assert not isinstance(graph.last_plan, PartedPlan)
    same(step.run(graph), step.run(step.planned()))


def test_a_missing_kernel_of_a_part(two_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for few rows is neither built nor can be compiled: one plan serves the batch."""
    make = option_plan.prepare

    def prepare(options: Any, rows: int, *others: Any) -> Any:
        if rows <= 64:
            raise flashpage.KernelMissingError("no kernel for few rows")
        return make(options, rows, *others)

    monkeypatch.setattr(option_plan, "prepare", prepare)
    wrapper = Step().planned()
    for _ in range(2):
        assert not isinstance(wrapper.last_plan, PartedPlan)
        Step().plan(wrapper)


@pytest.mark.parametrize("limit", ["max_token_per_sequence", "max_sequence_kv"])
def test_limits_of_lengths_hold_for_both_parts(limit: str, two_kernels: None) -> None:
    with pytest.raises(flashpage.PlanError, match=limit):
        Step().planned(**{limit: 10})
    assert isinstance(Step().planned(**{limit: 3000}).last_plan, PartedPlan)


def test_promised_workspaces_hold_both_plans(two_kernels: None) -> None:
    for rows, kv_lens in ((ROWS, KV_LENS), ((1, 90), (6000, 90)), ((1, 900) * 5, (3000, 900) * 5)):
        step = Step(rows, kv_lens)
        wrapper = step.planned()
        promised = wrapper.workspace_size(
            step.rows,
            *step.lengths,
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim_qk=DIM,
            page_size=PAGE,
            causal=True,
            q_data_type=torch.float32,
        )
        wrapper.reset_workspace_buffer(*(torch.empty(size, dtype=torch.uint8) for size in promised))
        step.plan(wrapper)
        assert isinstance(wrapper.last_plan, PartedPlan)
        same(step.run(wrapper), step.run(step.planned()))


def test_wrong_lengths_are_reported_as_without_parts(two_kernels: None) -> None:
    step = Step()
    step.lengths[2][1] = PAGE + 1
    with pytest.raises(flashpage.PlanError, match=r"paged_kv_last_page_len\[1\]=17 is outside 1..16"):
        step.planned()
