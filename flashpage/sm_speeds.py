"""What each SM of a card can read while all do. SMs reach the memory in groups (CPCs) of six or, where some are fused
off, of four, and a group's way is the limit.

No interface tells the groups. They are measured: where all read from the L2, in which there is more than all ways
carry, SMs of smaller groups read that much more.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import numpy as np
import torch

from . import host, jit
from .errors import FlashpageError
from .spec import KernelSpec

SPEC = KernelSpec("sm_speeds")
_BUFFER_BYTES = 16 << 20  # lies in the L2 whole
_GAP = 1.08  # between the speeds of neighbouring classes
_SPREAD = 1.25  # of the speeds in a class
_MAX_CLASSES = 4
_MIN_SMS = 2  # of a class
_STEPS = 64  # relative speeds are multiples of 1 / 64: finer was not measured


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """What a card's memory gives, in GB/s."""

    sm: float  # to one SM of the largest groups
    whole: float  # to all


# By the name that the driver gives the whole card (a slice of one, MIG, has another). Measured while a decode kernel
# streams from all SMs at 1.98 GHz: 34.5 GB/s an SM in 108 of them, 38.9 in the 24 that are in groups of four. A card
# that is not here is planned as if all its SMs were alike.
MEASURED = {"NVIDIA H200": Bandwidth(sm=34.5, whole=4660.0)}


def speeds(device: torch.device) -> ctypes.Array[ctypes.c_float] | None:
    """Relative speed of each SM when all read, [SMs], the slowest 1; None where they are alike or nothing is known.

    Launches a kernel the first time a device is asked for, on a stream of its own.
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
        from_l2 = classes(measure(device_index))
    except (FlashpageError, torch.OutOfMemoryError):  # no kernel and no compiler, or no room: planning goes on without
        return None
    relative = None if from_l2 is None else share(from_l2, bandwidth)
    return None if relative is None else (ctypes.c_float * len(relative))(*relative)


def measure(device_index: int) -> np.ndarray:
    """GB/s at which each SM reads from the L2 while all do, [SMs]; zeros where other work kept them from it."""
    kernel = jit.get_kernel(SPEC, f"cuda:{device_index}")
    # Its values do not matter, so neither does what another stream still writes there.
    buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device=f"cuda:{device_index}")
    found = np.zeros(kernel.info.num_sms, np.float32)
    host.check(
        host.load().fp_cuda_sm_speeds(kernel.handle, buffer.data_ptr(), _BUFFER_BYTES, found.ctypes.data),
    )
    return found


def classes(measured: np.ndarray) -> np.ndarray | None:
    """Each SM's speed without the noise: the median of its class, [SMs]. None where they do not fall into classes."""
    if not np.all(measured > 0):
        return None
    order = np.argsort(measured)
    ascending = measured[order]
    found = np.split(order, np.flatnonzero(ascending[1:] > ascending[:-1] * _GAP) + 1)
    if len(found) > _MAX_CLASSES:
        return None
    smooth = np.empty(len(measured))
    for sms in found:
        if len(sms) < _MIN_SMS or measured[sms[-1]] > measured[sms[0]] * _SPREAD:
            return None
        smooth[sms] = np.median(measured[sms])
    return smooth


def share(from_l2: np.ndarray, bandwidth: Bandwidth) -> np.ndarray | None:
    """Relative speed of each SM when all read from the memory, the slowest 1; None where they are alike.

    The SMs' ways carry as much as they do from the L2, in proportion; where that is more than the memory gives, the
    slow ones get all they can carry and the fast ones share what is left.
    """
    lower_half = np.sort(from_l2)[: (len(from_l2) + 1) // 2]
    ways = bandwidth.sm * from_l2 / np.median(lower_half)
    rates = np.minimum(ways, _level(ways, bandwidth.whole))
    relative = np.round(rates / rates.min() * _STEPS) / _STEPS
    return relative if relative.max() > 1 else None


def _level(ways: np.ndarray, whole: float) -> float:
    """What none gets more than, so that all together get `whole`, or as much as they can carry."""
    left = whole
    for i, way in enumerate(np.sort(ways)):
        level = left / (len(ways) - i)
        if way >= level:
            return level
        left -= way
    return float(ways.max())
