"""Chooses a kernel for a plan's work; a refusal gives the reasons of the device's kernels."""

from __future__ import annotations

import dataclasses

import torch

from ..base.errors import CapabilityError
from ..variants.spec import VariantSpec
from . import ATTENTION, devices
from .context_classes import ContextClass
from .devices import Device
from .kernel import AttentionKernel
from .options import Options
from .spec import KernelSpec
from .tile import Cost
from .work import Problem, Work

_NO_VARIANT = VariantSpec()
MANY_ROWS = 1 << 20  # packed rows of a request and KV head in a prefill


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The kernel for a problem, and why."""

    spec: KernelSpec
    cost: Cost
    kernel: AttentionKernel
    card: Device
    reasons: tuple[str, ...]  # for Plan.explain()
    contexts: ContextClass = ContextClass.USUAL


def packed_rows(options: Options, batch: int, total_rows: int) -> int:
    """The rows that decide the tile, rounded up to a power of two, so that similar batches share one choice.

    In the batch-invariant mode they depend only on the options: rows of a request for decode, a fixed number for
    prefill.
    """
    if options.uniform_q_len:
        rows = options.uniform_q_len
    elif options.is_batch_invariant:
        rows = 64
    else:
        rows = -(-total_rows // batch) if batch else 1
    return 1 << (max(1, rows * options.group_size) - 1).bit_length()


def requests_of(options: Options, packed: int) -> tuple[int, int]:
    """The least and the most rows of a request, on average and rounded up, for which `packed_rows` is `packed`."""
    if options.uniform_q_len or options.is_batch_invariant:
        return 0, 2**62
    return (packed // 2 // options.group_size + 1 if packed > 1 else 0), packed // options.group_size


def choose(problem: Problem, device: torch.device, variant: VariantSpec = _NO_VARIANT) -> KernelChoice:
    """The first kernel of the list that accepts the work; raises CapabilityError with the reasons of the
    device's kernels if none does."""
    return choose_for_card(problem, devices.of(device), variant)


def choose_for_card(problem: Problem, card: Device, variant: VariantSpec = _NO_VARIANT) -> KernelChoice:
    """As `choose`, for a card of the table, which need not be in this machine."""
    backend = "cuda" if card.sm else "cpu"
    refused: list[tuple[int, str]] = []  # how far the kernel is from accepting the work, and why it does not
    for kernel in ATTENTION:
        if kernel.backend != backend:
            continue
        work = Work(problem, card, variant, _mask_source(problem, kernel, variant))
        reasons = kernel.refusals(work)
        if not reasons:
            return _chosen(kernel, work, tuple(f"refused {line}" for _, line in refused))
        refused.append((len(reasons), f"{kernel.name}: {'; '.join(reasons)}"))
    # The most useful line first: the fewest reasons, and of equal ones the kernel that takes the most.
    ranked = sorted(enumerate(refused), key=lambda place: (place[1][0], -place[0]))
    lines = [line for _, (_, line) in ranked]
    raise CapabilityError("no kernel can honour this request:\n  " + "\n  ".join(lines))


def _chosen(kernel: AttentionKernel, work: Work, refused: tuple[str, ...]) -> KernelChoice:
    usual = kernel.spec(work)
    assert usual.tile is not None
    cost, spec = kernel.cost(work, usual.tile), usual
    context_tile = kernel.context_tile(usual, work.problem.contexts)
    if context_tile is not None and context_tile[0].ctas > work.card.sms:
        context_tile = None  # its unit needs more SMs than there are
    if context_tile is not None:
        spec = dataclasses.replace(usual, tile=context_tile[0])
    assert spec.tile is not None
    has_mask = work.options.has_mask or work.variant.mask
    notes = (
        f"kernel {kernel.name}: the first in order of preference that supports this work",
        *refused,
        f"tile {spec.tile.tile_q // spec.ctas} packed rows x {spec.tile.tile_kv} tokens, for about "
        f"{work.packed_rows} packed rows a request and KV head",
        *([_mask_note(kernel, work)] if has_mask else []),
        *([context_tile[1]] if context_tile else []),
    )
    return KernelChoice(spec, cost, kernel, work.card, notes, work.problem.contexts)


def _mask_source(problem: Problem, kernel: AttentionKernel, variant: VariantSpec) -> str:
    if problem.options.has_mask:
        return "packed_bits"
    needs_tiles = bool(variant.mask) and problem.has_known_lengths and kernel.visits_mask_tiles(problem.options)
    return "function" if needs_tiles else "implicit"


def _mask_note(kernel: AttentionKernel, work: Work) -> str:
    visits_tiles = kernel.visits_mask_tiles(work.options)
    if work.mask_source != "implicit" and visits_tiles:
        return "mask: another launch finds the tiles that no row sees, which this kernel skips, and the mixed ones"
    if visits_tiles:
        return "mask: evaluated for every token of every tile, because lengths may change under a captured launch"
    return "mask: evaluated for every token of every tile"
