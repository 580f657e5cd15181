"""Which request has which pages. One table serves all layers of a cache: page n is the same place in each of them."""

from __future__ import annotations

import torch

from ...base.errors import RunError


class PageTable:
    """Pages of the requests of a batch, on the host.

    Requests made from one another share pages; a request that writes to a shared page gets its own copy first.
    """

    def __init__(self, page_size: int, num_pages: int | None) -> None:
        self.page_size = page_size
        self.limit = num_pages
        self.num_pages = num_pages or 0  # in use or free
        self.batch = 0
        self.lengths = torch.zeros(0, dtype=torch.int64, device="cpu")  # [batch], tokens
        self.pages: list[list[int]] = []  # of each request
        self._users = [0] * self.num_pages  # number of requests that have each page
        self._free = list(range(self.num_pages))[::-1]

    def start(self, batch: int) -> None:
        """Makes `batch` requests without tokens."""
        self.batch, self.lengths, self.pages = (
            batch,
            torch.zeros(batch, dtype=torch.int64, device="cpu"),
            [[] for _ in range(batch)],
        )

    def extend(self, new: torch.Tensor) -> list[tuple[int, int]]:
        """Allocates room for `new` [batch] more tokens; returns the pages to copy first, as pairs (from, to). Changes
        nothing if there are too few pages."""
        if self.limit is not None and self._pages_for(new) > len(self._free):
            raise RunError(f"all num_pages={self.limit} pages of the cache are in use: pass a larger num_pages.")
        copies = []
        for request, count in enumerate(new.tolist()):
            if not count:
                continue
            pages, length = self.pages[request], int(self.lengths[request])
            if length % self.page_size and self._users[pages[-1]] > 1:
                shared, pages[-1] = pages[-1], self._take()
                self._users[shared] -= 1
                copies.append((shared, pages[-1]))
            needed = -(-(length + count) // self.page_size)
            pages.extend(self._take() for _ in range(needed - len(pages)))
        self.lengths = self.lengths + new
        return copies

    def _pages_for(self, new: torch.Tensor) -> int:
        """The number of pages that `extend` takes."""
        total = 0
        users: dict[int, int] = {}  # of shared pages, without the requests that copy them
        for pages, length, count in zip(self.pages, self.lengths.tolist(), new.tolist(), strict=True):
            if not count:
                continue
            total += -(-(length + count) // self.page_size) - len(pages)
            if length % self.page_size:
                left = users.get(pages[-1], self._users[pages[-1]])
                if left > 1:
                    total, users[pages[-1]] = total + 1, left - 1
        return total

    def shorten(self, removed: torch.Tensor) -> None:
        """Removes the last `removed` [batch] tokens."""
        self.lengths = self.lengths - removed
        for pages, length in zip(self.pages, self.lengths.tolist(), strict=True):
            kept = -(-length // self.page_size)
            self._give(pages[kept:])
            del pages[kept:]

    def select(self, requests: torch.Tensor) -> None:
        """Makes request i of the new batch a copy of requests[i]; a request may be given several times."""
        chosen = requests.tolist()
        pages = [list(self.pages[request]) for request in chosen]
        for page in (page for own in pages for page in own):
            self._users[page] += 1
        for own in self.pages:
            self._give(own)
        self.batch, self.lengths, self.pages = len(chosen), self.lengths[chosen], pages

    def reset(self) -> None:
        for own in self.pages:
            self._give(own)
        self.start(0)

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """kv_indptr [batch + 1], indices and last_page_len [batch], int32 on the host."""
        counts = torch.tensor([len(own) for own in self.pages], device="cpu")
        indptr = torch.zeros(self.batch + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(counts, 0, out=indptr[1:])
        indices = torch.tensor([page for own in self.pages for page in own], dtype=torch.int32, device="cpu")
        last = torch.where(counts > 0, self.lengths - (counts - 1) * self.page_size, 0)
        return indptr, indices, last.int()

    def _take(self) -> int:
        if not self._free:
            assert self.limit is None, "extend has counted the pages"
            more = max(16, self.num_pages)  # doubling, so that a page moves once on average
            self._free = list(range(self.num_pages, self.num_pages + more))[::-1]
            self._users += [0] * more
            self.num_pages += more
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _give(self, pages: list[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
