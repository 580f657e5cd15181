"""Two levels of memory: a table from a request's tokens to slots, and the K and V in those slots."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..base import checks
from ..base.errors import FlashpageError, PlanError, RunError
from ..native import fastcall
from ..wrappers import append, operators
from ..wrappers.append_launch import AppendLaunch
from ..wrappers.append_places import AppendPlaces

_MOST_LAUNCHES = 64  # forms of rows that a pool keeps
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
            if self.slots.is_cpu and len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) <= last:
                raise RunError(f"{name} has numbers outside 0..{last}: pass those of this table.")
        self.slots[rows, positions] = slots.to(torch.int32)


class TokenPool:
    """Second level: K and V of every slot of every layer. Slots are numbered page after page.

    Args:
        num_pages: pages, the unowned one included.
        page_size: tokens in a page; 1: every slot is a page.
        dtype: of K and V; fp8 values are divided by the layer's scales when they are written.
        fill: initial value of all slots; NaN makes a read of a slot that was never written visible.
        v_head_dim: None: K and V are apart. Otherwise slots hold latent rows of one KV head (MLA): K is the row, and V
            its first v_head_dim columns.
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
        v_head_dim: int | None = None,
    ) -> None:
        numbers = {"num_pages": num_pages, "page_size": page_size, "num_layers": num_layers}
        for name, number in {**numbers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}.items():
            checks.whole(name, number, 1)
        self.num_pages, self.page_size, self.dtype = num_pages, page_size, checks.dtype("dtype", dtype).torch
        device, fill = checks.device(device), _fill(fill)
        self.is_latent = v_head_dim is not None
        if v_head_dim is not None:
            checks.whole("v_head_dim", v_head_dim, 1, head_dim)
            if num_kv_heads != 1:
                raise PlanError(f"num_kv_heads={num_kv_heads} with v_head_dim: latent rows have one KV head, pass 1.")
        shape = (
            (num_pages, page_size, head_dim) if self.is_latent else (num_pages, 2, page_size, num_kv_heads, head_dim)
        )
        self._v_head_dim = v_head_dim
        self._caches = [torch.full(shape, fill, device=device).to(self.dtype) for _ in range(num_layers)]
        self._launches: dict[Any, AppendLaunch] = {}  # by the form of the tensors, which an earlier call has checked
        # For appending by slot: one request whose pages are the whole pool, in order.
        self._all_pages = torch.arange(num_pages, dtype=torch.int32, device=device)
        self._all_indptr = torch.tensor([0, num_pages], dtype=torch.int32, device=device)
        self._all_last = torch.tensor([page_size], dtype=torch.int32, device=device)
        self._first_request = torch.zeros(num_pages * page_size, dtype=torch.int32, device=device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_launches": {}}  # a copy makes its own: they hold addresses

    def kv(self, layer: int) -> torch.Tensor:
        """The cache of a layer for wrappers, [num_pages, 2, page_size, num_kv_heads, head_dim]; latent rows:
        [num_pages, page_size, head_dim]."""
        return self._caches[checks.whole("layer", layer, 0, len(self._caches) - 1, RunError)]

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        """Writes K and V of new tokens, [tokens, num_kv_heads, head_dim], to their slots, [tokens] int32; V of latent
        rows is part of K and not read. One thread writes at a time."""
        cache, count = self.kv(layer), checks.tensor(slots, "slots", RunError).numel()
        k = self._stored(k, "k", k_scale)
        v = k if self.is_latent else self._stored(v, "v", v_scale)
        form = self._form(cache, slots, k, v)
        if form is not None and (launch := self._launches.get(form)) is not None:
            self._append(launch, cache, slots, k, v)
            return
        places = (self._first_request[:count], slots)
        everything = (self._all_pages, self._all_indptr, self._all_last)
        try:
            if self.is_latent:
                rows, cut = k.flatten(1), self._v_head_dim
                caches = (cache[..., :cut], cache[..., cut:])
                append.append_paged_mla_kv_cache(rows[:, :cut], rows[:, cut:], *places, *caches, *everything)
            else:
                append.append_paged_kv_cache(k, v, *places, cache, *everything)
        except FlashpageError as error:
            error.use_names({"append_key": "k", "append_value": "v", "positions": "slots", "batch_indices": "slots"})
            error.use_names(dict.fromkeys(("append_ckv", "append_kpe"), "k"))
            raise
        if form is not None:
            if len(self._launches) >= _MOST_LAUNCHES:
                self._launches.clear()
            self._launches[form] = AppendLaunch(*self._parts(k, v), self._cache_parts(cache), "NHD")

    def _form(self, cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """What a write's launch depends on, but for addresses and the number of tokens; None if a check fails that does
        not follow from it, so that append_paged_kv_cache must take these tensors, or say why not."""
        if operators.is_traced() or fastcall.builtins().judge(cache, slots, k, v):
            return None
        is_plain = slots.dtype is torch.int32 and slots.dim() == 1 and slots.is_contiguous() and k.dim() == v.dim() == 3
        if not is_plain or not 0 < len(k) == len(v) == len(slots) <= len(self._first_request):
            return None
        if slots.is_cpu and not 0 <= int(slots.min()) <= int(slots.max()) < len(self._first_request):
            return None
        forms = (k.shape[1:], k.stride(), k.dtype), (v.shape[1:], v.stride(), v.dtype)
        return forms, k.device, v.device, slots.device

    def _append(
        self, launch: AppendLaunch, cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        places = AppendPlaces(
            batch_indices=self._first_request,
            positions=slots,
            kv_indices=self._all_pages,
            kv_indptr=self._all_indptr,
        )
        launch.run(*self._parts(k, v), self._cache_parts(cache), places)
        torch.autograd.graph.increment_version(cache)

    def _parts(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two parts of new rows that go to different places of a slot."""
        return (k[..., : self._v_head_dim], k[..., self._v_head_dim :]) if self.is_latent else (k, v)

    def _cache_parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.is_latent:
            return (cache,)
        rows = cache.unsqueeze(2)
        return rows[..., : self._v_head_dim], rows[..., self._v_head_dim :]

    def _stored(self, values: Any, name: str, scale: Any) -> torch.Tensor:
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
