"""The kernel specs of a wheel, from the rows of each kernel's home; tests/jit/test_aot.py compares them with plans'."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random

from flashpage.base.errors import CapabilityError
from flashpage.jit import Target
from flashpage.jit.targets import PTX
from flashpage.kernels import ATTENTION, blocks, devices, helpers, latent_formats
from flashpage.kernels.ahead import BF16, E4M3, FP16, ONE_TOKEN, RAGGED, Ahead, fp8_rows, latent_rows
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.context_classes import CLASSES, ContextClass
from flashpage.kernels.devices import Device
from flashpage.kernels.spec import KernelSpec

from . import plans

_DRAWN = 150  # plans of a card


def cards_of(target: Target) -> list[Device]:
    """The cards whose tiles the target's kernels have: one for each size of shared memory. PTX serves all cards without
    a cubin from A100 on, whichever size they have, and they are planned as cards of its capability."""
    if target.backend == "cpu":
        return [devices.CPU]
    is_ptx = target.arch == PTX
    cards = [card for card in devices.CARDS if is_ptx or card.sm == target.arch]
    if is_ptx:
        cards = [dataclasses.replace(card, sm=devices.PTX_SM) for card in cards if not card.has_wgmma]
    if not cards:
        known = ", ".join(sorted({Target("cuda", card.sm).name for card in devices.CARDS}))
        raise ValueError(f"no row of flashpage/kernels/devices.py is of {target.name}: the list knows {known}")
    return list({card.shared_bytes: card for card in reversed(cards)}.values())


def attention_specs(target: Target, default_only: bool = False, all_contexts: bool = False) -> list[KernelSpec]:
    """The specs that `choose` picks for each kernel's rows on the target's cards, where it picks that kernel.
    `all_contexts`: each row for every class of contexts, which a machine that cannot compile may meet."""
    found = {}
    for card, kernel in itertools.product(cards_of(target), ATTENTION):
        if kernel.backend != target.backend or (kernel.archs and target.arch not in kernel.archs):
            continue
        for row, contexts in itertools.product(kernel.ahead, CLASSES if all_contexts else (None,)):
            problem = dataclasses.replace(row.problem, contexts=contexts) if contexts else row.problem
            choice = choose_for_card(problem, card, row.variant)
            if choice.kernel is kernel and (row.is_default or not default_only):
                found[choice.spec] = None
    return list(found)


def default_cuda_specs(target: Target) -> list[KernelSpec]:
    """The specs that most models need: 16-bit queries over paged or ragged KV of the same type, and their helpers."""
    of_hopper = helpers.AHEAD_OF_HOPPER if target.arch == devices.H200.sm else ()
    return [*attention_specs(target, default_only=True), *helpers.AHEAD, *of_hopper]


def cuda_specs(target: Target) -> list[KernelSpec]:
    """All specs of a CUDA target. CI compiles them, so tests/jit/test_aot.py limits how many."""
    return list(dict.fromkeys((*default_cuda_specs(target), *attention_specs(target))))


# Kernels of prefill_sm90 that few models use and that have hardly a register to spare.
_CHECKED_OF_HOPPER = (
    *(Ahead(E4M3, E4M3, (dim, dim), 128) for dim in (64, 256)),
    *(Ahead(E4M3, E4M3, (dim, dim), 128, contexts=ContextClass.LONG, has_value_columns=True) for dim in (64, 96)),
    Ahead(E4M3, E4M3, (128, 128), 128, out_dtype=E4M3),
    Ahead(E4M3, E4M3, (128, 128), 128, contexts=ContextClass.LONG, has_value_columns=True, out_dtype=E4M3),
    Ahead(E4M3, E4M3, (128, 128), 128, RAGGED, has_soft_cap=True, has_value_columns=True),
    *(Ahead(BF16, BF16, (dim, dim), 128, rotates=True) for dim in (64, 256)),
    Ahead(BF16, BF16, (128, 128), 128, ONE_TOKEN, rotates=True),
    *(Ahead(BF16, E4M3, (512, 512), rows, 64, kv_source="latent", latent_format="deepseek_v4") for rows in (16, 32)),
    Ahead(E4M3, E4M3, (256, 256), 128, RAGGED),
    *(Ahead(BF16, BF16, (dim, dim), 128, ONE_TOKEN, has_mask=True, has_soft_cap=True) for dim in (96, 128)),
    Ahead(BF16, BF16, (256, 256), 128, has_soft_cap=True, user=plans.ALIBI),
    Ahead(BF16, BF16, (512, 512), 128, 64, kv_source="latent"),
    *(
        Ahead(FP16, E4M3, (576, 512), rows, 64, kv_source=source, latent_format="deepseek_v32")
        for rows, source in ((64, "selected"), (128, "latent"))
    ),
)


# Latent rows that the general kernel reads on cards other than Hopper: each format, and each class of rows.
_LATENT = (
    *latent_rows(64, 32, 16),
    *(
        fp8_rows(name, rows, "latent")
        for name, rows in zip((*latent_formats.PACKED, latent_formats.SCALED), itertools.cycle((32, 64, 16)))
    ),
)


def latent_specs(target: Target) -> list[KernelSpec]:
    """Specs of the general kernel over latent rows; none for Hopper, whose own kernels are in the list."""
    if target.arch == devices.H200.sm:
        return []
    return list(dict.fromkeys(choose_for_card(row.problem, card).spec for card in cards_of(target) for row in _LATENT))


def only_checked_specs(target: Target) -> list[KernelSpec]:
    """Specs that CI compiles next to the list, and no wheel has."""
    rows = _CHECKED_OF_HOPPER if target.arch == devices.H200.sm else ()
    return [*(choose_for_card(row.problem, devices.H200, row.variant).spec for row in rows), *latent_specs(target)]


# Plans of which no list has the kernels: head dims that few models have, and e4m3 queries.
_SAMPLED = (
    *(Ahead(BF16, BF16, (dim, dim), 16, size) for dim in (72, 80, 96, 112, 120) for size in (RAGGED, ONE_TOKEN, 16)),
    *(Ahead(E4M3, E4M3, (dim, dim), 128, size) for dim in (64, 96, 256) for size in (RAGGED, 16)),
)


def block_specs(target: Target) -> list[KernelSpec]:
    """Decode over vLLM's blocks: each head dim, for few and for many query heads of a KV head."""
    dims, types = (64, 80, 96, 112, 120, 128, 192, 256), ((BF16, BF16), (BF16, E4M3), (FP16, E4M3))
    combinations = itertools.product(cards_of(target), types, dims, (4, 40))
    return list(dict.fromkeys(blocks.decode_spec(*pair, dim, group, card) for card, pair, dim, group in combinations))


def sampled_specs(target: Target) -> list[KernelSpec]:
    """Known specs of a CUDA target, of which CI compiles a few each day."""
    found = [choose_for_card(row.problem, card).spec for card in cards_of(target) for row in _SAMPLED]
    return list(dict.fromkeys((*cuda_specs(target), *only_checked_specs(target), *block_specs(target), *found)))


def drawn_specs(target: Target, day: int) -> list[KernelSpec]:
    """Specs of plans that are drawn by the day, of all that users may make: about as many as the list has."""
    lot, found = random.Random(f"{day} {target.name}"), {}
    for card in cards_of(target):
        for row in (plans.drawn(lot) for _ in range(_DRAWN)):
            with contextlib.suppress(CapabilityError):  # the plan is refused, with reasons
                found[choose_for_card(row.problem, card, row.variant).spec] = None
    return list(found)


def cpu_specs() -> list[KernelSpec]:
    """The specs for a machine with neither a GPU nor a compiler."""
    return attention_specs(Target("cpu", "avx2"))
