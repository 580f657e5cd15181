"""The specs of a wheel, from the rows of each kernel's home. tests/jit/test_aot.py holds that plans ask for these."""

from __future__ import annotations

import itertools

from flashpage.jit import Target
from flashpage.jit.targets import PTX
from flashpage.kernels import ATTENTION, devices, helpers
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.devices import Device
from flashpage.kernels.spec import KernelSpec


def cards_of(target: Target) -> list[Device]:
    """The cards whose tiles the target's kernels have: one of each size of shared memory. PTX is for cards that have no
    cubin, like an A100 and newer, with any of these sizes."""
    if target.backend == "cpu":
        return [devices.CPU]
    is_ptx = target.arch == PTX
    cards = [
        card for card in devices.CARDS if (card.sm not in devices.ACCELERATED if is_ptx else card.sm == target.arch)
    ]
    if not cards:
        known = ", ".join(sorted({Target("cuda", card.sm).name for card in devices.CARDS}))
        raise ValueError(f"no row of flashpage/kernels/devices.py is of {target.name}: the list knows {known}")
    return list({card.shared_bytes: card for card in reversed(cards)}.values())


def attention_specs(target: Target, default_only: bool = False) -> list[KernelSpec]:
    """What `choose` makes of each kernel's rows on the target's cards, where it takes that kernel."""
    found = {}
    for card, kernel in itertools.product(cards_of(target), ATTENTION):
        if kernel.backend != target.backend or (kernel.archs and target.arch not in kernel.archs):
            continue
        for row in kernel.ahead:
            choice = choose_for_card(row.problem, card, row.variant)
            if choice.kernel is kernel and (row.is_default or not default_only):
                found[choice.spec] = None
    return list(found)


def default_cuda_specs(target: Target) -> list[KernelSpec]:
    """What most models ask for: 16-bit queries on paged or ragged KV of the same type, and what goes with them."""
    of_hopper = helpers.AHEAD_OF_HOPPER if target.arch in devices.ACCELERATED else ()
    return [*attention_specs(target, default_only=True), *helpers.AHEAD, *of_hopper]


def cuda_specs(target: Target) -> list[KernelSpec]:
    """CI compiles those for sm_80 and sm_90a, at most 150 different ones."""
    return list(dict.fromkeys((*default_cuda_specs(target), *attention_specs(target))))


def cpu_specs() -> list[KernelSpec]:
    """For a machine with neither a GPU nor a compiler."""
    return attention_specs(Target("cpu", "avx2"))
