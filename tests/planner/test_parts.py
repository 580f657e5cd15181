"""Mixed batches in two parts: which are divided and how, that both plans together cover the batch, and that runs equal
those of one plan. Here both launches run on the CPU; tests/card/test_card_parts.py has the card's."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plan_calls import PlanCall
from planner_batches import Batch, Cutting, arrays_of, problem_of, unpack
from planner_checks import check, check_balance

import flashpage
from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import choose, cpu_attention, devices, schedules
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem
from flashpage.plan import mixed_batch
from flashpage.plan.buffers import PlanBuffer
from flashpage.plan.report.mixed import PartedPlan

pytestmark = pytest.mark.usefixtures("quick_kernels")

HOPPER = torch.device("cuda:0")
OPTIONS = Options(
    kv_source="paged",
    num_q_heads=32,
    num_kv_heads=8,
    head_dim_qk=128,
    head_dim_vo=128,
    page_size=16,
    q_dtype=DType.BFLOAT16,
    kv_dtype=DType.BFLOAT16,
    out_dtype=DType.BFLOAT16,
    causal=True,
)


# ---------------------------------------------------------------- which batches are divided, and how


class Divided:
    """A batch for an imaginary card of 132 SMs, and how the planner divides it."""

    def __init__(
        self, q_lens: np.ndarray, kv_lens: np.ndarray, *, room: int = 1 << 24, partial_rows: int = 1 << 24
    ) -> None:
        self.batch = Batch(q_lens, kv_lens, OPTIONS.num_q_heads, OPTIONS.num_kv_heads, causal=True)
        arrays = arrays_of(self.batch)
        self.problem = problem_of(self.batch, arrays)
        address = ctypes.addressof(self.problem)
        limit = mixed_batch.most_few_rows(OPTIONS, HOPPER)
        counted = native.Parts(most_few_rows=limit)
        native.load().fp_parts_count(address, ctypes.addressof(counted))
        sizes = (
            (len(q_lens), int(q_lens.sum())),
            (counted.few_requests, counted.few_rows),
            (counted.many_requests, counted.many_rows),
        )
        self.prepared = tuple(_prepared(*size) for size in sizes)
        self.memory = torch.zeros(room, dtype=torch.uint8)
        self.parts = mixed_batch.MixedBatchPlan(limit)
        self.parts.use(*self.prepared)
        self.struct = self.parts._struct
        self.call = PlanCall(self.problem, self.prepared[0].schedule)
        self.call.struct.parts, self.call.struct.most_partial_rows = self.parts.address, partial_rows
        self.slot = PlanBuffer(-1, self.memory, self.call.struct)
        self.slot.plan(self.call.address, 0, True)
        self.found = self.parts.made() if self.call.struct.made_parts else None

    @property
    def ctas(self) -> tuple[int, int]:
        first, second = self.struct.schedules
        return first.num_ctas, second.num_ctas

    def check(self) -> None:
        """Every unit occurs once: units of requests with few rows in the first plan, the others in the second."""
        assert self.found is not None
        limit, data = self.parts.most_few_rows, self.memory.numpy()
        for i, limits in enumerate(({"most_rows": limit}, {"least_rows": limit + 1})):
            schedule, part = self.struct.schedules[i], self.found[i]
            cutting = Cutting(*(getattr(schedule, field.name) for field in dataclasses.fields(Cutting)))
            served = dataclasses.replace(self.batch, **limits)
            planned = unpack(served, cutting, data[part.offset :], part.result)
            check_balance(planned, check(planned))
        first, second = self.found
        assert first.offset + first.result.used_bytes <= second.offset
        assert first.result.num_partial_rows <= second.partial_row
        assert self.slot.result.used_bytes == second.offset + second.result.used_bytes
        assert self.slot.last_bytes() == data[: self.slot.result.used_bytes].tobytes()


def _prepared(batch: int, rows: int) -> Any:
    problem = Problem(OPTIONS, choose.packed_rows(OPTIONS, batch, rows))
    choice = choose.choose(problem, HOPPER)
    schedule = schedules.schedule(choice, OPTIONS, 132)
    return SimpleNamespace(
        problem=problem,
        choice=choice,
        schedule=schedule,
        schedule_address=ctypes.addressof(schedule),
        merges_after=lambda result: result.num_merges,
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)


def mixed(prefills: int, q_len: int, decodes: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch with prompts among decodes."""
    q_lens = np.array([q_len] * prefills + [1] * decodes)
    kv_lens = np.array([q_len] * prefills + [kv_len] * decodes)
    order = np.random.default_rng(0).permutation(len(q_lens))
    return q_lens[order], kv_lens[order]


