"""Memory of tensors: where their values are, and whether two tensors share it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .errors import FlashpageError

_COLLECTIVES = "torch.distributed._functional_collectives"
# The byte distance of one step in a dimension, with the least and the largest number of steps.
_Step = tuple[int, int, int]


def waited(value: Any) -> Any:
    """An AsyncCollectiveTensor's result, waited for; any other value as it is."""
    if value.__class__ is torch.Tensor or (collectives := sys.modules.get(_COLLECTIVES)) is None:
        return value
    return value.trigger_wait() if isinstance(value, collectives.AsyncCollectiveTensor) else value


def address(value: torch.Tensor, name: str, error: type[FlashpageError]) -> int:
    """Checks that a tensor has memory, and that the memory holds the tensor's values."""
    try:
        found = value.data_ptr()
    except RuntimeError:  # it has no storage at all
        found = 0
    if not value.numel():
        return found
    if not found and (value.__class__ is not torch.Tensor or torch._is_functional_tensor(value)):
        raise error(
            f"{name} is a {type(value).__name__}, which has no memory of its own. "
            "Pass the plain tensor that it stands for (DTensor: to_local())."
        )
    if value.is_neg() or value.is_conj():
        bit, way = ("negative", "resolve_neg()") if value.is_neg() else ("conjugate", "resolve_conj()")
        raise error(f"{name} has torch's {bit} bit, so that its memory holds other values: pass {name}.{way}.")
    has, needs = value.untyped_storage().nbytes(), (value.storage_offset() + _span(value)) * value.element_size()
    if has < needs:
        raise error(f"{name} needs {needs} bytes but its storage was resized to {has}: pass a tensor that has memory.")
    return found


def check_written(value: torch.Tensor, name: str, error: type[FlashpageError]) -> None:
    """Raises if elements of a written tensor share memory."""
    end = 0  # span of the dimensions so far
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True)):
        if size > 1:
            if stride <= end:
                raise error(
                    f"{name} has strides {tuple(value.stride())}: its elements share memory, but it is written. "
                    f"Pass {name}.contiguous()."
                )
            end += (size - 1) * stride


def check_apart(
    written: torch.Tensor, name: str, other: torch.Tensor, other_name: str, error: type[FlashpageError]
) -> None:
    """Raises if a written tensor shares memory with another tensor; they may be views of one tensor."""
    distance, sizes = other.data_ptr() - written.data_ptr(), (written.element_size(), other.element_size())
    if distance >= _span(written) * sizes[0] or -distance >= _span(other) * sizes[1]:
        return
    steps = _steps(written, other)
    if steps is None or _can_reach(distance, [*steps, (1, 1 - sizes[1], sizes[0] - 1)]):
        raise error(
            f"{name} shares memory with {other_name}: {name} is written while {other_name} is used. "
            "Pass separate memory."
        )


def _span(value: torch.Tensor) -> int:
    """Number of elements from the first to the last one."""
    if not value.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def _steps(a: torch.Tensor, b: torch.Tensor) -> list[_Step] | None:
    """Steps from an element of `a` to one of `b`, the longest first; None if their strides differ."""
    if a.dim() != b.dim():
        return None
    steps = []
    for a_size, b_size, a_stride, b_stride in zip(a.shape, b.shape, a.stride(), b.stride(), strict=True):
        a_length, b_length = a_stride * a.element_size(), b_stride * b.element_size()
        if a_size > 1 and b_size > 1 and a_length != b_length:
            return None
        length = a_length if a_size > 1 else b_length
        if length and (a_size > 1 or b_size > 1):
            steps.append((length, 1 - b_size, a_size - 1))
    return sorted(steps, reverse=True)


def _can_reach(distance: int, steps: list[_Step]) -> bool:
    """Whether some sum of steps equals the distance."""
    if not steps:
        return distance == 0
    (length, least, most), *shorter = steps
    rest = sum(shorter_length * max(-low, high) for shorter_length, low, high in shorter)
    first, last = -((rest - distance) // length), (distance + rest) // length
    return any(
        _can_reach(distance - count * length, shorter) for count in range(max(least, first), min(most, last) + 1)
    )
