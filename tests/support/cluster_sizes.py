"""Plans whose units all have clusters of one chosen size, also where that is slow, for tests and measurements."""

from __future__ import annotations

from typing import Any

from flashpage import native
from flashpage.kernels import choose as backends
from flashpage.kernels import schedules
from flashpage.kernels.schedules import CLUSTER_SIZES

FREELY = -1  # as the planner chooses
GENERAL = 0  # units are cut anywhere, without clusters


def choose(schedule: native.Schedule, size: int) -> bool:
    """Changes one planner from its next plan on. Returns False if the device runs no clusters of that size.

    Size 1 is one CTA for each unit. Batches with more units than clusters are planned without clusters.
    """
    if size == FREELY:
        return True
    for i, other in enumerate(CLUSTER_SIZES):
        schedule.clusters[i] = schedule.clusters[i] if other == size else 0
    if size != GENERAL:
        schedule.full_speed_share = schedule.ns_per_cluster_merge = schedule.ns_per_cluster_unit = 0.0
        schedule.ns_per_merge = 1e9
    return size == GENERAL or any(schedule.clusters)


def schedule_of(wrapper: Any) -> native.Schedule:
    """The schedule of a wrapper that has planned once."""
    found: native.Schedule = wrapper._planner.active[0].prepared.schedule
    return found


def give_to_cpu(schedule: native.Schedule) -> None:
    """Pretends that the CPU's threads come in clusters: it runs such plans like any others."""
    schedule.clusters = tuple(schedule.num_ctas // size for size in CLUSTER_SIZES)
    schedule.cluster_rows, schedule.cluster_piece_tokens = schedule.tile_q, 32


def chosen_for_all(monkeypatch: Any, size: int) -> None:
    """Changes every planner that is made from here on."""
    make = schedules.schedule

    def schedule(choice: backends.KernelChoice, *arguments: Any) -> native.Schedule:
        made = make(choice, *arguments)
        if choice.kernel.backend == "cpu":
            give_to_cpu(made)
        if any(made.clusters):
            choose(made, size)
        return made

    monkeypatch.setattr(schedules, "schedule", schedule)
