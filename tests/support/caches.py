"""KV memory in every form that callers pass, with NaN in each byte that holds no token and pages in shuffled order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Buffers = tuple[torch.Tensor, ...]
GAP = 16  # elements between rows of the gapped forms; a multiple of 16 bytes for every element type


@dataclasses.dataclass(frozen=True)
class Shape:
    pages: int  # ragged: 0
    tokens: int  # in a page; ragged: of all requests
    heads: int
    dim_k: int
    dim_v: int


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to lay out K and V.

    `sizes` are the buffers' shapes, `views` the two tensors over them, `argument` the value for a wrapper.
    """

    sizes: Callable[[Shape, str], tuple[tuple[int, ...], ...]]
    views: Callable[[Buffers, Shape, str], tuple[torch.Tensor, torch.Tensor]]
    argument: Callable[[Buffers, tuple[torch.Tensor, torch.Tensor]], Any] = lambda buffers, views: views


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills with ones bits: NaN in every element type, and -1 as an integer."""
    tensor.view(torch.uint8).fill_(255)
    return tensor


def _box(shape: Shape, layout: str, dim: int, extra_tokens: int = 0) -> tuple[int, ...]:
    tokens = shape.tokens + extra_tokens
    inner = (tokens, shape.heads) if layout == "NHD" else (shape.heads, tokens)
    return (shape.pages, *inner, dim)


def _other(layout: str) -> str:
    return "HND" if layout == "NHD" else "NHD"


def _two_boxes(shape: Shape, layout: str) -> tuple[tuple[int, ...], ...]:
    return _box(shape, layout, shape.dim_k), _box(shape, layout, shape.dim_v)


def _as_is(buffers: Buffers, shape: Shape, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    return buffers[0], buffers[1]


def _halves(buffers: Buffers, shape: Shape, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    return buffers[0][..., : shape.dim_k], buffers[0][..., shape.dim_k :]


def _fused_sizes(shape: Shape, layout: str) -> tuple[tuple[int, ...], ...]:
    box = _box(shape, layout, shape.dim_k)
    return ((box[0], 2, *box[1:]),)


def _gapped_sizes(shape: Shape, layout: str) -> tuple[tuple[int, ...], ...]:
    return _box(shape, layout, shape.dim_k + GAP, 2), _box(shape, layout, shape.dim_v + 2 * GAP, 1)


def _gapped(buffers: Buffers, shape: Shape, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = 1 if layout == "NHD" else 2
    k, v = (buffer.narrow(tokens, 0, shape.tokens) for buffer in buffers)
    return k[..., : shape.dim_k], v[..., GAP : GAP + shape.dim_v]


def _odd(dimension: int) -> Callable[[Buffers, Shape, str], tuple[torch.Tensor, torch.Tensor]]:
    """Gives a dimension of size 1 a stride of 7 elements, on which no address depends."""

    def views(buffers: Buffers, shape: Shape, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        assert buffers[0].shape[dimension] == 1
        strides = [tuple(7 if i == dimension else s for i, s in enumerate(b.stride())) for b in buffers]
        k, v = (torch.as_strided(b, b.shape, s) for b, s in zip(buffers, strides, strict=True))
        return k, v

    return views


def _without_tokens(buffers: Buffers, views: tuple[torch.Tensor, torch.Tensor]) -> Any:
    return tuple(view.squeeze(1 if view.shape[1] == 1 else 2) for view in views)


FORMS: dict[str, Form] = {
    "tuple": Form(_two_boxes, _as_is),
    "indexed": Form(_two_boxes, _as_is),
    "fused": Form(_fused_sizes, lambda b, s, layout: (b[0][:, 0], b[0][:, 1]), lambda b, views: b[0]),
    "interleaved": Form(lambda s, layout: (_box(s, layout, s.dim_k + s.dim_v),), _halves),
    "permuted": Form(
        lambda s, layout: _two_boxes(s, _other(layout)),
        lambda b, s, layout: (b[0].transpose(1, 2), b[1].transpose(1, 2)),
    ),
    "gapped": Form(_gapped_sizes, _gapped),
    "narrow": Form(  # rows of bytes that start on 8 bytes
        lambda s, layout: tuple(_box(s, layout, dim + 8) for dim in (s.dim_k, s.dim_v)),
        lambda b, s, layout: (b[0][..., : s.dim_k], b[1][..., : s.dim_v]),
    ),
    "odd_rows": Form(  # rows that begin on any element, on the CPU
        lambda s, layout: (_box(s, layout, s.dim_k + 3), _box(s, layout, s.dim_v + 5)),
        lambda b, s, layout: (b[0][..., : s.dim_k], b[1][..., : s.dim_v]),
    ),
    "odd_page": Form(_two_boxes, _odd(1)),
    "odd_head": Form(_two_boxes, _odd(2)),
    "tuple_3d": Form(_two_boxes, _as_is, _without_tokens),
    "fused_4d": Form(
        _fused_sizes,
        lambda b, s, layout: (b[0][:, 0], b[0][:, 1]),
        lambda b, views: b[0].squeeze(2 if b[0].shape[2] == 1 else 3),
    ),
}


@dataclasses.dataclass(frozen=True)
class Cache:
    """Buffers on the CPU with their form; `argument(device)` is a copy there, in the same form."""

    form: Form
    shape: Shape
    layout: str
    buffers: Buffers

    @staticmethod
    def make(form: str, shape: Shape, layout: str, dtype: torch.dtype) -> Cache:
        sizes = FORMS[form].sizes(shape, layout)
        return Cache(FORMS[form], shape, layout, tuple(poison(torch.empty(size, dtype=dtype)) for size in sizes))

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable K and V as [page, token, head, dim]."""
        views = self.form.views(self.buffers, self.shape, self.layout)
        k, v = (view if self.layout == "NHD" else view.transpose(1, 2) for view in views)
        return k, v

    def argument(self, device: str) -> Any:
        buffers = tuple(buffer.to(device) for buffer in self.buffers)
        return self.form.argument(buffers, self.form.views(buffers, self.shape, self.layout))


def write_pages(
    cache: Cache, lengths: tuple[int, ...], keys: list[torch.Tensor], values: list[torch.Tensor], seed: int
):
    """Writes each request's rows to its own pages in shuffled order; returns (indptr, indices, last_page_len)."""
    size = cache.shape.tokens
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(cache.shape.pages, generator=torch.Generator().manual_seed(seed))
    indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    k, v = cache.rows()
    for request, length in enumerate(lengths):
        pages = order[indptr[request] : indptr[request + 1]]
        token = torch.arange(length)
        where = (pages[token // size], token % size) if length else (token, token)
        k[where], v[where] = keys[request], values[request]
    last_page_len = [length - (count - 1) * size if count else 0 for length, count in zip(lengths, counts, strict=True)]
    return indptr, order[: sum(counts)].to(torch.int32), torch.tensor(last_page_len, dtype=torch.int32)
