"""Plans whose units have clusters of one chosen size, whatever that costs: for tests and measurements."""

from __future__ import annotations

from typing import Any

from flashpage import native
from flashpage.kernels import choose as backends
from flashpage.kernels import schedules
from flashpage.kernels.schedules import CLUSTER_SIZES

FREELY = -1  # as the planner thinks best
GENERAL = 0  # units are anywhere


def choose(schedule: native.Schedule, size: int) -> bool:
    """Of one planner, from its next plan on. False where the device runs no clusters of that size.

    1: a CTA a unit. Batches with more units than clusters run at once are planned as without.
    """
    if size == FREELY:
        return True
    for i, other in enumerate(CLUSTER_SIZES):
        schedule.clusters[i] = schedule.clusters[i] if other == size else 0
    if size != GENERAL:
        schedule.full_speed_share = schedule.ns_per_cluster_merge = schedule.ns_per_unit = 0.0
        schedule.ns_per_merge = 1e9
    return size == GENERAL or any(schedule.clusters)


def schedule_of(wrapper: Any) -> native.Schedule:
    """What a wrapper that has planned once plans the next batch by."""
    found: native.Schedule = wrapper._planner.active[0].prepared.schedule
    return found


def give_to_cpu(schedule: native.Schedule) -> None:
    """As if the CPU's threads came in clusters: it runs such plans as any other."""
    schedule.clusters = tuple(schedule.num_ctas // size for size in CLUSTER_SIZES)
    schedule.cluster_rows, schedule.cluster_piece_tokens = schedule.tile_q, 32


def chosen_for_all(monkeypatch: Any, size: int) -> None:
    """Of every planner that is made from here on."""
    make = schedules.schedule

    def schedule(choice: backends.Choice, *arguments: Any) -> native.Schedule:
        made = make(choice, *arguments)
        if choice.kernel.backend == "cpu":
            give_to_cpu(made)
        if any(made.clusters):
            choose(made, size)
        return made

    monkeypatch.setattr(schedules, "schedule", schedule)
