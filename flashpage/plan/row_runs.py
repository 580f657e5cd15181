"""Runs of rows and the range of tokens that each may see: the planner makes each run a part of its request
(docs/planner.md), so that kernels read nothing else."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowRuns(NamedTuple):
    """Consecutive rows of a request, and the range of its tokens outside of which none of them sees a token: int64 on
    the host, [runs]. Requests without rows have none."""

    rows: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Repeats a run's value for each of its rows."""
        return torch.repeat_interleave(values, self.rows)

    def table(self) -> torch.Tensor:
        """Pages.row_runs."""
        return torch.stack([self.rows, self.begin, self.end], 1).int()

    def first_row(self) -> torch.Tensor:
        """A row's index in the batch minus its q_idx, which is right-aligned in the run's range (RowMask.set): [rows],
        as there are at most so many runs in captured launches, and one value for each run."""
        found = self.rows.new_zeros(int(self.rows.sum()))
        found[: len(self.rows)] = self.rows.cumsum(0) - self.end
        return found
