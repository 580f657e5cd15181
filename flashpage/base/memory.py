"""Memory that plans make for kernels to read, and the rule for all of it:

- It is made at plan time, outside of captures. What fills memory inside of a capture is written by replays alone, and
  by no run before the first replay.
- It is neither freed nor moved while a graph may read it. Nothing tells whether a run was captured, so what a wrapper
  outgrew stays for as long as the wrapper is there. Plans of options that runs no longer use go, unless a graph
  captured the plan itself (plan/session.py).

docs/graphs.md says what that means for callers; tests/api/test_captured_memory.py walks all wrappers and options.
"""

from __future__ import annotations

import torch

from .errors import PlanError


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def empty(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Memory that plans write to, in whichever mode they are called."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def allocate(
    shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, *, zeroed: bool = True
) -> torch.Tensor:
    """New memory; PlanError inside of a capture, where `what` begins the sentence."""
    if is_capturing(device):
        raise PlanError(
            f"{what} needs more memory than those planned before, which cannot be allocated while a graph is "
            "captured: plan the largest batch once before the capture."
        )
    memory = empty(shape, dtype, device)
    return memory.zero_() if zeroed else memory


class GrowingMemory:
    """Zeros that are enough for the largest plan so far. Captured launches of earlier plans keep theirs."""

    __slots__ = ("_device", "_dtype", "_what", "outgrown", "tensor")

    def __init__(self, dtype: torch.dtype, device: torch.device, what: str) -> None:
        self._dtype, self._device, self._what = dtype, device, what
        self.tensor: torch.Tensor | None = None
        self.outgrown: list[torch.Tensor] = []

    def at_least(self, count: int) -> torch.Tensor:
        """The tensor, [count or more]: a power of two, so that all that were outgrown are no more than the newest."""
        if self.tensor is None or len(self.tensor) < count:
            grown = allocate(1 << max(0, count - 1).bit_length(), self._dtype, self._device, self._what)
            if self.tensor is not None:
                self.outgrown.append(self.tensor)
            self.tensor = grown
        return self.tensor
