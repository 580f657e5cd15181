"""Plans of layers whose rows of q read lists of tokens (DSA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...wrappers.latent_sparse import BatchMLASparseAttentionWrapper
from .group_plans import Workspaces

WORKSPACE_BYTES = 256 << 20


class ListedPlans:
    """The attention objects of a group of layers, by rows of q. A plan depends on nothing else, as it takes all lists
    for full ones: entries of -1 read nothing.

    Args:
        arguments: of BatchMLASparseAttentionWrapper.plan.
        is_captured: whether graphs of so many rows are captured. Their plans stay, each with buffers of its own; of
            others, the last two.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        is_captured: Callable[[int], bool],
        device: torch.device,
        workspaces: Workspaces,
    ) -> None:
        self._arguments, self._is_captured, self._device = arguments, is_captured, device
        self._workspaces = workspaces
        self._kept: dict[int, BatchMLASparseAttentionWrapper] = {}
        self._last: dict[int, BatchMLASparseAttentionWrapper] = {}  # of other rows: a step's, and its decodes'

    def plan(self, lists: torch.Tensor) -> None:
        """Plans for len(lists) rows unless there is a plan; call it outside of captures."""
        rows = len(lists)
        if rows == 0 or rows in self._kept:
            return
        if rows in self._last:
            self._last[rows] = self._last.pop(rows)  # the other one is replaced next
            return
        workspace = self._workspaces.at_least(WORKSPACE_BYTES, self._device)
        is_kept = self._is_captured(rows)
        if is_kept:
            found = BatchMLASparseAttentionWrapper(workspace, use_cuda_graph=True, num_rows=rows)
        else:
            is_full = len(self._last) == 2
            found = self._last.pop(next(iter(self._last))) if is_full else BatchMLASparseAttentionWrapper(workspace)
        found.plan(lists, **self._arguments)
        (self._kept if is_kept else self._last)[rows] = found

    def of(self, rows: int) -> BatchMLASparseAttentionWrapper:
        """The attention that was planned for so many rows."""
        return self._kept[rows] if rows in self._kept else self._last[rows]
