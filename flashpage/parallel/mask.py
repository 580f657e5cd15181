"""Which of a rank's tokens each row sees: causal and window, by positions in the whole request."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..plan.row_runs import RowRuns
from ..variants.row_mask import RowMask
from ..variants.variant import Variant
from .layout import ContextLayout


class Visible(NamedTuple):
    """Tokens keep their order on a rank, so a row sees one run of them. int64, on the host."""

    first: torch.Tensor  # [rows] first visible token of the row's request on this rank
    end: torch.Tensor  # [rows] one past the last visible token

    @staticmethod
    def of(
        layout: ContextLayout, q_indptr: torch.Tensor, seq_lens: torch.Tensor, causal: bool, window_left: int
    ) -> Visible | None:
        """The visible tokens of each row; None if every row sees all tokens.

        Args:
            layout: where tokens lie.
            q_indptr, seq_lens: row offsets and lengths of the whole requests, on the host; int64.
        """
        request = torch.repeat_interleave(torch.arange(len(seq_lens), device="cpu"), q_indptr.diff())
        lens = seq_lens[request]
        q_idx = torch.arange(len(request), device="cpu") + q_indptr[0] + lens - q_indptr[1:][request]
        first, end = torch.zeros_like(lens), lens
        if causal:
            end = torch.minimum(q_idx + 1, lens).clamp(min=0)
        if window_left >= 0:
            first = torch.minimum((q_idx - window_left).clamp(min=0), lens)
        if torch.equal(end, lens) and not bool(first.any()):
            return None
        return Visible(layout.tokens_before(first, lens), layout.tokens_before(end, lens))

    def runs(self, q_indptr: torch.Tensor) -> RowRuns:
        """The rows of each request that has rows, with the tokens that any of them sees: later rows see later ones."""
        rows = q_indptr.diff()
        rows = rows[rows > 0]
        last = rows.cumsum(0) - 1
        begin = self.first[last + 1 - rows]
        return RowRuns(rows, begin, torch.maximum(begin, self.end[last]))

    def mask(self, runs: RowRuns, variant: RowMask) -> Variant | None:
        """A variant that hides all other tokens of the runs; None if there are none."""
        if torch.equal(self.first, runs.by_row(runs.begin)) and torch.equal(self.end, runs.by_row(runs.end)):
            return None
        return variant.set(runs.first_row(), first_token=self.first, end_token=self.end)
