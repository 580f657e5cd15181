"""The schedule of a batch on a card of the table, and a plan's bytes, without wrapper, kernel and card."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np

from ... import native
from ...kernels import choose
from ...kernels.context_classes import ContextClass
from ...kernels.devices import Device
from ...kernels.options import Options
from ...kernels.schedules import NO_CLUSTERS, Clusters
from ...kernels.schedules import schedule as schedule_of
from ...kernels.tile import Cost, Tile
from ...kernels.work import Problem
from ..prepared_kernels import CPU_CTAS_PER_THREAD


def schedule_on_card(
    problem: Problem,
    card: Device,
    num_ctas: int | None = None,
    *,
    tile: Tile | None = None,
    cost: Cost | None = None,
    clusters: Clusters = NO_CLUSTERS,
) -> tuple[choose.KernelChoice, native.Schedule]:
    """The kernel of a problem on a card of the table (or the CPU), and its schedule; arguments as in plan_lengths."""
    choice = choose.choose_for_card(problem, card)
    usual = choose.choose_for_card(dataclasses.replace(problem, contexts=ContextClass.USUAL), card).spec.tile
    own = choice.spec.tile
    assert usual is not None and own is not None
    if num_ctas is None:
        num_ctas = card.sms * usual.ctas_per_sm if card.sm else native.load().fp_cpu_threads() * CPU_CTAS_PER_THREAD
    if tile is not None:
        choice = dataclasses.replace(choice, spec=dataclasses.replace(choice.spec, tile=tile))
    else:
        num_ctas = num_ctas * own.ctas_per_sm // usual.ctas_per_sm
    choice = dataclasses.replace(choice, cost=cost or choice.cost)
    return choice, schedule_of(choice, problem.options, num_ctas // choice.spec.ctas, clusters)


def plan_arrays(
    options: Options, schedule: native.Schedule, q_lens: list[int], kv_lens: list[int]
) -> tuple[native.PlanResult, bytes]:
    """Plans into memory that is large enough; returns the result and the plan's bytes."""
    lens = np.asarray(kv_lens, np.int64)
    entries = -(-lens // options.page_span) if options.page_span else lens
    arrays = [_indptr(np.asarray(q_lens, np.int64)), _indptr(entries), lens]
    pointers = [native.IndexArray(a.ctypes.data, 1, 1, len(a)) for a in arrays]
    problem = native.ProblemStruct(
        batch=len(lens),
        q_indptr=pointers[0],
        kv_indptr=pointers[1],
        kv_lens=pointers[2],
        page_size=options.page_span,
        num_q_heads=options.num_q_heads,
        num_kv_heads=options.num_kv_heads,
        visibility=options.visibility,
    )
    library, result = native.load(), native.PlanResult()
    addresses = ctypes.addressof(problem), ctypes.addressof(schedule)
    capacity = 1 << 16
    while True:
        buffer = np.empty(capacity, np.uint8)
        status = library.fp_plan(*addresses, buffer.ctypes.data, capacity, ctypes.addressof(result))
        if status != native.WORKSPACE_TOO_SMALL:
            break
        capacity = result.used_bytes
    native.check(status)
    return result, buffer[: result.used_bytes].tobytes()


def _indptr(lens: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lens)])
