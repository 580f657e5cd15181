"""Tensors and values as words of a log line."""

from __future__ import annotations

from typing import Any

import torch

_LONGEST = 60  # characters of a value that is no tensor


def value(item: Any, level: int) -> str:
    """Level 3: shape, dtype, strides and device of a tensor; level 5: also minimum, maximum and NaN count."""
    if isinstance(item, torch.Tensor):
        return _tensor(item, level)
    if isinstance(item, (tuple, list)) and any(isinstance(part, torch.Tensor) for part in item):
        return f"({', '.join(value(part, level) for part in item)})"
    if isinstance(item, torch.dtype):
        return str(item).removeprefix("torch.")
    text = repr(item)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def arguments(named: dict[str, Any], level: int) -> str:
    """Arguments as `name=value`, without those that are None. The numbers in a workspace mean nothing."""
    levels = {name: min(level, 3) if "workspace" in name else level for name in named}
    return ", ".join(f"{name}={value(item, levels[name])}" for name, item in named.items() if item is not None)


def _tensor(tensor: torch.Tensor, level: int) -> str:
    shape = ", ".join(map(str, tensor.shape))
    text = f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]"
    if not tensor.is_contiguous():
        text += f" strides {tuple(tensor.stride())}"
    if not tensor.is_cpu:
        text += f" on {tensor.device}"
    return f"{text} {_numbers(tensor)}" if level >= 5 and tensor.numel() and not _is_capturing() else text


def _numbers(tensor: torch.Tensor) -> str:
    """Minimum and maximum of the numbers, and how many elements are none. Waits for the device."""
    if tensor.is_floating_point():
        numbers = tensor.float().reshape(-1)
        nans = int(numbers.isnan().sum())
        if nans == numbers.numel():
            return f"all {nans} are NaN"
        least, most = numbers.nan_to_num(torch.inf, torch.inf, -torch.inf).min(), numbers.nan_to_num(-torch.inf).max()
        return f"{float(least):.4g} to {float(most):.4g}, {nans} NaN"
    least, most = tensor.reshape(-1).aminmax()
    return f"{least.item()} to {most.item()}"


def _is_capturing() -> bool:
    """Whether a graph is being captured, when nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