def test_a_prompt_beside_decodes_takes_the_sms_that_memory_has_no_use_for(hopper: None) -> None:
    divided = Divided(*mixed(1, 4096, 128, 8192))
    divided.check()
    assert divided.ctas == (96, 36)
    assert [prepared.choice.spec.kernel for prepared in divided.prepared[1:]] == ["decode_sm90", "prefill_sm90"]
    loads = [part.result.cost_max_ns for part in divided.found or ()]
    assert divided.struct.parts_ns < 1.05 * loads[0] * 96 / 132  # as fast as on all SMs, within 15%
    assert loads[1] < 1.05 * divided.struct.parts_ns


@pytest.mark.parametrize(("prefills", "q_len", "decodes", "kv_len"), [(4, 2048, 64, 4096), (1, 512, 256, 1024)])
def test_both_parts_end_together_or_the_longer_is_not_slowed(
    hopper: None, prefills: int, q_len: int, decodes: int, kv_len: int
) -> None:
    divided = Divided(*mixed(prefills, q_len, decodes, kv_len))
    divided.check()
    assert divided.struct.parts_ns < divided.struct.whole_ns and sum(divided.ctas) == 132
    assert divided.ctas[1] >= 132 // 12  # few units need more SMs than their cost suggests


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ([1] * 64, [4096] * 64),
        ([1024] * 16, [1024] * 16),
        ([1, 16] * 32, [4096] * 64),  # 64 packed rows count as few
        ([17, 600], [4096] * 2),
        ([0, 17, 0], [100] * 3),
        ([1, 300, 1], [200, 300, 90]),  # both kinds, but hardly any work
        ([1] * 4 + [2000], [30] * 4 + [9000]),
        # 64 packed rows read no faster when other CTAs do not: an H200 took 494 us for such a batch, as one plan 296
        ([*range(4, 17)] * 10 + [*range(17, 113)], [1039] * 226),
        ([], []),
    ],
)
def test_one_kind_of_requests_or_little_work_of_one_is_planned_as_a_whole(
    hopper: None, q_lens: list[int], kv_lens: list[int]
) -> None:
    assert Divided(np.array(q_lens, np.int64), np.array(kv_lens, np.int64)).found is None


def test_random_batches(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_batch, "LEAST_GAIN_NS", -1e12)
    rng = np.random.default_rng(0)
    for _ in range(60):
        count = int(rng.integers(2, 200))
        q_lens = rng.choice([0, 1, 1, 1, 3, 16, 17, 200, 1500], count)
        q_lens[:2] = 1, 40
        Divided(q_lens, np.where(rng.random(count) < 0.1, 0, rng.lognormal(6, 1.5, count).astype(np.int64) + 1)).check()


def test_where_two_plans_do_not_fit_there_is_one(hopper: None) -> None:
    batch = mixed(1, 4096, 128, 8192)
    whole = Divided(*batch)
    assert whole.found is not None
    first, second = whole.found
    needed = whole.slot.result.used_bytes
    rows = second.partial_row + second.result.num_partial_rows
    assert Divided(*batch, room=needed, partial_rows=rows).found is not None
    assert Divided(*batch, room=needed - 1).found is None
    assert Divided(*batch, room=first.result.used_bytes - 1).found is None
    assert rows > 0 and Divided(*batch, partial_rows=rows - 1).found is None


def test_plans_larger_than_a_staging_slot(hopper: None) -> None:
    divided = Divided(*mixed(8, 1024, 6000, 1000))
    divided.check()
    assert divided.slot.result.used_bytes > 256 << 10


@pytest.mark.parametrize(
    ("changed", "sm", "rows"),
    [
        ({}, 90, 16),
        ({"num_kv_heads": 32}, 90, 64),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, 90, 8),  # more than 32 packed rows are prefill_sm90's
        ({"num_kv_heads": 1, "num_q_heads": 128}, 90, 0),
        ({"kv_dtype": DType.FLOAT8_E4M3}, 90, 16),
        ({"position_encoding": "ALIBI"}, 90, 16),
        ({"position_encoding": "ROPE_LLAMA"}, 90, 16),
        ({"position_encoding": "ROPE_LLAMA", "kv_dtype": DType.FLOAT8_E4M3}, 90, 0),
        ({"head_dim_qk": 512, "head_dim_vo": 512}, 90, 0),
        ({}, 80, 0),
        ({}, 100, 0),
    ],
)
def test_rows_of_the_first_part(changed: dict[str, Any], sm: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "of", lambda _: devices.H200 if sm == 90 else devices.named("A100"))
    assert mixed_batch.most_few_rows(dataclasses.replace(OPTIONS, **changed), HOPPER) == rows


@pytest.mark.parametrize("changed", [{"uniform_q_len": 1}, {"fixed_piece_tokens": 256}, {"has_mask": True}])
def test_options_that_have_no_parts(changed: dict[str, Any]) -> None:
    assert mixed_batch.may_have_parts(OPTIONS) and not mixed_batch.may_have_parts(
        dataclasses.replace(OPTIONS, **changed)
    )


# ---------------------------------------------------------------- plan and run

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
