"""Runs of plans with whole units (include/flashpage/plan/whole_units.h), on every device."""

from __future__ import annotations

from typing import Any

import pytest
from capacity_steps import capture
from cases.case import Case, prefill
from cluster_sizes import schedule_of
from comparison import Outputs, compare
from harness import Runner
from inputs import make_inputs, reference_states
from steps import Steps

from flashpage import native
from flashpage.kernels import schedules


@pytest.fixture
def many_ctas() -> Any:
    """As many CPU threads as a card has CTAs."""
    native.load().fp_cpu_set_threads(33)
    yield
    native.load().fp_cpu_set_threads(0)


def give_every_schedule(monkeypatch: pytest.MonkeyPatch, **values: float) -> None:
    """Changes the schedule of every planner that is made from here on."""
    make = schedules.schedule

    def schedule(*arguments: Any) -> native.Schedule:
        made = make(*arguments)
        for name, value in values.items():
            setattr(made, name, value)
        return made

    monkeypatch.setattr(schedules, "schedule", schedule)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch, many_ctas: None) -> None:
    give_every_schedule(monkeypatch, ns_per_merge=1e9)


@pytest.fixture
def in_waves(monkeypatch: pytest.MonkeyPatch, many_ctas: None) -> None:
    """Several waves if units are not dealt, as on a card with a small cache."""
    give_every_schedule(monkeypatch, ns_per_merge=1e9, wave_tokens=600)


class Kept(Runner):
    """Keeps the runner's wrapper."""

    wrapper: Any = None

    def planned(self) -> Any:
        self.wrapper = super().planned()
        return self.wrapper


def plan_of_run(case: Case, device: str) -> Any:
    """The plan of a run, whose results are checked."""
    import flashpage

    inputs = make_inputs(case)
    runner = Kept(inputs, device, flashpage)
    compare(case, runner.run(), reference_states(inputs))
    return runner.wrapper.last_plan


LENS = ((700, 150, 0, 1), (1300, 150, 20, 900))
CASES = [
    prefill("whole-ragged", "", (1000, 33), (1000, 33), entry="ragged", causal=True),
    prefill("whole-paged", "requests with no row and with one row", *LENS, causal=True),
    prefill("whole-bits", "a mask, whose units come from a queue", *LENS, mask="dense"),
    prefill("whole-heads", "a list a CTA", *LENS, num_q_heads=10, num_kv_heads=5, head_dim=128, causal=True),
    prefill("whole-window", "", *LENS, causal=True, window_left=100),
]
TAILS = [
    prefill("whole-tail", "whole units after runs", (1000, 700, 900), (1000, 700, 1900), entry="ragged", causal=True),
    prefill("whole-tail-heads", "a list a CTA", *LENS, num_q_heads=20, num_kv_heads=20, head_dim=128, causal=True),
]


@pytest.mark.parametrize("case", CASES + TAILS, ids=lambda case: case.name)
def test_run(case: Case, device: str, always: None, kernels: None) -> None:
    if case in TAILS:
        native.load().fp_cpu_set_threads(4)  # few CTAs
    plan = plan_of_run(case, device)
    if device != "cpu" and (case.mask or case in TAILS):
        return  # with a mask a card's CTAs claim units; a card has too many CTAs for runs before a tail
    assert plan.result.num_merges == 0 and (plan.work_items()["num_units"] == 1).all() == (case in CASES)


@pytest.mark.parametrize("case", CASES[:2] + CASES[3:], ids=lambda case: case.name)
def test_run_side_by_side(case: Case, device: str, in_waves: None, kernels: None) -> None:
    plan = plan_of_run(case, device)
    assert plan.result.num_merges == 0 and (plan.work_items()["num_units"] == 1).all()


STEPS = (((400, 30), (900, 64)), ((0, 430), (0, 1000)), ((7, 1), (300, 1000)), ((130, 300), (130, 300)))


def test_one_launch_serves_both_kinds(device: str, always: None) -> None:
    """One graph launch runs dealt batches and cut ones, in workspaces for a capacity."""
    cases = [
        prefill(f"whole-step-{i}", "a step", q_lens, kv_lens, causal=True, cache="fused")
        for i, (q_lens, kv_lens) in enumerate(STEPS)
    ]
    steps = Steps(cases, device)
    wrapper = steps.wrapper(use_cuda_graph=True, **steps.capacity)
    steps.load(0)
    steps.plan(wrapper, 0)
    replay, schedule, merges = capture(wrapper, steps), schedule_of(wrapper), set()
    for number in range(4 * len(steps)):
        i = number * 3 % len(steps)
        schedule.ns_per_merge = 1e9 if number % 4 < 2 else 0.0
        steps.load(i)
        steps.plan(wrapper, i)
        merges.add(wrapper.last_plan.result.num_merges > 0)
        replay()
        steps.check(i, Outputs(steps.out, steps.lse))
    assert merges == {False, True}
