"""One forward over the pages of a cache: which rows are new, where they go, and the plan that the layers share."""

from __future__ import annotations

from typing import Any

import torch

from ...base.errors import RunError
from ...plan.lengths import Lengths
from ...plan.page_indices import Mask, Pages
from . import plans
from .call import Layer
from .history import History
from .masks import Rows, all_rows, token_rows
from .pages import PageTable
from .ragged import indptr


class Step:
    """Made by the first layer of a forward.

    Attributes:
        length: tokens of a row after this forward, padding included.
        rows: the new rows that are tokens.
        copies: pages (from, to) that every layer copies before it writes.
        places: request and position of each new token, on the device: arguments of append_paged_kv_cache.
        page_lists: page numbers, where each request's begin, and last_page_len, on the device.
    """

    def __init__(
        self, table: PageTable, history: History, device: torch.device, length: int, mask: torch.Tensor | None
    ) -> None:
        self.length, self.device = length, device
        self.is_dense = mask is not None and mask.dim() == 4
        if self.is_dense and history.is_padded:
            raise RunError(
                "attention_mask is 4-D but the cache was filled with padding left out: pass [batch, tokens]."
            )
        count = length - history.length
        self.rows = self._new_rows(table.batch, count, None if self.is_dense else mask, table.lengths)
        begin = table.lengths
        self.copies = table.extend(self.rows.lengths)
        history.append(count, self.rows.is_token)
        self._place(begin, *table.arrays())
        self._page_size = table.page_size

    def _new_rows(self, batch: int, count: int, mask: torch.Tensor | None, before: torch.Tensor) -> Rows:
        if count < 1:
            raise RunError("layers of one forward add different numbers of tokens: an earlier one broke off; reset().")
        if mask is None:
            rows = all_rows(batch, count)
            total = before + rows.lengths
        else:
            # One copy: the new columns, and the tokens of all columns, which must be those that the cache has.
            seen = torch.cat([mask[:, -count:].int(), mask.sum(1, dtype=torch.int32).unsqueeze(1)], dim=1).cpu()
            rows, total = token_rows(seen[:, :-1].bool(), self.device), seen[:, -1].long()
        if not torch.equal(total, before + rows.lengths):
            request = int((total != before + rows.lengths).nonzero()[0])
            raise RunError(
                f"attention_mask has {int(total[request])} tokens in row {request} but the cache will have "
                f"{int((before + rows.lengths)[request])}: mask earlier tokens as when they came, or reset() the cache."
            )
        return rows

    def _place(
        self, begin: torch.Tensor, kv_indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> None:
        """Everything that lies on the device goes there in one copy."""
        new = self.rows.lengths
        self.q_indptr, self.kv_indptr, self.last_page_len = indptr(new), kv_indptr, last_page_len
        requests = torch.repeat_interleave(new)
        positions = torch.arange(requests.numel(), device="cpu") - self.q_indptr[requests] + begin[requests]
        parts = (requests.int(), positions.int(), indices, kv_indptr, last_page_len)
        moved = torch.cat(parts).to(self.device).split([part.numel() for part in parts])
        self.places, self.page_lists = (moved[0], moved[1]), (moved[2], moved[3], moved[4])

    def run(self, layer: Layer, query: torch.Tensor, pages: Any, mask: Mask | None) -> torch.Tensor:
        """The layer's attention; layers with the same options share the first one's plan."""
        if self._is_mixed(layer):
            raise RunError("one layer has a 4-D mask and another one padding: no plan serves both; pass no cache.")
        planned = plans.shared(self.device, ("paged", layer.call), is_paged=True)
        identity = (self, None if mask is None else layer.mask)
        if not planned.is_for(identity):
            lengths = Lengths(self.q_indptr, self.kv_indptr, self.last_page_len)
            planned.plan(layer, lengths, Pages(self.page_lists[0]), self._page_size, mask)
            planned.planned_for(identity, None)
        out = planned.run(layer, self.rows.pack(query).contiguous(), pages)
        return self.rows.unpack(out, query.shape[2])

    def _is_mixed(self, layer: Layer) -> bool:
        """Whether padding is in the pages for some layers and left out for others."""
        if layer.call.has_mask:
            return self.rows.places is not None
        return self.is_dense and layer.mask is not None and not bool(layer.mask.all())
