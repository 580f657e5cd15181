"""The kernels that a process has used, and files of such lists: what `flashpage build` and the AOT build read back."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..kernels.spec import KernelSpec
from .targets import Target

_VERSION = 1
_used: dict[tuple[KernelSpec, Target], None] = {}  # in order of first use
_lock = threading.Lock()


def note_use(spec: KernelSpec, target: Target) -> None:
    """Called once for each kernel that is loaded."""
    with _lock:
        _used[spec, target] = None


def used_specs() -> list[tuple[KernelSpec, Target]]:
    """The kernels that this process has loaded, in order."""
    with _lock:
        return list(_used)


def write_manifest(path: str | os.PathLike[str], kernels: Iterable[tuple[KernelSpec, Target]] | None = None) -> int:
    """Writes `kernels` (default: what this process has used) as JSON; returns how many."""
    kernels = used_specs() if kernels is None else list(kernels)
    rows = [{"target": target.name, "spec": compact_json(spec)} for spec, target in kernels]
    Path(path).write_text(json.dumps({"flashpage_manifest": _VERSION, "kernels": rows}, indent=1) + "\n")
    return len(rows)


def read_manifest(path: str | os.PathLike[str]) -> list[tuple[KernelSpec, Target]]:
    """What write_manifest wrote; ValueError where the file is something else."""
    data = json.loads(Path(path).read_text())
    if not isinstance(data, dict) or data.get("flashpage_manifest") != _VERSION:
        raise ValueError(f"{path} is not a flashpage manifest of version {_VERSION}")
    return [(parse_spec(row["spec"]), Target.parse(row["target"])) for row in data["kernels"]]


def compact_json(spec: KernelSpec) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    default = KernelSpec(spec.kernel).to_json()
    return {k: v for k, v in spec.to_json().items() if k == "kernel" or v != default[k]}


def parse_spec(data: dict[str, Any]) -> KernelSpec:
    """From compact_json, or the whole of KernelSpec.to_json."""
    return KernelSpec.from_json(KernelSpec(data["kernel"]).to_json() | data)


def spec_text(spec: KernelSpec) -> str:
    """One line of JSON that `flashpage build --spec` takes."""
    return json.dumps(compact_json(spec), separators=(",", ":"))
