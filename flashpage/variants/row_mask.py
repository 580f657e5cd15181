"""Masks with values for each row: a variant whose captured tensors have one entry for each row of the batch."""

from __future__ import annotations

import torch

from .variant import Variant

# The index of a row in the batch, clamped: rows past a request's last one are computed with any row's entry.
ROW = "min(max(q_idx + first_row(b), 0), last_row)"
# A row sees tokens from `first_token` on, before `end_token`.
WITHIN = f"logical_and(kv_idx >= first_token({ROW}), kv_idx < end_token({ROW}))"


class RowMask:
    """One variant for all plans of a wrapper; its tensors are the present batch's.

    They keep their memory as long as they fit in it, so that captured launches read those of the newest plan.

    Args:
        mask: over kv_idx and the captured names; `name({ROW})` is a row's entry.
        device: where it runs.
    """

    def __init__(self, mask: str, device: torch.device) -> None:
        self._device = device
        self._variant = Variant(mask=mask)

    def set(self, first_row: torch.Tensor, **by_row: torch.Tensor) -> Variant:
        """The variant with these tensors, on the host.

        Args:
            first_row: [requests], what makes a row's q_idx its index in the batch.
            by_row: [rows] each.
        """
        self._hold("first_row", first_row)
        for name, values in by_row.items():
            self._hold(name, values)
            self._variant.scalars["last_row"] = len(self._variant.tensors[name]) - 1
        return self._variant

    def _hold(self, name: str, values: torch.Tensor) -> None:
        tensors = self._variant.tensors
        if name not in tensors or len(tensors[name]) < len(values):
            tensors[name] = torch.zeros(max(1, len(values)), dtype=torch.int32, device=self._device)
        tensors[name][: len(values)].copy_(values, non_blocking=True)
