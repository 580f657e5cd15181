"""Plans of layers whose rows of q read lists of tokens (DSA)."""

from __future__ import annotations

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
    """

    def __init__(self, arguments: dict[str, Any], device: torch.device, workspaces: Workspaces) -> None:
        self._arguments, self._device, self._workspaces = arguments, device, workspaces
        self._captured: set[int] = set()
        self._kept: dict[int, BatchMLASparseAttentionWrapper] = {}
        self._last: dict[int, BatchMLASparseAttentionWrapper] = {}  # of other rows: a step's, and its decodes'

    def keep(self, rows: int) -> None:
        """Keeps the plan of so many rows, with buffers of its own, because a graph is about to be captured. Of others,
        the last two stay."""
        self._captured.add(rows)

    def plan(self, lists: torch.Tensor) -> None:
        """Plans for len(lists) rows unless there is a plan; call it outside of captures."""
        rows = len(lists)
        if rows == 0 or rows in self._kept:
            return
        is_kept = rows in self._captured
        if is_kept:
            self._last.pop(rows, None)
        elif rows in self._last:
            self._last[rows] = self._last.pop(rows)  # the other one is replaced next
            return
        workspace = self._workspaces.at_least(WORKSPACE_BYTES, self._device)
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
