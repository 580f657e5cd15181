"""Memory that plans allocate for kernels to read, and the rules for all of it:

- It is allocated at plan time, outside of captures. A fill inside of a capture would be written by replays only, and by
no run before the first replay.
- It is neither freed nor moved while a graph may read it. Nothing reports that a run was captured, so memory that a
wrapper outgrew stays until the wrapper is gone. Plans of options that runs no longer use are freed, unless a graph
captured the plan itself (plan/session.py).
- A wrapper for graphs has memory for each set of options that runs have used, as launches read the plans of their own
options (plan/option_plans.py).

docs/graphs.md says what that means for callers; tests/api/test_captured_memory.py walks all wrappers and options.
"""

from __future__ import annotations

import torch

from .errors import PlanError


def is_capturing(device: torch.device) -> bool:
    """Whether current launches become part of a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def empty(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Allocates outside of inference mode, so that later plans may write the memory in any mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def allocate(
    shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, *, zeroed: bool = True
) -> torch.Tensor:
    """Allocates; PlanError inside of a capture, with `what` as the subject of the sentence."""
    if is_capturing(device):
        raise PlanError(
            f"{what} needs more memory than those planned before, which cannot be allocated while a graph is captured. "
            "Instead, plan the largest batch once before the capture."
        )
    memory = empty(shape, dtype, device)
    return memory.zero_() if zeroed else memory


class GrowingMemory:
    """Zeros, enough for the largest plan so far. Captured launches of earlier plans keep theirs."""

    __slots__ = ("_device", "_dtype", "_what", "outgrown", "tensor")

    def __init__(self, dtype: torch.dtype, device: torch.device, what: str) -> None:
        self._dtype, self._device, self._what = dtype, device, what
        self.tensor: torch.Tensor | None = None
        self.outgrown: list[torch.Tensor] = []

    def at_least(self, count: int) -> torch.Tensor:
        """The tensor, [count or more]. Sizes are powers of two, so all outgrown ones together are smaller than the
        newest."""
        if self.tensor is None or len(self.tensor) < count:
            grown = allocate(1 << max(0, count - 1).bit_length(), self._dtype, self._device, self._what)
            if self.tensor is not None:
                self.outgrown.append(self.tensor)
            self.tensor = grown
        return self.tensor
