"""Multi-item scoring: many items behind one shared prefix, each seeing the prefix and itself, as a mask variant."""

from __future__ import annotations

from typing import Any

import torch

from . import arguments
from .errors import PlanError
from .variants import Variant

# Beside causal: the prefix, and the row's own item, which began token_pos tokens before the row.
_MASK = (
    "logical_or(kv_idx < prefix_len(b), "
    "q_idx - kv_idx <= token_pos(b, min(max(q_idx - prefix_len(b), 0), max_token_pos)))"
)


class MultiItemMask:
    """One variant for all plans of a wrapper; its tensors are the present batch's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._variant: Variant | None = None

    def set(self, prefix_len: Any, token_pos: Any, token_pos_len: int, batch: int) -> Variant:
        """prefix_len: [batch] tokens. token_pos: [batch x token_pos_len], each token's distance from its item's
        delimiter, from the prefix's end on."""
        for name, value in (("prefix_len_ptr", prefix_len), ("token_pos_in_items_ptr", token_pos)):
            if value is None:
                raise PlanError(f"{name}=None: multi-item scoring needs prefix_len_ptr and token_pos_in_items_ptr.")
            arguments.tensor(value, name, PlanError)
        if token_pos_len == 0 and batch == 1:
            token_pos_len = token_pos.numel()
        if prefix_len.numel() != batch or token_pos_len < 1 or token_pos.numel() != batch * token_pos_len:
            raise PlanError(
                f"prefix_len_ptr has {prefix_len.numel()} entries and token_pos_in_items_ptr "
                f"{token_pos.numel()} but the batch "
                f"has {batch} requests and token_pos_in_items_len={token_pos_len}: pass one "
                "prefix length a request and "
                "token_pos_in_items_len positions a request, filled up with zeros."
            )
        tensors = {
            "prefix_len": prefix_len.to(self.device).to(torch.int32),
            "token_pos": token_pos.to(self.device).to(torch.int32).view(batch, token_pos_len),
        }
        scalars = {"max_token_pos": token_pos_len - 1}
        if self._variant is None:
            self._variant = Variant(mask=_MASK, tensors=tensors, scalars=scalars)
        self._variant.tensors.update(tensors)
        self._variant.scalars.update(scalars)
        return self._variant
