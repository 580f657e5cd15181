"""KV caches in every form that callers have, described by strides: one tensor or a pair, NHD or HND, pages or single
slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import checks
from .errors import RunError

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class View(NamedTuple):
    """K or V by strides: where element (page, token, head, 0) is, in elements from the data pointer."""

    num_pages: int  # ragged: tokens
    page_size: int
    num_heads: int
    head_dim: int
    page_stride: int
    token_stride: int
    head_stride: int
    offset: int = 0  # elements from the tensor's data pointer to V, in a cache that is one tensor


def paged_views(cache: Cache, kv_layout: str) -> tuple[View, View]:
    """K and V of a cache in any accepted form:

    one tensor [pages, 2, page, heads, dim] (NHD) or [pages, 2, heads, page, dim] (HND), or [pages, 2, heads, dim] with
    pages of one token; or a (K, V) pair of [pages, page, heads, dim] / [pages, heads, page, dim], or [slots, heads,
    dim].
    """
    if isinstance(cache, (tuple, list)):
        if len(cache) != 2:
            raise RunError(f"paged_kv_cache has {len(cache)} entries: pass one tensor, or the pair (k_cache, v_cache).")
        k = _paged_view(cache[0], kv_layout, "paged_kv_cache[0]")
        v = _paged_view(cache[1], kv_layout, "paged_kv_cache[1]")
        if k[:3] != v[:3]:
            raise RunError(
                f"paged_kv_cache holds K of shape {tuple(cache[0].shape)} and V of shape {tuple(cache[1].shape)}. "
                "They must have the same pages, page size and heads."
            )
        return k, v
    if not isinstance(cache, torch.Tensor):
        checks.tensor(cache, "paged_kv_cache", RunError)
    if cache.dim() not in (4, 5) or cache.shape[1] != 2:
        raise RunError(
            f"paged_kv_cache has shape {tuple(cache.shape)}: pass [pages, 2, ...] with 4 or 5 dimensions, or a "
            "(K, V) pair."
        )
    k = _paged_view(cache.select(1, 0), kv_layout, "paged_kv_cache")
    return k, k._replace(offset=cache.stride(1))


def with_scales(cache: Any, kv_cache_sf: Any, name: str = "paged_kv_cache") -> Any:
    """(K, V, scales of K, scales of V) of a cache in a format; a side without scales has None. The cache itself without
    kv_cache_sf."""
    if kv_cache_sf is None:
        return cache
    halves = (*_halves(cache, name), *_halves(kv_cache_sf, "kv_cache_sf", may_lack=True))
    return tuple(
        half.view(torch.uint8) if half is not None and half.dtype in _PACKED_PAIRS else half for half in halves
    )


_PACKED_PAIRS = tuple(getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name))


def _halves(given: Any, name: str, may_lack: bool = False) -> tuple[Any, Any]:
    """K's and V's part of a pair, or of a tensor [pages, 2, ...]."""
    if isinstance(given, (tuple, list)):
        if len(given) != 2:
            raise RunError(f"{name} has {len(given)} entries: pass one tensor, or a pair for K and V.")
        for i, half in enumerate(given):
            if not isinstance(half, torch.Tensor) and not (may_lack and half is None):
                checks.tensor(half, f"{name}[{i}]", RunError)
        return given[0], given[1]
    if checks.tensor(given, name, RunError).dim() < 3 or given.shape[1] != 2:
        raise RunError(f"{name} has shape {tuple(given.shape)}: pass [pages, 2, ...], or a pair for K and V.")
    return given.select(1, 0), given.select(1, 1)


def scales_view(tensor: torch.Tensor, dims: int, kv_layout: str, is_paged: bool, name: str) -> View:
    """The scales of rows, as those of the rows themselves: [..., scales of a row], or without the last dimension if a
    row has one. `dims`: of the tensor of rows."""
    if checks.tensor(tensor, name, RunError).dim() == dims - 1:
        tensor = tensor.unsqueeze(-1)
    if tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise RunError(
            f"{name} has strides {tuple(tensor.stride())}: the innermost stride must be 1, so pass {name}.contiguous()."
        )
    if tensor.dim() != dims:
        raise RunError(
            f"{name} has shape {tuple(tensor.shape)}: pass the {dims} dimensions of K and V, with a row's scales last "
            "(or none of them, where a row has one)."
        )
    return _paged_view(tensor, kv_layout, name) if is_paged else ragged_view(tensor, kv_layout, name)


def in_bytes(view: View, size: int) -> View:
    """A view of elements of `size` bytes as one of bytes."""
    return View(*view[:3], *(number * size for number in view[3:]))


def latent_views(cache: Cache, shared: int) -> tuple[View, View]:
    """The `shared` columns of latent rows that K and V have in common, and the other columns of K: a tensor [pages,
    page, columns] of both, or a pair [pages, page, shared] and [pages, page, others]."""
    if not isinstance(cache, tuple):
        whole = _latent_view(cache, "kv_cache")
        tail = max(0, whole.head_dim - shared)
        return whole._replace(head_dim=whole.head_dim - tail), whole._replace(
            head_dim=tail, offset=shared if tail else 0
        )
    ckv, kpe = (_latent_view(part, name) for part, name in zip(cache, ("ckv_cache", "kpe_cache"), strict=True))
    if ckv[:2] != kpe[:2]:
        raise RunError(
            f"ckv_cache has shape {tuple(cache[0].shape)} and kpe_cache {tuple(cache[1].shape)}: "
            "they must have the same pages and page size."
        )
    return ckv, kpe


def _latent_view(tensor: torch.Tensor, name: str) -> View:
    if checks.tensor(tensor, name, RunError).dim() != 3:
        raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass [pages, page_size, columns].")
    if tensor.shape[2]:
        checks.dense_last(tensor, name, RunError)
    pages, page, columns = tensor.shape
    _check_page_size(tensor, page, name)
    return View(pages, page, 1, columns, _stride(tensor, 0), _stride(tensor, 1), 0)


def _paged_view(tensor: torch.Tensor, kv_layout: str, name: str) -> View:
    if not isinstance(tensor, torch.Tensor):
        checks.tensor(tensor, name, RunError)
    if tensor.dim() not in (3, 4):
        raise RunError(f"{name} has {tensor.dim()} dimensions: pass 4 (pages), or 3 (slots: pages of one token).")
    checks.dense_last(tensor, name, RunError)
    if tensor.dim() == 3:
        slots, heads, dim = tensor.shape
        return View(slots, 1, heads, dim, _stride(tensor, 0), 0, _stride(tensor, 1))
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    shape = tensor.shape
    _check_page_size(tensor, shape[token], name)
    strides = (_stride(tensor, 0), _stride(tensor, token), _stride(tensor, head))
    return View(shape[0], shape[token], shape[head], shape[3], *strides)


def _check_page_size(tensor: torch.Tensor, page_size: int, name: str) -> None:
    if page_size == 0:
        raise RunError(f"{name} has shape {tuple(tensor.shape)}, whose pages have no tokens: pass at least one.")


def ragged_view(tensor: torch.Tensor, kv_layout: str, name: str) -> View:
    """[tokens, heads, dim] (NHD) or [heads, tokens, dim] (HND)."""
    if not isinstance(tensor, torch.Tensor):
        checks.tensor(tensor, name, RunError)
    if tensor.dim() != 3:
        raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass three dimensions, tokens, heads and head_dim.")
    checks.dense_last(tensor, name, RunError)
    token, head = (0, 1) if kv_layout == "NHD" else (1, 0)
    shape = tensor.shape
    return View(shape[token], 1, shape[head], shape[2], 0, _stride(tensor, token), _stride(tensor, head))


def rows_strides(tensor: torch.Tensor, name: str) -> tuple[int, int]:
    """Strides of rows and heads in q or out, [rows, heads, dim]."""
    checks.dense_last(tensor, name, RunError)
    return _stride(tensor, 0), _stride(tensor, 1)


def _stride(tensor: torch.Tensor, dim: int) -> int:
    """The stride of a dimension, or 0 for a dimension of size 1, whose stride torch leaves arbitrary."""
    return tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def check_alignment(view_strides: tuple[int, ...], element_size: int, alignment: int, name: str) -> None:
    for stride in view_strides:
        if stride * element_size % alignment:
            raise RunError(
                f"{name} has a stride of {stride} elements ({stride * element_size} bytes). "
                f"This kernel needs rows that start on {alignment} bytes: pad them or pass {name}.contiguous()."
            )


def row_alignment(kernel_alignment: int, head_dim: int, element_size: int) -> int:
    """Alignment of rows in bytes: the kernel's, or 8 if the rows' length is no multiple of that."""
    return kernel_alignment if head_dim * element_size % kernel_alignment == 0 else min(8, kernel_alignment)
