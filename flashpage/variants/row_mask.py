"""Masks with values for each row: a variant whose captured tensors have one entry for each row of the batch."""

from __future__ import annotations

import torch

from ..base.memory import GrowingMemory
from .variant import Variant

# The index of a row in the batch, clamped: rows past a request's last one are computed with any row's entry.
ROW = "min(max(q_idx + first_row(b), 0), last_row)"
# A row sees tokens from `first_token` on, before `end_token`.
WITHIN = f"logical_and(kv_idx >= first_token({ROW}), kv_idx < end_token({ROW}))"


class RowMask:
    """One variant for all plans of a wrapper; its tensors are the present batch's.

    Captured launches read the tensors' memory: a plan that is refused leaves it alone, since `copy` follows a plan that
    has succeeded.

    Args:
        mask: over kv_idx and the captured names; `name({ROW})` is a row's entry.
        device: where it runs.
    """

    def __init__(self, mask: str, device: torch.device) -> None:
        self._device = device
        self._variant = Variant(mask=mask)
        self._memory: dict[str, GrowingMemory] = {}
        self._to_copy: dict[str, torch.Tensor] = {}

    def set(self, first_row: torch.Tensor, **by_row: torch.Tensor) -> Variant:
        """The variant, which has these tensors, on the host, after the next `copy`.

        Args:
            first_row: what makes a row's q_idx its index in the batch (RowRuns.first_row).
            by_row: [rows] each.
        """
        self._to_copy = {"first_row": first_row, **by_row}
        for name in self._to_copy:
            if name not in self._memory:
                self._memory[name] = GrowingMemory(torch.int32, self._device, "a mask of windows or chunks")
                self._variant.tensors[name] = self._memory[name].at_least(1)
        self._variant.scalars.setdefault("last_row", 0)
        return self._variant

    def copy(self) -> None:
        """Writes what was set last."""
        for name, values in self._to_copy.items():
            memory = self._variant.tensors[name] = self._memory[name].at_least(len(values))
            memory[: len(values)].copy_(values, non_blocking=True)
            if name != "first_row":
                self._variant.scalars["last_row"] = len(memory) - 1
        self._to_copy = {}
