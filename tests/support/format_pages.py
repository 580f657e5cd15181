"""Small caches in formats with scales, with rows to append."""

from __future__ import annotations

from typing import Any

import format_rows
import torch

import flashpage
from flashpage.kernels.kv_formats import FORMATS, unrotated

NAMES = tuple(FORMATS)
LENGTHS = (45, 8, 25, 22)


class Pages:
    """A cache with a page list for each request of LENGTHS, and rows to append."""

    def __init__(self, name: str, layout: str = "NHD", heads: int = 2, dim: int = 64, page: int = 16) -> None:
        torch.manual_seed(len(name))
        self.name, self.layout, self.page, self.dim = name, layout, page, dim
        lengths = torch.tensor(LENGTHS)
        counts = -(-lengths // page)
        self.indptr = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
        self.pages = int(self.indptr[-1]) + 2
        self.indices = torch.randperm(self.pages)[: int(self.indptr[-1])].int()
        self.last = ((lengths - 1) % page + 1).int()
        ends = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
        self.places = flashpage.get_batch_indices_positions(ends, lengths.int(), int(ends[-1]))
        self.key, self.value = torch.randn(2, int(ends[-1]), heads, dim).bfloat16()
        self.base = unrotated(name)
        stored, scales, columns = format_rows.STORED[self.base]
        inner = (page, heads) if layout == "NHD" else (heads, page)
        width = dim // 2 if FORMATS[name].bits == 4 else dim
        self.cache = [torch.zeros(self.pages, *inner, width, dtype=stored) for _ in range(2)]
        last = (dim // columns,) if columns else ()
        self.scales = [torch.zeros(self.pages, *inner, *last, dtype=scales) for _ in range(2)]

    def append(self, **extra: Any) -> None:
        flashpage.append_paged_kv_cache(
            *(self.key, self.value, *self.places, self.cache, self.indices, self.indptr, self.last, self.layout),
            **{"kv_format": self.name, "kv_cache_sf": self.scales} | extra,
        )

    def slots(self) -> torch.Tensor:
        """The slot of each row."""
        request, position = (place.long() for place in self.places)
        page = self.indices[self.indptr.long()[request] + position // self.page].long()
        return page * self.page + position % self.page

    def stored(self, side: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and scales of the rows that were appended, [nnz, heads, ...]."""
        slots, found = self.slots(), []
        for tensor in (self.cache[side], self.scales[side]):
            tensor = tensor if self.layout == "NHD" else tensor.transpose(1, 2)
            rows = tensor.reshape(self.pages * self.page, *tensor.shape[2:])[slots]
            found.append(rows if rows.dim() == 3 else rows.unsqueeze(-1))
        return found[0], found[1]


def planned_decode(pages: Pages, **options: Any) -> Any:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8), pages.layout)
    wrapper.plan(
        *(pages.indptr, pages.indices, pages.last, 4, 2, pages.dim, pages.page),
        **{"q_data_type": torch.bfloat16} | options,
    )
    return wrapper
