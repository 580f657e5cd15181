"""Page tables of a step's requests, from SGLang's table of slots: [requests of the pool, tokens] int32.

With pages of one token and one pool that table is itself the table of pages, and kernels read it in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class SlotTables:
    """Makes page tables; all of it can be captured.

    Args:
        slots: SGLang's table, whose memory stays where it is.
        to_window_pool: slots of all tokens -> slots in the pool of windows.
    """

    def __init__(
        self, slots: torch.Tensor, page_size: int, to_window_pool: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        self.slots, self.page_size, self._to_window_pool = slots, page_size, to_window_pool

    @property
    def is_in_place(self) -> bool:
        """Whether the table of slots has the pages themselves."""
        return self.page_size == 1

    def pages(self, requests: torch.Tensor, tokens: int) -> torch.Tensor:
        """The pages of the first `tokens` tokens of each request."""
        found = self.slots[:, : tokens : self.page_size].index_select(0, requests)
        return found if self.is_in_place else found // self.page_size

    def decoder_slots(self, requests: torch.Tensor, encoder_lens: torch.Tensor, tokens: int) -> torch.Tensor:
        """The slots of the tokens after the encoder's; pages have one token."""
        columns = torch.arange(tokens, device=self.slots.device) + encoder_lens.long()[:, None]
        return self.slots[requests.long()[:, None], columns.clamp_(max=self.slots.shape[1] - 1)]

    def branch_slots(
        self, requests: torch.Tensor, kept: tuple[torch.Tensor, int], own: tuple[torch.Tensor, int]
    ) -> torch.Tensor:
        """The slots that each branch of a draft sees: known tokens of its request, then its own guesses; in the pool of
        windows, if there is one. Columns after the guesses have any slots.

        Args:
            kept: the last known tokens that a branch sees, [requests], and the most of them.
            own: places of the branches' first guesses in the table, [requests, branches], and the guesses of each.

        Returns: [requests x branches, most known tokens + guesses] int32.
        """
        (count, most), (first, guesses) = kept, own
        columns, count = torch.arange(most + guesses, device=self.slots.device), count[:, None, None]
        known = first[:, :1, None]  # the first branch's guesses follow the known tokens
        places = columns + torch.where(columns < count, known, first[..., None]) - count
        found = self.slots[requests.long()[:, None, None], places.clamp_(max=self.slots.shape[1] - 1)]
        found = found.view(-1, most + guesses)
        return found if self._to_window_pool is None else self._to_window_pool(found.long()).to(torch.int32)

    def window_pages(self, requests: torch.Tensor, seq_lens: torch.Tensor, reach: int, tokens: int) -> torch.Tensor:
        """The pages of the last `reach` tokens of each request in the pool of windows. Other entries are page 0, which
        no token has.

        Args:
            tokens: most tokens of a request.
        """
        assert self._to_window_pool is not None
        size, width = self.page_size, -(-tokens // self.page_size)
        back = torch.arange(min(reach // size + 2, width), device=self.slots.device)
        last = (seq_lens.long() - 1).clamp_(min=0) // size
        columns = (last[:, None] - back).clamp_(min=0)
        found = self._to_window_pool(self.slots[requests.long()[:, None], columns * size].long())
        found = (found // size).to(torch.int32)
        tables = torch.zeros(len(requests), width, dtype=torch.int32, device=self.slots.device)
        return tables.scatter_(1, columns, found)
