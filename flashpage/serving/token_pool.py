"""Two levels of memory: a table from a request's tokens to slots, and the K and V in those slots."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..base import checks
from ..base.errors import FlashpageError, RunError
from ..wrappers import append

UNOWNED_PAGE = 0  # never given to a request: rows that pad a captured batch write here


class RequestTable:
    """First level: a row for each running request, with the slot of each of its tokens.

    Args:
        max_requests: rows of the table.
        max_context: most tokens of a request.
    """

    def __init__(self, max_requests: int, max_context: int, device: torch.device | str = "cpu") -> None:
        checks.whole("max_requests", max_requests, 1)
        checks.whole("max_context", max_context, 1)
        device = checks.device(device)
        self.slots = torch.zeros(max_requests, max_context, dtype=torch.int32, device=device)
        self._free = list(reversed(range(max_requests)))

    @property
    def max_requests(self) -> int:
        """Rows of the table."""
        return self.slots.shape[0]

    @property
    def max_context(self) -> int:
        """Tokens that a request may have."""
        return self.slots.shape[1]

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def acquire(self) -> int:
        """Gives a free row to a request."""
        if not self._free:
            raise FlashpageError(f"all {self.max_requests} rows of the request table are in use: release one first.")
        return self._free.pop()

    def release(self, row: int) -> None:
        """Frees a request's row; its numbers stay until the next request overwrites them."""
        row = checks.whole("row", row, 0, self.max_requests - 1, FlashpageError)
        if row in self._free:
            raise FlashpageError(f"row={row} belongs to no request: pass a row from acquire(), once.")
        self._free.append(row)

    def write(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Sets slots[i] for the token at positions[i] of the request in rows[i]; [tokens] each."""
        for name, tensor, last in (
            ("rows", rows, self.max_requests - 1),
            ("positions", positions, self.max_context - 1),
            ("slots", slots, 2**31 - 1),
        ):
            if checks.tensor(tensor, name, RunError).dtype not in (torch.int32, torch.int64) or tensor.dim() != 1:
                raise RunError(
                    f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: pass int32 or int64, [tokens]."
                )
            if len(tensor) != len(rows):
                raise RunError(f"{name} has {len(tensor)} entries and rows has {len(rows)}: pass one each a token.")
            if self.slots.is_cpu and bool(((tensor < 0) | (tensor > last)).any()):
                raise RunError(f"{name} has numbers outside 0..{last}: pass those of this table.")
        self.slots[rows, positions] = slots.to(torch.int32)


class TokenPool:
    """Second level: K and V of every slot of every layer. Slots are numbered page after page.

    Args:
        num_pages: pages, the unowned one included.
        page_size: tokens in a page; 1: every slot is a page.
        dtype: of K and V; fp8 values are divided by the layer's scales when they are written.
        fill: initial value of all slots; NaN makes a read of a slot that was never written visible.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        fill: float = 0.0,
    ) -> None:
        numbers = {"num_pages": num_pages, "page_size": page_size, "num_layers": num_layers}
        for name, number in {**numbers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}.items():
            checks.whole(name, number, 1)
        self.num_pages, self.page_size, self.dtype = num_pages, page_size, checks.dtype("dtype", dtype).torch
        device, fill = checks.device(device), _fill(fill)
        shape = (num_pages, 2, page_size, num_kv_heads, head_dim)
        self._caches = [torch.full(shape, fill, device=device).to(self.dtype) for _ in range(num_layers)]
        # For appending by slot: one request whose pages are the whole pool, in order.
        self._all_pages = torch.arange(num_pages, dtype=torch.int32, device=device)
        self._all_indptr = torch.tensor([0, num_pages], dtype=torch.int32, device=device)
        self._all_last = torch.tensor([page_size], dtype=torch.int32, device=device)
        self._first_request = torch.zeros(num_pages * page_size, dtype=torch.int32, device=device)

    def kv(self, layer: int) -> torch.Tensor:
        """The cache of a layer for wrappers, [num_pages, 2, page_size, num_kv_heads, head_dim]."""
        return self._caches[checks.whole("layer", layer, 0, len(self._caches) - 1, RunError)]

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        """Writes K and V of new tokens, [tokens, num_kv_heads, head_dim], to their slots, [tokens] int32."""
        cache, count = self.kv(layer), checks.tensor(slots, "slots", RunError).numel()
        k, v = self._stored(k, "k", k_scale), self._stored(v, "v", v_scale)
        everything = (self._all_pages, self._all_indptr, self._all_last)
        try:
            append.append_paged_kv_cache(k, v, self._first_request[:count], slots, cache, *everything)
        except FlashpageError as error:
            error.use_names({"append_key": "k", "append_value": "v", "positions": "slots", "batch_indices": "slots"})
            raise

    def _stored(self, values: torch.Tensor, name: str, scale: Any) -> torch.Tensor:
        """Values as the cache stores them: value = stored * scale."""
        checks.dtype_of(checks.tensor(values, name, RunError), name, RunError)
        if scale is None:
            return values.to(self.dtype)
        if isinstance(scale, torch.Tensor):
            if checks.tensor(scale, f"{name}_scale", RunError).numel() != 1 or scale.dtype != torch.float32:
                raise RunError(
                    f"{name}_scale has shape {tuple(scale.shape)} and dtype {scale.dtype}: pass one float32 value."
                )
        else:
            scale = checks.real(f"{name}_scale", scale, error=RunError)
        return (values / scale).to(self.dtype)


def _fill(value: Any) -> float:
    """NaN, or a number."""
    if isinstance(value, float) and math.isnan(value):
        return value
    return checks.real("fill", value)
