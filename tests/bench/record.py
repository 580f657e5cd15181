"""Figures as data: one line of JSON for each, with card, date, commit, command, clocks and versions.

docs/figures.py draws charts and writes tables from such lines.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch
from board import SAMPLES, card_uuid, short_uuid
from run import commit, machine

VERSIONS = (
    "torch",
    "flashinfer-python",
    "flash-attn-3",
    "sgl-flash-mla",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "sglang",
    "transformers",
    "vllm",
)


def versions() -> dict[str, str]:
    """Versions of Python, the driver and the installed peers."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "flash_attn_interface" in sys.modules:
        found["flash_attn_interface"] = getattr(sys.modules["flash_attn_interface"], "__version__", "unknown")
    if torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["driver"] = _smi("driver_version")
    return found


def clocks() -> dict[str, float]:
    """Means of the card's clock, power and temperature inside of the timed rounds, and the number of readings; without
    such the three at this moment. Empty without a card."""
    if not torch.cuda.is_available():
        return {}
    if sampled := SAMPLES.take():
        return sampled
    sm_mhz, watts, celsius = (_number(_smi(name)) for name in ("clocks.sm", "power.draw", "temperature.gpu"))
    return {"sm_mhz": sm_mhz, "watts": watts, "celsius": celsius}


def _smi(name: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader", "-i", card_uuid()]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _number(text: str) -> float:
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else float("nan")


def _without_file(words: list[str]) -> list[str]:
    """Arguments without --json and its file, which lies elsewhere on each machine."""
    if "--json" not in words:
        return words
    at = words.index("--json")
    return words[:at] + words[at + 2 :]


class Recorder:
    """Appends lines to a file; without a file it writes nothing."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None
        program, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[2]
        name = program.relative_to(root) if program.is_relative_to(root) else program.name
        words, card, uuid = ["python", str(name), *_without_file(sys.argv[1:])], "", ""
        if torch.cuda.is_available():
            card, uuid = torch.cuda.get_device_name(), short_uuid()
            if planned_as := os.environ.get("FLASHPAGE_CARD"):
                words.insert(0, f"FLASHPAGE_CARD={planned_as}")
                card += f", planned as {planned_as}"
        self.run = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "command": shlex.join(words),
            "machine": machine(),
            "card": card,
            "uuid": uuid,
        }

    def add(self, section: str, case: str, **figures: object) -> None:
        if self.path is None:
            return
        line = {"section": section, "case": case, **figures, **self.run, "clocks": clocks(), "versions": versions()}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
