"""What a row sees of the tokens on one rank: causal and window by positions in the whole request."""

from __future__ import annotations

import torch

from .parallel_layout import ContextLayout
from .variants import Variant

# Rows past a request's last one are computed beside it: their entry is any.
_ROW = "min(max(q_idx + first_row(b), 0), last_row)"
_MASK = f"logical_and(kv_idx >= first_token({_ROW}), kv_idx < end_token({_ROW}))"


class LocalMask:
    """One variant for all plans of a wrapper; its tensors are the present batch's.

    A rank's tokens keep their order, so those that a row sees are a run [first_token, end_token) of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._variant = Variant(mask=_MASK)

    def set(
        self, layout: ContextLayout, q_indptr: torch.Tensor, seq_lens: torch.Tensor, visible: tuple[bool, int]
    ) -> Variant | None:
        """The variant, None where every row of the batch sees all tokens, so that all ranks decide alike.

        Args:
            layout: where tokens lie.
            q_indptr, seq_lens: rows and tokens of the whole requests, on the host.
            visible: causal and window_left.
        """
        causal, window_left = visible
        rows = q_indptr.long().diff()
        request = torch.repeat_interleave(torch.arange(len(rows)), rows)
        lens = seq_lens.long()[request]
        q_idx = torch.arange(len(request)) + (seq_lens.long() - q_indptr.long()[1:])[request] + int(q_indptr[0])
        zero = torch.zeros_like(lens)
        end = torch.minimum(q_idx + 1, lens).clamp(min=0) if causal else lens
        first = torch.minimum((q_idx - window_left).clamp(min=0), lens) if window_left >= 0 else zero
        if torch.equal(end, lens) and torch.equal(first, zero):
            return None
        first_row = q_indptr.long()[1:] - int(q_indptr[0]) - layout.tokens(seq_lens)  # q_idx counts a rank's tokens
        self._hold("first_row", first_row)
        self._hold("first_token", layout.tokens_before(first, lens))
        self._hold("end_token", layout.tokens_before(end, lens))
        self._variant.scalars["last_row"] = len(self._variant.tensors["end_token"]) - 1
        return self._variant

    def _hold(self, name: str, values: torch.Tensor) -> None:
        """Captured tensors keep their memory as long as they fit in it."""
        tensors = self._variant.tensors
        if name not in tensors or len(tensors[name]) < len(values):
            tensors[name] = torch.zeros(max(1, len(values)), dtype=torch.int32, device=self._device)
        tensors[name][: len(values)].copy_(values, non_blocking=True)
