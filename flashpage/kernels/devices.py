"""The one table of cards: their sizes, features, and the rates from which tiles and costs follow.

A new card is one row. If the driver reports a number (SMs, shared memory, L2), it replaces the row's.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
from collections.abc import Callable

import torch

from .. import native
from ..base import env
from ..base.errors import PlanError

_KIB, _MIB = 1 << 10, 1 << 20


@dataclasses.dataclass(frozen=True)
class Device:
    """A card, or the CPU (`sm` 0; its kernel has costs of its own)."""

    name: str  # its words are searched in the driver's name of a card
    sm: int  # compute capability times ten
    sms: int
    shared_bytes: int  # most shared memory of a CTA
    sm_shared_bytes: int  # shared memory of an SM
    l2_bytes: int
    gbps: float  # memory bandwidth that a kernel reaches, GB/s
    tflops: float  # dense 16-bit products with fp32 sums, datasheet
    is_estimated: bool = False  # no row names this card: rates are computed from the driver's clocks

    @property
    def has_pdl(self) -> bool:
        """Whether a launch may begin before the launch that it depends on has ended."""
        return "PDL" in self.abilities

    @property
    def has_wgmma(self) -> bool:
        return "wgmma" in self.abilities

    @functools.cached_property
    def abilities(self) -> tuple[str, ...]:
        """Words of ABILITIES: empty for an A100."""
        return capability_of(self.sm).abilities

    @property
    def widens_fp8(self) -> bool:
        """Whether mma.sync computes products of fp8 factors as products of fp16."""
        return capability_of(self.sm).widens_fp8

    @property
    def sm_bytes_per_ns(self) -> float:
        """An SM's share of the memory bandwidth."""
        return self.gbps / self.sms

    @property
    def sm_flops_per_ns(self) -> float:
        return self.tflops * 1e3 / self.sms

    @property
    def flops_per_byte(self) -> float:
        """Operations for each byte of memory traffic, relative to an H200."""
        return self.tflops / self.gbps * H200.gbps / H200.tflops

    @property
    def full_speed_share(self) -> float:
        """The fraction of SMs that keeps memory as busy as all of them do: 64 of an H200's 132 SMs read at 4.05 TB/s,
        so a single SM reads 63.9 bytes a nanosecond (tests/bench/cluster.py)."""
        return min(1.0, self.sm_bytes_per_ns / 63.9)

    def full_speed_share_of(self, loading_ns: float, converting_ns: float) -> float:
        """That fraction of SMs where an SM also converts what it loads: it loads a token faster while others do not
        load, but converts it no faster."""
        return max(self.full_speed_share * loading_ns, converting_ns) / max(loading_ns, converting_ns)

    def part(self, sms: int) -> Device:
        """A partition with so many SMs and their share of the L2 and of both rates, such as a MIG slice."""
        share = sms / self.sms
        gbps, tflops = self.gbps * share, self.tflops * share
        return dataclasses.replace(self, sms=sms, l2_bytes=int(self.l2_bytes * share), gbps=gbps, tflops=tflops)

    def compute_ns(self, h200_ns: float) -> float:
        """The time on this card of tensor-core work that takes an SM of an H200 `h200_ns`."""
        return h200_ns * H200.sm_flops_per_ns / self.sm_flops_per_ns


# Abilities that not every card has.
_BULK = ("fp8 mma", "clusters", "bulk copies", "PDL")  # PDL: programmatic dependent launch
ABILITIES = (*_BULK, "wgmma")


@dataclasses.dataclass(frozen=True)
class Capability:
    """What all cards of a compute capability have in common."""

    shared_kib: int  # most shared memory of a CTA; an SM has 1 KiB more
    flops_per_clock: int  # of an SM: dense 16-bit products with fp32 sums, of GeForce cards perhaps half of it
    abilities: tuple[str, ...] = ()
    is_half_on_geforce: bool = False  # whether GeForce cards have half of that rate
    widens_fp8: bool = False
    is_accelerated: bool = False  # kernels have its own target (sm_90a), whose instructions some use, such as wgmma


CAPABILITIES = {
    80: Capability(163, 2048),
    86: Capability(99, 1024, is_half_on_geforce=True),
    87: Capability(163, 1024),
    89: Capability(99, 1024, _BULK[:1], is_half_on_geforce=True),
    90: Capability(227, 4096, ABILITIES, widens_fp8=True, is_accelerated=True),
    100: Capability(227, 8192, _BULK, widens_fp8=True, is_accelerated=True),
    103: Capability(227, 8192, _BULK, widens_fp8=True, is_accelerated=True),
    120: Capability(99, 1024, _BULK, is_half_on_geforce=True, is_accelerated=True),
    121: Capability(99, 512, _BULK, is_accelerated=True),
}
PTX_SM = 80  # of PTX, which runs on every later card

# Whether kernels can be had for a compute capability's own target. flashpage.jit, which knows the compilers, sets it.
has_own_target: Callable[[int], bool] = lambda sm: True


def capability_of(sm: int) -> Capability:
    """The row of a compute capability. One that is not known counts as the newest known one before it, without what was
    not tried there: fp8 products, and kernels of its own target."""
    if sm in CAPABILITIES:
        return CAPABILITIES[sm]
    row = CAPABILITIES[max((known for known in CAPABILITIES if known < sm), default=PTX_SM)]
    return dataclasses.replace(row, widens_fp8=True, is_accelerated=False)


def _card(name: str, sm: int, sms: int, l2_mib: float, gbps: float, tflops: float) -> Device:
    shared = CAPABILITIES[sm].shared_kib * _KIB
    return Device(name, sm, sms, shared, shared + _KIB, int(l2_mib * _MIB), gbps, tflops)


