"""Builds the kernels of a group of layers when the engine starts, at the same time where several are missing: a request
never waits for a compiler, and a compiler that is missing stops the start."""

from __future__ import annotations

import contextlib

import torch

from ... import jit
from ...base.dtypes import DType
from ...base.errors import KernelMissingError
from ...kernels import blocks, choose, devices, helpers
from ...kernels.context_classes import CLASSES
from ...kernels.options import Options
from ...kernels.spec import KernelSpec
from ...kernels.work import Problem
from ...plan import gather_rows
from ...plan.prepared_kernels import mask_tiles_spec, trace
from .group_plans import GroupPlans, Use


def prebuild(plans: GroupPlans, uses: tuple[Use, ...]) -> None:
    """Builds the kernels for any rows of these uses. Layers that differ only in what a run gives share kernels, except
    those with a soft cap."""
    specs: dict[KernelSpec, None] = {}
    of_copies: dict[KernelSpec, None] = {}
    for use in uses:
        for options in plans.all_options(use):
            specs |= dict.fromkeys(attention_kernels(options, plans.device))
            if not use.is_graph:
                of_copies |= dict.fromkeys(_kernels_of_copies(options, plans.device))
    if plans.device.type == "cuda":
        specs |= dict.fromkeys(_helpers(plans))
    with contextlib.suppress(KernelMissingError):
        jit.prebuild(specs | of_copies, plans.device)
        return
    jit.prebuild(specs, plans.device)  # plans do without copies


def attention_kernels(options: Options, device: torch.device, least_rows: float = 1) -> list[KernelSpec]:
    """The kernels for all numbers of rows, a power of two each, and for contexts of any length, with those that find
    their tiles before them and that merge after them on a card.

    Args:
        least_rows: packed rows of a request, on average, below which there are no batches.
    """
    variant = trace(options, 1.0, device).spec
    powers = [1 << i for i in range(choose.MANY_ROWS.bit_length())]
    rows = [options.group_size] if options.uniform_q_len else [rows for rows in powers if 2 * rows > least_rows]
    problems = (
        Problem(options, count, has_known_lengths=is_known, contexts=contexts)
        for count in rows
        for is_known in (True, False)
        for contexts in CLASSES
    )
    choices = [choose.choose(problem, device, variant) for problem in problems]
    found = [choice.spec for choice in choices]
    if device.type == "cuda":
        tiles = [mask_tiles_spec(choice, options) for choice in choices]
        found += [spec for spec in tiles if spec is not None]
        found.append(helpers.merge_spec(options.out_dtype, options.head_dim_vo))
    return found


def _kernels_of_copies(options: Options, device: torch.device) -> list[KernelSpec]:
    """The kernels that copy K and V before prompts of many rows, and that read the copies. Engines give lengths, so
    copies of which every page must be in use are never made."""
    if not (gather_rows.runs_on(device) and gather_rows.skips_unused(options)):
        return []
    policy = gather_rows.GatherPolicy(options, devices.of(device))
    if not policy.may_be:
        return []
    least_rows, _ = policy.least()
    kernels = attention_kernels(gather_rows.as_rows(options), device, least_rows * options.group_size)
    return [gather_rows.spec_of(options), *kernels]


def _helpers(plans: GroupPlans) -> list[KernelSpec]:
    """The kernels that plan and write the cache."""
    sizes = plans.sizes
    q_dtype, kv_dtype = DType.of(sizes.q_dtype), DType.of(sizes.kv_dtype)
    types = (q_dtype, kv_dtype) if kv_dtype.is_fp8 else (helpers.COPIED[kv_dtype.size],) * 2
    found = [KernelSpec("plan"), blocks.write_spec(*types, "rows")]
    if sizes.has_rotation:
        found.append(blocks.rotate_write_spec(q_dtype, kv_dtype))
    return found
