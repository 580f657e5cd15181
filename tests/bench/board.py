"""What NVML says of the current card: clock, power, temperature and energy.

`SAMPLES` collects readings while a clock of gpu.py waits for the card, so that they are of the card at work. All
launches of a round are in the stream by then and their times lie between events of the card, so a reading changes none.
"""

from __future__ import annotations

import ctypes
import statistics
from typing import NamedTuple

import torch


def card_uuid() -> str:
    """By which NVIDIA's tools know the current card; torch's numbers follow CUDA_VISIBLE_DEVICES, theirs do not."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def short_uuid() -> str:
    """The first 8 digits, which tell the cards of a few machines apart."""
    return card_uuid().removeprefix("GPU-")[:8]


class Reading(NamedTuple):
    sm_mhz: float
    watts: float
    celsius: float


class Board:
    """The counters of the current device. NVML updates that of energy every 20 to 100 ms."""

    def __init__(self) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        self.call("nvmlInit_v2")
        self.call("nvmlDeviceGetHandleByUUID", card_uuid().encode(), ctypes.byref(self.device))

    def call(self, name: str, *arguments: object) -> None:
        if code := getattr(self.nvml, name)(*arguments):
            raise RuntimeError(f"{name} failed with NVML's code {code}")

    def number(self, name: str, *arguments: object) -> int:
        found = ctypes.c_uint()
        self.call(name, self.device, *arguments, ctypes.byref(found))
        return found.value

    def joules(self) -> float:
        """Since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self.call("nvmlDeviceGetTotalEnergyConsumption", self.device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def reading(self) -> Reading:
        """At this moment, but the watts are a mean over the last second on cards after the A100."""
        sm_clock, on_the_chip = 1, 0
        mhz = self.number("nvmlDeviceGetClockInfo", sm_clock)
        watts = self.number("nvmlDeviceGetPowerUsage") / 1e3
        return Reading(mhz, watts, self.number("nvmlDeviceGetTemperature", on_the_chip))


class Samples:
    """Readings since they were last taken."""

    def __init__(self) -> None:
        self.found: list[Reading] = []
        self.board: Board | None = None
        self.has_board = True

    def read(self) -> None:
        """Adds a reading; nothing without NVML, or where it does not know the device, such as a slice of a card."""
        if not self.has_board:
            return
        try:
            self.board = self.board or Board()
            self.found.append(self.board.reading())
        except (OSError, RuntimeError):
            self.has_board = False

    def take(self) -> dict[str, float]:
        """Means of all readings and their number, and none of them any more; empty without any."""
        found, self.found = self.found, []
        if not found:
            return {}
        means = (round(statistics.fmean(values), 1) for values in zip(*found, strict=True))
        return {**dict(zip(Reading._fields, means, strict=True)), "samples": len(found)}


SAMPLES = Samples()
