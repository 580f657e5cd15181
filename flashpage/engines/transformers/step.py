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
    """The shared state of one forward, made by its first layer.

    Attributes:
        length: tokens in a row after this forward, padding included.
        rows: which of the new rows are tokens.
        copies: pages (from, to) that every layer copies before it writes.
        places: request and position of each new token, on the device, for append_paged_kv_cache.
        positions: of each new token in its request, on the host.
        page_lists: page numbers, the start of each request's, and last_page_len, on the device.
        is_padded: whether a row of the cache has padding in it.
        lists: the lists of tokens that a layer's rows see, and the same as places in the pages.
    """

    lists: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(
        self, table: PageTable, history: History, device: torch.device, length: int, mask: torch.Tensor | None
    ) -> None:
        self.length, self.device = length, device
        self.is_dense = mask is not None and mask.dim() == 4
        if self.is_dense and history.is_padded:
            raise RunError(
                "attention_mask is 4-D but the cache was filled without its padding: pass a mask [batch, tokens]."
            )
        count = length - history.length
        self.rows = self._new_rows(table.batch, count, None if self.is_dense else mask, table.lengths)
        begin = table.lengths
        self.copies = table.extend(self.rows.lengths)
        history.append(count, self.rows.is_token)
        self.is_padded = history.is_padded
        self._place(begin, *table.arrays())
        self.page_size = table.page_size

    def _new_rows(self, batch: int, count: int, mask: torch.Tensor | None, before: torch.Tensor) -> Rows:
        if count < 1:
            raise RunError("layers of one forward add different numbers of tokens: reset() after a failed forward.")
        if mask is None:
            rows = all_rows(batch, count)
            total = before + rows.lengths
        else:
            # One copy to the host: the new columns, and the row sums, which must equal the cache's numbers of tokens.
            seen = torch.cat([mask[:, -count:].int(), mask.sum(1, dtype=torch.int32).unsqueeze(1)], dim=1).cpu()
            rows, total = token_rows(seen[:, :-1].bool(), self.device), seen[:, -1].long()
        if not torch.equal(total, before + rows.lengths):
            request = int((total != before + rows.lengths).nonzero()[0])
            stored = int((before + rows.lengths)[request])
            raise RunError(
                f"attention_mask has {int(total[request])} tokens in row {request} but the cache will have {stored}. "
                "Mask earlier tokens as in the calls that stored them, or reset() the cache."
            )
        return rows

    def _place(
        self, begin: torch.Tensor, kv_indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> None:
        """Copies everything that the device needs in one transfer."""
        new = self.rows.lengths
        self.q_indptr, self.kv_indptr, self.last_page_len = indptr(new), kv_indptr, last_page_len
        requests = torch.repeat_interleave(new)
        self.positions = torch.arange(requests.numel(), device="cpu") - self.q_indptr[requests] + begin[requests]
        parts = (requests.int(), self.positions.int(), indices, kv_indptr, last_page_len)
        moved = torch.cat(parts).to(self.device).split([part.numel() for part in parts])
        self.places, self.page_lists = (moved[0], moved[1]), (moved[2], moved[3], moved[4])

    def run(self, layer: Layer, query: torch.Tensor, pages: Any, mask: Mask | None) -> torch.Tensor:
        """The layer's attention; layers with the same options share the first one's plan."""
        self.refuse_mixed(layer)
        planned = plans.shared(self.device, ("paged", layer.call), is_paged=True)
        identity = (self, None if mask is None else layer.mask)
        if not planned.is_for(layer, identity):
            lengths = Lengths(self.q_indptr, self.kv_indptr, self.last_page_len)
            planned.plan(layer, lengths, Pages(self.page_lists[0]), self.page_size, mask)
            planned.planned_for(layer, identity, None)
        out = planned.run(layer, self.rows.pack(query).contiguous(), pages)
        return self.rows.unpack(out, query.shape[2])

    def refuse_mixed(self, layer: Layer) -> None:
        """Refuses a layer that needs padding stored in the pages while other layers leave it out, or the reverse."""
        if layer.call.has_mask:
            is_mixed = self.rows.places is not None
        else:
            is_mixed = self.is_dense and layer.mask is not None and not bool(layer.mask.all())
        if is_mixed:
            raise RunError("one layer has a 4-D mask and another has padding: pass masks of one kind, or no cache.")
