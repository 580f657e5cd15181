"""Trees of guesses: each row sees the tokens before the guesses, and its ancestors among them."""

from __future__ import annotations

import torch

from ...variants.variant import Variant


class TreeRows:
    """The tokens that the rows of a step see, in memory that captured steps read.

    Args:
        guesses: rows of each request.
    """

    def __init__(self, max_requests: int, guesses: int, device: torch.device) -> None:
        self.guesses = guesses
        self._before = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._seen = torch.zeros(max_requests, guesses, guesses, dtype=torch.uint8, device=device)
        self._range = torch.arange(guesses, device=device)
        row, guess = "max(q_idx - before[b], 0)", "max(kv_idx - before[b], 0)"
        self.variant = Variant(
            mask=f"(kv_idx < before[b]) || (seen[b, {row}, {guess}] != 0)",
            tensors={"before": self._before, "seen": self._seen},
        )

    def take(self, mask: torch.Tensor, lens: torch.Tensor) -> None:
        """Takes SGLang's mask of a step: guesses x (tokens + guesses) truth values of each request, joined.

        Args:
            lens: [requests], tokens of each request before its guesses.
        """
        count, lens = len(lens), lens.long()
        row_lens = lens + self.guesses
        starts = (row_lens.cumsum(0) - row_lens) * self.guesses + lens
        places = starts[:, None, None] + self._range[:, None] * row_lens[:, None, None] + self._range
        seen = mask.flatten()[places.clamp_(max=mask.numel() - 1)]  # requests that pad a captured step have no mask
        self._seen[:count].copy_(seen)
        self._before[:count].copy_(lens)
