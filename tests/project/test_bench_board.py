"""The readings of a card in records: taken while it computes, with the card's UUID. NVML and the card are stand-ins."""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"
UUID = "1a2b3c4d-1111-2222-3333-444455556666"


class Nvml:
    """A card whose n-th reading is 1,000 + n MHz, 300 + n W and 50 degrees Celsius."""

    def __init__(self) -> None:
        self.code, self.reads = 0, 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        assert uuid == f"GPU-{UUID}".encode()
        return self.code

    def nvmlDeviceGetClockInfo(self, device: Any, kind: int, found: Any) -> int:
        found._obj.value, self.reads = 1000 + self.reads, self.reads + 1
        return int(kind != 1)

    def nvmlDeviceGetPowerUsage(self, device: Any, found: Any) -> int:
        found._obj.value = 299_000 + 1000 * self.reads
        return 0

    def nvmlDeviceGetTemperature(self, device: Any, kind: int, found: Any) -> int:
        found._obj.value = 50
        return kind


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    monkeypatch.syspath_prepend(str(BENCH))
    import board
    import energy  # noqa: F401  before the stand-ins, as it imports flashpage
    import record

    library = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: argparse.Namespace(uuid=UUID))
    monkeypatch.setattr(board, "SAMPLES", samples := board.Samples())
    monkeypatch.setattr(record, "SAMPLES", samples)
    monkeypatch.setattr(record, "_smi", lambda name: "7")
    return library


def test_a_record_has_means_of_the_readings_and_the_card(
    nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line takes its readings; one without any has the card's state when it is written."""
    import record

    monkeypatch.setattr(sys, "argv", [str(BENCH / "gpu.py"), "--json", "a"])
    recorder = record.Recorder(str(tmp_path / "a.jsonl"))
    for _ in range(3):
        record.SAMPLES.read()
    recorder.add("decode", "first")
    record.SAMPLES.read()
    recorder.add("decode", "second")
    recorder.add("decode", "third")
    lines = [json.loads(text) for text in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["clocks"] for line in lines] == [
        {"sm_mhz": 1001.0, "watts": 301.0, "celsius": 50.0, "samples": 3},
        {"sm_mhz": 1003.0, "watts": 303.0, "celsius": 50.0, "samples": 1},
        {"sm_mhz": 7.0, "watts": 7.0, "celsius": 7.0},
    ]
    assert {(line["card"], line["uuid"]) for line in lines} == {("Card", "1a2b3c4d")}


def test_a_device_that_nvml_does_not_know(nvml: Nvml) -> None:
    """It is asked once and has no readings."""
    import record

    nvml.code = 6
    record.SAMPLES.read()
    nvml.code = 0
    record.SAMPLES.read()
    assert record.SAMPLES.take() == {} and nvml.reads == 0


def test_the_card_is_read_while_it_computes(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last launch of a round and before the wait for it."""
    import gpu

    steps: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            steps.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 2.0

    class Samples:
        def read(self) -> None:
            steps.append("read")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: steps.append("wait"))
    monkeypatch.setattr(gpu, "SAMPLES", Samples())
    clock = gpu.GpuClock.__new__(gpu.GpuClock)
    clock.repeats, clock.flush = 2, torch.zeros(1)
    assert clock.seconds(lambda: steps.append("call")) == 2e-3
    assert steps[steps.index("wait") :] == ["wait", *["event", "call", "event"] * 2, "read", "wait"]


def test_energy_is_counted_from_step_to_step(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter of 400 W that moves every 70 ms, so that two readings at any time may be wrong by such a step. Calls
    take 10 ms on the card."""
    import energy

    now, busy_until = [0.03], [0.0]

    class Board:
        def joules(self) -> float:
            return 28.0 * (now[0] // 0.07)

        def reading(self) -> Any:
            return energy.Reading(1500.0 if now[0] < 0.6 else 1700.0, 0.0, 0.0)

    def call() -> None:
        busy_until[0] = max(busy_until[0], now[0]) + 0.01

    def mark() -> Any:
        at = busy_until[0]
        return lambda: now[0] >= at

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(energy.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(energy.time, "sleep", pass_time)
    found = energy.spend(call, 1.0, Board(), mark)
    assert found["watts"] == pytest.approx(400, rel=2e-3)
    assert found["us"] == pytest.approx(10_000, rel=1e-2)
    assert found["joules"] == pytest.approx(4, rel=1e-2)
    assert 1550 < found["sm_mhz"] < 1650
    monkeypatch.setattr(Board, "joules", lambda _: 1.0)
    with pytest.raises(RuntimeError, match="has not moved for 5 s"):
        energy.spend(call, 1.0, Board(), mark)
