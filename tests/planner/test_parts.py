"""Mixed batches in two parts: which are divided and how, and that both plans together cover the batch."""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plan_calls import PlanCall
from planner_batches import Batch, Cutting, arrays_of, problem_of, unpack
from planner_checks import check, check_balance

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import choose, devices, schedules
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem
from flashpage.plan import mixed_batch
from flashpage.plan.buffers import PlanBuffer

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
