"""Bytes of workspaces that suffice for every batch within given sizes."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .. import native
from ..kernels import choose, devices
from ..kernels.context_classes import ContextClass
from ..kernels.context_lengths import ContextLengths
from ..kernels.options import Options
from ..kernels.schedules import most_units, with_one_cluster_size
from ..kernels.schedules import schedule as schedule_of
from ..kernels.work import Problem
from .lengths import Lengths, Names, batch_of, check_numbers, to_host, wrong_shape
from .mixed_batch import largest_schedules
from .prepared_kernels import PreparedKernels
from .workspaces import partial_bytes


class Sizes(NamedTuple):
    """What no batch exceeds."""

    batch: int  # requests
    total_q: int
    total_kv: int
    longest: int = 0  # KV tokens of one request, on which a fixed split's bounds depend most; 0: total_kv


def workspace_of(lengths: Lengths, options: Options, names: Names, device: torch.device) -> tuple[int, int]:
    """workspace_bounds of a batch with these lengths, which are checked; `names`: the caller's."""
    for name, tensor in zip(names, lengths, strict=False):
        if tensor is not None:
            check_numbers(tensor, name)
    host = to_host(lengths)
    q_indptr, kv_indptr, _, kv_lens = host
    batch = batch_of(kv_indptr, names[1])
    assert kv_indptr is not None
    for i, tensor in enumerate(host):
        if tensor is not None and tensor.shape != (batch + (i < 2),):
            raise wrong_shape(tensor, batch + (i < 2), names[i], names[1])
    total_q = options.uniform_q_len * batch if q_indptr is None else int(q_indptr[-1])
    if kv_lens is None:
        total_kv = int(kv_indptr[-1] - kv_indptr[0]) * max(1, options.page_span)
    else:
        total_kv = int(kv_lens.sum())
    return workspace_bounds(options, Sizes(batch, total_q, total_kv), device)


def workspace_bounds(options: Options, sizes: Sizes, device: torch.device) -> tuple[int, int]:
    """Bytes of the float and the int workspace that no batch within these sizes exceeds, whether planned as a whole or
    in parts."""
    prepared = PreparedKernels(options, choose.packed_rows(options, sizes.batch, sizes.total_q), device)
    num_ctas = prepared.schedule.num_ctas
    units = most_units(options, prepared.schedule.tile_q, sizes.batch, sizes.total_q)
    candidates = [
        bounds_of(prepared, sizes),
        _bounds(options, with_one_cluster_size(prepared.schedule, units)[0], sizes),  # as a graph plans
        _bounds_of_fewer_rows(prepared, sizes, device),
        _bounds_of_parts(options, sizes, num_ctas, device),
    ]
    for contexts in ContextLengths(options, devices.of(device)).classes:
        candidates.append(_bounds_of_class(contexts, options, sizes, num_ctas, device))
    float_bytes, int_bytes = zip(*candidates, strict=True)
    return max(float_bytes), max(int_bytes)


def _bounds_of_parts(options: Options, sizes: Sizes, num_ctas: int, device: torch.device) -> tuple[int, int]:
    """Bounds for batches planned in parts, whose plans and partial results lie one after the other."""
    float_bytes = int_bytes = 0
    for schedule in largest_schedules(options, num_ctas, device):
        of_part = _bounds(options, schedule, sizes)
        float_bytes += of_part[0]
        int_bytes += -(-of_part[1] // 16) * 16  # a plan starts on 16 bytes
    return float_bytes, int_bytes


def _bounds_of_fewer_rows(prepared: PreparedKernels, sizes: Sizes, device: torch.device) -> tuple[int, int]:
    """Bounds for batches of fewer rows a request, whose tiles an SM runs in more CTAs."""
    options, usual, found = prepared.options, prepared.choice.spec.tile, (0, 0)
    assert usual is not None
    rows = choose.packed_rows(options, sizes.batch, sizes.total_q) // 2
    # Where the rows of the choice do not follow from those of a batch, there are no batches of fewer.
    while rows >= options.group_size and choose.packed_rows(options, 1, rows // options.group_size) == rows:
        fewer = choose.choose(Problem(options, rows), device)
        tile, total = fewer.spec.tile, min(sizes.total_q, sizes.batch * (rows // options.group_size))
        assert tile is not None
        if tile.ctas_per_sm > usual.ctas_per_sm:
            num_ctas = prepared.schedule.num_ctas * tile.ctas_per_sm // usual.ctas_per_sm
            of_rows = _bounds(options, schedule_of(fewer, options, num_ctas), sizes._replace(total_q=total))
            found = max(found[0], of_rows[0]), max(found[1], of_rows[1])
        rows //= 2
    return found


def _bounds_of_class(
    contexts: ContextClass, options: Options, sizes: Sizes, num_ctas: int, device: torch.device
) -> tuple[int, int]:
    """Bounds for batches of a class with other units, or with tiles of which an SM runs more CTAs. Pairs of CTAs need
    no more than single ones. `num_ctas`: CTAs of the usual tiles."""
    usual, other = (
        choose.choose(Problem(options, choose.MANY_ROWS, contexts=each), device)
        for each in (ContextClass.USUAL, contexts)
    )
    assert other.spec.tile is not None and usual.spec.tile is not None
    if other.spec.tile.ctas > usual.spec.tile.ctas:
        return 0, 0
    schedule = schedule_of(other, options, num_ctas * other.spec.tile.ctas_per_sm // usual.spec.tile.ctas_per_sm)
    return _bounds(options, schedule, sizes)


def bounds_of(prepared: PreparedKernels, sizes: Sizes) -> tuple[int, int]:
    """Bounds for batches planned as a whole, with known kernel and schedule."""
    return _bounds(prepared.options, prepared.schedule, sizes)


def _bounds(options: Options, schedule: native.Schedule, sizes: Sizes) -> tuple[int, int]:
    max_q_rows = 0 if options.uniform_q_len == 1 else sizes.total_q  # 0: one row a request, a closer bound
    plan_bytes, partial_rows = ctypes.c_int64(), ctypes.c_int64()
    native.check(
        native.load().fp_plan_bounds(
            *(sizes.batch, max_q_rows, sizes.total_kv, sizes.longest, options.num_q_heads, options.num_kv_heads),
            *(ctypes.byref(options.visibility), ctypes.byref(schedule)),
            *(ctypes.byref(plan_bytes), ctypes.byref(partial_rows)),
        )
    )
    return partial_bytes(partial_rows.value, options.head_dim_vo), plan_bytes.value
