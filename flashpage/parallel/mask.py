"""Which of a rank's tokens each row sees: causal and window, by positions in the whole request."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..variants.row_mask import WITHIN, RowMask
from ..variants.variant import Variant
from .layout import ContextLayout, LocalPages


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

    def trimmed(self, q_indptr: torch.Tensor, local: LocalPages, page_size: int) -> tuple[Visible, LocalPages]:
        """Leaves out pages that a window hides from all rows of a request; its first row sees furthest to the left."""
        rows = q_indptr.diff()
        pages = torch.zeros_like(rows)
        pages[rows > 0] = self.first[(q_indptr[:-1] - q_indptr[0])[rows > 0]] // page_size
        if not bool(pages.any()):
            return self, local
        left = torch.repeat_interleave(pages * page_size, rows)
        visible = Visible((self.first - left).clamp(min=0), (self.end - left).clamp(min=0))
        return visible, local.without_first(pages, page_size)

    def mask(self, q_indptr: torch.Tensor, local: LocalPages, variant: RowMask) -> Variant:
        """A variant that hides all other tokens in this rank's pages."""
        first_row = q_indptr[1:] - q_indptr[0] - local.seq_lens  # q_idx counts from the tokens of these pages
        return variant.set(first_row, first_token=self.first, end_token=self.end)


def local_mask(device: torch.device) -> RowMask:
    """int32 on the device, for Visible.mask."""
    return RowMask(WITHIN, device)