H200 = _card("H200", 90, 132, 50, 4554, 989)  # 4,800 GB/s by its datasheet; bulk copies read 4,550

# Name, compute capability, SMs, L2 (MiB), memory bandwidth (GB/s: 95% of the datasheet's), dense bf16 TFLOP/s.
CARDS = (
    H200,
    _card("H100", 90, 132, 50, 3180, 989),
    _card("H100 NVL", 90, 132, 50, 3700, 835),
    _card("H100 PCIe", 90, 114, 50, 1940, 756),
    _card("H20", 90, 78, 60, 3800, 148),
    _card("GH200", 90, 132, 50, 3800, 989),
    _card("B200", 100, 148, 126, 7600, 2250),
    _card("GB200", 100, 152, 126, 7600, 2500),
    _card("B300", 103, 148, 126, 7600, 2500),
    _card("A100", 80, 108, 40, 1940, 312),
    _card("A30", 80, 56, 24, 886, 165),
    _card("A10", 86, 72, 6, 570, 125),
    _card("RTX 3090", 86, 82, 6, 889, 71),
    _card("Orin", 87, 16, 4, 194, 42),
    _card("L4", 89, 58, 48, 285, 121),
    _card("L40S", 89, 142, 96, 820, 362),
    _card("RTX 4090", 89, 128, 72, 957, 165),
    _card("RTX 5090", 120, 170, 96, 1702, 209),
    _card("RTX PRO 6000", 120, 188, 128, 1702, 504),
    _card("GB10", 121, 48, 24, 259, 62),  # DGX Spark
)

# Some drivers tell no clocks, or tiny ones.
_LEAST_KHZ, _USUAL_KHZ = 100_000, 1_500_000

CPU = Device("CPU", 0, 1, 0, 0, 0, gbps=45.54, tflops=9.89)  # its kernel has costs of its own


def named(name: str) -> Device:
    """The row with that name, in any case; `H100:16` is a partition with 16 SMs. Raises PlanError with the list of
    names."""
    row_name, _, sms = name.partition(":")
    for card in CARDS:
        if card.name.lower() == row_name.lower():
            if not sms:
                return card
            if sms.isascii() and sms.isdigit() and 1 <= int(sms[:9]) <= card.sms:
                return card.part(int(sms))
            raise PlanError(f"card {name!r} is no part of a card: pass 1 to {card.sms} SMs, like {card.name}:1.")
    raise PlanError(f"card {name!r} is not known: pass one of {', '.join(card.name for card in CARDS)}.")


@functools.cache
def of(device: torch.device) -> Device:
    """The card of a torch device, whose index must be given: its row with the driver's numbers or, without a row, rates
    computed from the card's clocks. FLASHPAGE_CARD puts another row in its place. Creates no CUDA context."""
    if device.type != "cuda":
        return CPU
    own, name = of_index(device.index or 0), env.get("FLASHPAGE_CARD")
    if not has_own_target(own.sm):
        own = dataclasses.replace(own, sm=PTX_SM)
        if name:
            own = dataclasses.replace(own, name=f"{own.name} without kernels of its own")
    return as_card(name, own) if name else own


def as_card(name: str, own: Device) -> Device:
    """The row that FLASHPAGE_CARD names, in place of the card `own`; SettingError if `own` cannot run its kernels. The
    row may have more SMs: no kernel waits for a CTA outside its cluster, so that CTAs without room start later."""
    try:
        card = named(name)
    except PlanError:
        names = ", ".join(card.name for card in CARDS)
        raise env.refused("FLASHPAGE_CARD", f"one of {names}, or a part like H100:16") from None
    missing = [ability for ability in card.abilities if ability not in own.abilities]
    if card.shared_bytes > own.shared_bytes:
        missing.append(f"{card.shared_bytes} bytes of shared memory a CTA")
    if missing:
        raise env.refused("FLASHPAGE_CARD", f"a card without {', '.join(missing)}, which {own.name} lacks")
    return card


def of_index(index: int) -> Device:
    info = native.DeviceInfo()
    native.check(native.load().fp_cuda_device_info(index, ctypes.byref(info)))
    return from_driver(info)


def from_driver(info: native.DeviceInfo) -> Device:
    name = info.name.decode()
    row = row_of(name)
    known = {
        "sms": info.num_sms,
        "shared_bytes": info.shared_bytes_per_cta,
        "sm_shared_bytes": info.shared_bytes_per_sm,
        "l2_bytes": info.l2_bytes,
    }
    if row is not None and row.sm == info.sm:
        return dataclasses.replace(row.part(info.num_sms), **known)
    capability = capability_of(info.sm)
    flops = capability.flops_per_clock / (2 if capability.is_half_on_geforce and "GEFORCE" in name.upper() else 1)
    clock_khz = info.clock_khz if info.clock_khz >= _LEAST_KHZ else _USUAL_KHZ
    gbps = 0.95 * 2 * info.memory_khz * info.memory_bus_bits / 8e6
    if info.memory_khz < _LEAST_KHZ or gbps <= 0.0:
        gbps = min(CARDS, key=lambda card: abs(card.sm - info.sm)).sm_bytes_per_ns * max(1, info.num_sms)
    tflops = flops * max(1, info.num_sms) * clock_khz / 1e9
    return Device(name, info.sm, gbps=gbps, tflops=tflops, is_estimated=True, **known)


def row_of(driver_name: str) -> Device | None:
    """The row with the most words in the driver's name: H100 PCIe before H100."""
    words = set(re.findall(r"\w+", driver_name.upper()))
    rows = [card for card in CARDS if words.issuperset(card.name.upper().split())]
    return max(rows, key=lambda card: len(card.name.split()), default=None)
