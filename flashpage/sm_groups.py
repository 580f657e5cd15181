"""What each SM of a card can read: SMs sit in groups (GPCs) of unlike sizes, and a group's share of the memory's
bandwidth bounds what its SMs get.

Which SMs form a group is seen, not known: CTAs of a cluster lie in one group, and clusters that share an SM do too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from . import host, jit
from .errors import FlashpageError
from .spec import KernelSpec

SPEC = KernelSpec("sm_groups")
_CLUSTERS = range(8, 1, -1)  # CTAs; clusters of several sizes start at different SMs of a group, which links all of it
_LAUNCHES = 2  # of each
_WAVES = 4  # of clusters, in a launch
_CLASS = 64  # speeds are multiples of 1 / 64: groups that differ by less than what was measured are alike


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """What a card's memory gives, in GB/s."""

    group: float  # to one group of SMs
    whole: float  # to all


# By the name that the driver gives the whole card (a slice of one, MIG, has another). Measured while a decode kernel
# streams from all SMs at 1.98 GHz: 34.5 GB/s an SM in groups of 18, 38.9 in groups of 12. A card that is not here is
# planned as if all its SMs were alike.
MEASURED = {"NVIDIA H200": Bandwidth(group=621.0, whole=4660.0)}


def speeds(device: torch.device) -> ctypes.Array[ctypes.c_float] | None:
    """Relative speed of each SM when all read, [SMs], the slowest 1; None where they are alike or nothing is known.

    Launches kernels the first time a device is asked for, on a stream of their own.
    """
    index = jit.loader.device_index(device)
    return None if index is None else _speeds(index)


@functools.cache
def _speeds(device_index: int) -> ctypes.Array[ctypes.c_float] | None:
    info = host.DeviceInfo()
    host.check(host.load().fp_cuda_device_info(device_index, ctypes.byref(info)))
    bandwidth = MEASURED.get(info.name.decode())
    if bandwidth is None:
        return None
    try:
        kernel = jit.get_kernel(SPEC, f"cuda:{device_index}")
    except FlashpageError:  # not built and no compiler: planning goes on without
        return None
    groups = unite(_clusters(kernel, info.num_sms), info.num_sms)
    return None if groups is None else _by_sm(groups, bandwidth)


def _clusters(kernel: jit.LoadedKernel, num_sms: int) -> Iterator[Sequence[int]]:
    """SM numbers of each cluster that ran; sizes that the driver refuses are left out."""
    for size in (*_CLUSTERS,) * _LAUNCHES:
        num_ctas = _WAVES * (num_sms // size) * size
        seen = (ctypes.c_uint32 * num_ctas)()
        if host.load().fp_cuda_cluster_sms(kernel.handle, size, num_ctas, seen) == host.OK:
            yield from (seen[first : first + size] for first in range(0, num_ctas, size))


def unite(clusters: Iterable[Sequence[int]], num_sms: int) -> list[set[int]] | None:
    """The groups: SMs that shared a cluster, directly or through others.

    None where these cannot be whole groups, all of them: an SM was not seen or has a number past the last, a group is
    odd or has less than four SMs.
    """
    group_of: dict[int, set[int]] = {}
    for cluster in clusters:
        united = set(cluster).union(*(group_of.get(sm, ()) for sm in cluster))
        group_of.update(dict.fromkeys(united, united))
    if group_of.keys() != set(range(num_sms)):
        return None
    groups = list({id(group): group for group in group_of.values()}.values())
    return groups if all(len(group) >= 4 and len(group) % 2 == 0 for group in groups) else None


def rates(sizes: Sequence[int], bandwidth: Bandwidth) -> dict[int, float]:
    """GB/s of an SM, by the size of its group.

    All SMs read as much as the slowest groups allow, then those in smaller groups share what is left of the memory.
    """
    left, found = bandwidth.whole, {}
    counts = Counter(sizes)
    for size in sorted(counts, reverse=True):
        sms = sum(n * count for n, count in counts.items() if n <= size)
        found[size] = min(bandwidth.group / size, left / sms)
        left -= found[size] * size * counts[size]
    return found


def _by_sm(groups: list[set[int]], bandwidth: Bandwidth) -> ctypes.Array[ctypes.c_float] | None:
    found = rates([len(group) for group in groups], bandwidth)
    slowest = min(found.values())
    classes = {size: round(rate / slowest * _CLASS) / _CLASS for size, rate in found.items()}
    if len(set(classes.values())) == 1:
        return None
    speed_of = {sm: classes[len(group)] for group in groups for sm in group}
    return (ctypes.c_float * len(speed_of))(*(speed_of[sm] for sm in range(len(speed_of))))
