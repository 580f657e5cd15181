"""The specs of a wheel, from the rows of each kernel's home. tests/jit/test_aot.py holds that plans ask for these."""

from __future__ import annotations

from flashpage.jit import Target
from flashpage.kernels import ATTENTION, devices, helpers
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.devices import Device
from flashpage.kernels.spec import KernelSpec


def card_of(target: Target) -> Device:
    """The card whose tiles the target's kernels have; PTX is for cards like an A100 and newer."""
    if target.backend == "cpu":
        return devices.CPU
    return devices.H200 if target.arch == devices.H200.sm else devices.named("A100")


def attention_specs(target: Target, default_only: bool = False) -> list[KernelSpec]:
    """What `choose` makes of each kernel's rows on the target's card, where it takes that kernel."""
    card, found = card_of(target), {}
    for kernel in ATTENTION:
        if kernel.backend != target.backend or (kernel.archs and card.sm not in kernel.archs):
            continue
        for row in kernel.ahead:
            choice = choose_for_card(row.problem, card, row.variant)
            if choice.kernel is kernel and (row.is_default or not default_only):
                found[choice.spec] = None
    return list(found)


def default_cuda_specs(target: Target) -> list[KernelSpec]:
    """What most models ask for: 16-bit queries on paged or ragged KV of the same type, and what goes with them."""
    of_hopper = helpers.AHEAD_OF_HOPPER if target.arch == devices.H200.sm else ()
    return [*attention_specs(target, default_only=True), *helpers.AHEAD, *of_hopper]


def cuda_specs(target: Target) -> list[KernelSpec]:
    """At most 150 over all targets: CI compiles each for sm_80 or sm_90a, most for both."""
    return list(dict.fromkeys((*default_cuda_specs(target), *attention_specs(target))))


def cpu_specs() -> list[KernelSpec]:
    """For a machine with neither a GPU nor a compiler."""
    return attention_specs(Target("cpu", "avx2"))
