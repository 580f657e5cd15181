"""The kernels that a process has used, and files with such lists, which `flashpage build` and the AOT build read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import kernels
from ..kernels import json_records
from ..kernels.spec import KernelSpec
from .targets import Target

_VERSION = 1
_MAX_BYTES = 64 << 20
_MAX_KERNELS = 10_000
_used: dict[tuple[KernelSpec, Target], None] = {}  # in order of first use


def note_use(spec: KernelSpec, target: Target) -> None:
    """Called once for each kernel that is loaded."""
    _used[spec, target] = None


def used_specs() -> list[tuple[KernelSpec, Target]]:
    """The kernels that this process has loaded, in order."""
    return list(_used)


def write_manifest(path: str | os.PathLike[str], kernels: Iterable[tuple[KernelSpec, Target]] | None = None) -> int:
    """Writes `kernels` (default: what this process has used) as JSON; returns how many."""
    kernels = used_specs() if kernels is None else list(kernels)
    rows = [{"target": target.name, "spec": compact_json(spec)} for spec, target in kernels]
    Path(path).write_text(json.dumps({"flashpage_manifest": _VERSION, "kernels": rows}, indent=1) + "\n")
    return len(rows)


def read_manifest(path: str | os.PathLike[str]) -> list[tuple[KernelSpec, Target]]:
    """The kernels that write_manifest wrote. A ValueError of one line if the file is anything else: every field is
    checked before it is used."""
    file = Path(path)
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES >> 20} MiB, which no manifest has")
    data = parse_json(file.read_bytes())
    if not isinstance(data, dict) or data.get("flashpage_manifest") != _VERSION:
        raise ValueError(f"{path} is not a flashpage manifest of version {_VERSION}")
    judges = {"flashpage_manifest": json_records.number(_VERSION, _VERSION), "kernels": _kernels}
    return json_records.record("the manifest", data, judges, frozenset(judges))["kernels"]


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; ValueError if the text is none, or is nested too deep to be read."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error})") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _kernels(_: str, rows: Any) -> list[tuple[KernelSpec, Target]]:
    if not isinstance(rows, list) or len(rows) > _MAX_KERNELS:
        raise json_records.refuse("kernels", rows, f"a list of at most {_MAX_KERNELS}")
    return [_kernel(f"kernels[{number}]", row) for number, row in enumerate(rows)]


def _kernel(place: str, row: Any) -> tuple[KernelSpec, Target]:
    def target(place: str, name: Any) -> Target:
        try:
            return Target.parse(name)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    judges: dict[str, json_records.Judge] = {
        "spec": lambda place, data: KernelSpec.from_json(data, place),
        "target": target,
    }
    found = json_records.record(place, row, judges, frozenset(judges))
    spec, target_of = found["spec"], found["target"]
    if kernels.find(spec.kernel) is None:
        raise ValueError(f"{place}.spec.kernel is {spec.kernel!r}: there is no such kernel")
    if not target_of.fits(spec):
        raise ValueError(f"{place}.target is {target_of.name!r}: {spec.kernel} is not compiled for it")
    return spec, target_of


def compact_json(spec: KernelSpec) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    default = KernelSpec(spec.kernel).to_json()
    return {k: v for k, v in spec.to_json().items() if k == "kernel" or v != default[k]}


def parse_spec(data: Any) -> KernelSpec:
    """The spec of compact_json's output or KernelSpec.to_json's; ValueError if a field is wrong."""
    return KernelSpec.from_json(data)


def spec_text(spec: KernelSpec) -> str:
    """One line of JSON that `flashpage build --spec` takes."""
    return json.dumps(compact_json(spec), separators=(",", ":"))
