"""Runs of units with their own CTAs: on a card pieces merge inside clusters, on the CPU through partials.

Memory that must not be read is NaN (tests/support/harness.py), partials included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from capacity_steps import capture
from cases.case import Case, decode, prefill
from cluster_sizes import GENERAL, choose, chosen_for_all, schedule_of
from comparison import Outputs, compare
from harness import Runner
from inputs import make_inputs, reference_states
from steps import Steps, assert_same_bits

from flashpage import native
from flashpage.kernels.schedules import CLUSTER_SIZES

LENS = (700, 33, 0, 1, 513)  # enough for most ranks, for few, and for none
SHORT = (64, 31, 96)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CASES = [
    *(
        decode(f"clusters-{q_len}x{group}", "packed rows", LENS, q_len=q_len, num_q_heads=group, num_kv_heads=1)
        for q_len, group in ((1, 1), (1, 2), (1, 3), (1, 4), (5, 1), (3, 2), (1, 7), (1, 8), (3, 3), (3, 5), (4, 4))
    ),
    decode("clusters-short", "contexts of at most two steps", SHORT, head_dim=128),
    decode("clusters-tiles", "two row tiles", (400, 300), q_len=7, num_q_heads=4, num_kv_heads=1),
    decode("clusters-128", "the head counts of common models", (2100,), num_q_heads=32, num_kv_heads=8, head_dim=128),
    decode("clusters-256", "", LENS, head_dim=256, num_q_heads=4),
    decode("clusters-80", "head dim 80, which fills no tile", LENS, head_dim=80),
    decode("clusters-512", "head dim 512, which has no mailbox and so no clusters", LENS, head_dim=512),
    decode("clusters-e4m3", "", LENS, head_dim=128, kv_dtype=E4M3),
    decode("clusters-e5m2-256", "two warps share the columns", LENS, head_dim=256, kv_dtype=E5M2),
    decode("clusters-page-1", "rows", LENS, head_dim=128, page_size=1),
    decode("clusters-window", "a window that begins inside a step", LENS, window_left=200, hidden_nan=True),
    decode("clusters-no-lse", "", LENS, outputs="no_lse"),
    decode("clusters-strided", "", LENS, outputs="strided"),
    decode("clusters-cap", "", LENS, soft_cap=20.0),
    decode("clusters-rope", "RoPE, which has no mailbox and so no clusters", LENS, position="ROPE_LLAMA"),
    decode("clusters-scales", "a merged value is scaled once", LENS, scales="per_head"),
    prefill(
        "clusters-sinks",
        "sinks, which count in piece 0 only",
        (1, 2, 1),
        (700, 300, 40),
        entry="sink",
        sinks=True,
        causal=True,
    ),
    prefill("clusters-causal", "rows of a unit with different ends", (4, 1), (600, 513), causal=True),
]


@pytest.fixture(autouse=True)
def many_threads() -> Iterator[None]:
    """As many CPU threads as a card has CTAs."""
    native.load().fp_cpu_set_threads(33)
    yield
    native.load().fp_cpu_set_threads(0)


class Kept(Runner):
    """Keeps the runner's wrapper."""

    wrapper: Any = None

    def planned(self) -> Any:
        self.wrapper = super().planned()
        return self.wrapper


@pytest.mark.parametrize("size", [GENERAL, *CLUSTER_SIZES])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_size(case: Case, size: int, device: str, monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    """Each plan runs twice, so that leftovers of the first launch would show."""
    import flashpage

    chosen_for_all(monkeypatch, size)
    inputs = make_inputs(case)
    runner = Kept(inputs, device, flashpage)
    outputs = runner.run()
    compare(case, outputs, reference_states(inputs))
    assert runner.wrapper.last_plan.result.cluster_size in (0, size)  # 0 if there are more units than clusters
    if outputs.lse is not None:
        q, kv, again = runner.q(), runner.kv(), runner.make_outputs()
        extra = {} if inputs.sinks is None else {"sinks": inputs.sinks.to(device), "sm_scale": case.sm_scale}
        extra |= runner._scale_arguments()
        runner.wrapper.run(q, *kv, out=again.out, lse=again.lse, return_lse=True, **extra)
        assert_same_bits(Outputs(outputs.out, outputs.lse), Outputs(again.out, again.lse))


def test_clusters_are_used(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the sizes of the test above occur."""
    import flashpage

    for size in CLUSTER_SIZES[1:]:
        with monkeypatch.context() as patch:
            chosen_for_all(patch, size)
            runner = Kept(make_inputs(CASES[3]), device, flashpage)
            runner.run()
        plan = runner.wrapper.last_plan
        if plan.schedule.clusters[size.bit_length() - 1] >= 5:
            assert plan.result.cluster_size == size and plan.result.num_ctas == 5 * size
            assert plan.work_items()["piece"].max() >= 1


STEPS = ((700, 64, 0), (5000, 1, 33), (0, 0, 0), (2000, 2000, 2000), (40, 900, 7))


@pytest.mark.parametrize("captured", [GENERAL, 4])
def test_one_launch_serves_plans_of_both_kinds(captured: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's launches have clusters, whichever plans they run."""
    chosen_for_all(monkeypatch, 4)
    cases = [decode(f"clusters-step-{i}", "a step", lens, cache="fused") for i, lens in enumerate(STEPS)]
    steps = Steps(cases, device)
    wrapper = steps.wrapper(use_cuda_graph=True, **steps.capacity)
    steps.load(0)
    steps.plan(wrapper, 0)
    schedule, option_plan = schedule_of(wrapper), wrapper._planner.active[0]
    clusters = tuple(schedule.clusters)
    part = option_plan.parts[0]
    assert clusters[2] * 4 == schedule.num_ctas == part.num_ctas and part.cluster_size == 4
    choose(schedule, captured)
    steps.plan(wrapper, 0)
    replay = capture(wrapper, steps)
    sizes = set()
    for number in range(4 * len(steps)):
        i = number * 3 % len(steps)
        schedule.clusters = clusters if number % 4 < 2 else (0,) * 5
        steps.load(i)
        wrapper._float_workspace_buffer.fill_(255)  # NaN
        steps.plan(wrapper, i)
        sizes.add(wrapper.last_plan.result.cluster_size)
        replay()
        steps.check(i, Outputs(steps.out, steps.lse))
        part = option_plan.parts[0]
        assert (part.num_ctas, part.cluster_size) == (schedule.num_ctas, 4)
    assert sizes == {0, 4}
