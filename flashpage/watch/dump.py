"""Calls in a file: the inputs of a failing call, and of those that made the object it belongs to.

A file holds numbers, words, lists and tensors alone, so that loading one runs no code (torch.load, weights_only).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import torch

from ..base.errors import SettingError
from ..base.version import VERSION

MOST_KEPT = 20  # failing calls of one process
_MOST_BYTES = 8 << 30  # of one tensor; a larger one is kept as its shape
_FORMAT = 1
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Call:
    """`Class`, `Class.method` or `function`, and its arguments by name."""

    name: str
    arguments: dict[str, Any]

    def copied(self) -> Call:
        """The call with copies of its tensors, which their owner may change; workspaces stay as they are."""
        return Call(self.name, {name: _copied(name, value) for name, value in self.arguments.items()})


def keep(folder: Path, calls: list[Call], reason: str) -> Path | None:
    """Writes calls to a new folder below `folder`; None: this process has kept as many as it may."""
    number = next(_numbers)
    if number > MOST_KEPT:
        return None
    path = folder / f"{calls[-1].name}-{os.getpid()}-{number}"
    path.mkdir(parents=True)
    body = [{"name": call.name, "arguments": _plain(call.arguments)} for call in calls]
    torch.save({"format": _FORMAT, "version": VERSION, "reason": reason, "calls": body}, path / "call.pt")
    (path / "README.txt").write_text(f"{calls[-1].name}\n{reason}\nRun it again: flashpage replay {path}\n")
    return path


def load(path: Path) -> tuple[list[Call], str]:
    """The calls in a folder, and why the last one was kept."""
    file = path / "call.pt"
    if not file.exists():
        raise SettingError(f"{path} has no call.pt: pass one of the folders that FLASHPAGE_DUMP's folder holds")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']}")
        return [Call(call["name"], call["arguments"]) for call in found["calls"]], found["reason"]
    except Exception as error:
        raise SettingError(f"{file} cannot be read ({error}): pass a folder that this version has written") from None


def _is_workspace(name: str) -> bool:
    return "workspace" in name


def _copied(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if _is_workspace(name) else strided_copy(value, value.device)
    if isinstance(value, (tuple, list)):
        return [_copied(name, item) for item in value]
    return value


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain_value(name, value) for name, value in arguments.items()}


def _plain_value(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Tensor):
        return _plain_tensor(name, value)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return [_plain_value(name, item) for item in value]
    return {"not kept": f"{type(value).__name__}"}


def _plain_tensor(name: str, tensor: torch.Tensor) -> Any:
    shape = {"shape": list(tensor.shape), "dtype": tensor.dtype, "device": tensor.device.type}
    if _is_workspace(name) or tensor.nbytes > _MOST_BYTES:
        return {"empty": shape}
    try:
        return {"tensor": strided_copy(tensor.detach(), torch.device("cpu")), "device": tensor.device.type}
    except RuntimeError as error:  # after a fault of the device its memory cannot be read
        return {"empty": shape | {"why": str(error)}}


def strided_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides, whose first element is equally aligned."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor.detach().to(device, copy=True)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.storage_offset() % 16
    room = torch.zeros(offset + extent, dtype=tensor.dtype, device=device)
    copy = room.as_strided(tensor.shape, tensor.stride(), offset)
    once = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]  # expanded: written once
    copy[tuple(once)] = tensor.detach()[tuple(once)].to(device)
    return copy
