"""Boxes, which the copy engine loads in one copy, and the tensor maps that describe them (csrc/flashpage.h)."""

from __future__ import annotations

import math

from .. import native
from ..base.errors import RunError
from ..base.kv_view import View
from .options import Options

LARGEST_BOX = 32  # tokens: a box may bring tokens beyond the unit, which warps must clear
# Bytes of a row in a box, and of a line in shared memory: the width that SWIZZLE_128B or SWIZZLE_64B permutes.
LINE_BYTES, NARROW_LINE_BYTES = 128, 64
_STRIDE_BYTES = 16  # strides are multiples of it
_LARGEST_STRIDE = 1 << 40  # bytes


def box_tokens(page_size: int, tile_kv: int) -> int:
    """Tokens of a box: the largest power of two that divides a page (0: ragged) and a tile."""
    common = math.gcd(page_size, tile_kv)
    return common & -common


def are_whole(page_size: int, *row_bytes: int) -> bool:
    """Whether boxes start on the swizzle's 8 rows (page_size 0: ragged) and have whole pieces of 16 bytes."""
    return page_size % 8 == 0 and all(size % 16 == 0 for size in row_bytes)


def boxes_or_rows(options: Options) -> str:
    """KernelSpec.loader: boxes by tensor maps, or single rows if pages are small, rows are not whole, or a list names
    tokens."""
    if options.is_selected:
        return "rows"
    return "boxes" if are_whole(options.page_size, *options.row_bytes) else "rows"


def loader_tokens(loader: str, page_size: int, tile_kv: int, *row_bytes: int) -> int:
    """Tokens of a box if the kernel's loader uses boxes for such a cache, otherwise 0."""
    if loader in ("boxes", "transposed", "columns"):
        return min(box_tokens(page_size, tile_kv), LARGEST_BOX)
    if loader == "converted" and are_whole(page_size, *row_bytes):
        return box_tokens(page_size, -(-tile_kv // 32) * 8)  # rows of one warp: tile/load/converted_tiles.h
    return 0


def box_form(view: View, name: str, *, element_bytes: int, tokens: int, is_paged: bool, line: int) -> native.BoxForm:
    """The form of K or V in boxes of `tokens` and of `line` bytes of a row; a ragged view is one page. Raises RunError
    if no map can have its strides."""
    columns = max(view.head_dim, _STRIDE_BYTES // element_bytes)  # a cache without columns has a map too
    row_bytes = columns * element_bytes
    counts = (view.page_size, view.num_heads, view.num_pages) if is_paged else (view.num_pages, view.num_heads, 1)
    strides = []
    for what, count, stride in zip(
        ("token", "head", "page"), counts, (view.token_stride, view.head_stride, view.page_stride), strict=True
    ):
        # A dimension of size 1 has no stride of its own, but the map must have one.
        stride_bytes = stride * element_bytes if count > 1 else row_bytes
        if stride_bytes % _STRIDE_BYTES or stride_bytes >= _LARGEST_STRIDE:
            raise RunError(
                f"{name} has {stride_bytes} bytes from {what} to {what}: this kernel needs a multiple of "
                f"{_STRIDE_BYTES} below 2^40; pad the allocation or pass {name}.contiguous()."
            )
        strides.append(stride_bytes)
    return native.BoxForm(
        element_bytes,
        (line // element_bytes, tokens, 1, 1),
        (columns, *(max(1, count) for count in counts)),  # so does an empty cache
        tuple(strides),
    )


def rows_form(
    heads: int,
    dim: int,
    *,
    element_bytes: int,
    group_size: int,
    unit_rows: int,
    strides: tuple[int, int],
    may_divide: bool = False,
) -> native.BoxForm | None:
    """A unit's rows of q or out, [rows, heads, dim], as one box for each KV head and 128 bytes; None if no map can have
    it.

    If a unit has whole rows of the group, its packed rows have the same order in a box as in a tile; so they do if
    units divide the group evenly (`may_divide`). `strides`: elements between rows and heads. Each run sets its number
    of rows by `resize_rows`.
    """
    row_stride, head_stride = (stride * element_bytes for stride in strides)
    if heads == 1:
        head_stride = dim * element_bytes  # a dimension of size 1, but the map must have a stride
    fits = all(0 < s < _LARGEST_STRIDE and s % _STRIDE_BYTES == 0 for s in (row_stride, head_stride))
    if may_divide and group_size % unit_rows == 0:
        group_size = unit_rows
    if unit_rows % group_size or not fits:
        return None
    return native.BoxForm(
        element_bytes,
        (LINE_BYTES // element_bytes, group_size, unit_rows // group_size, 1),
        (dim, heads, 1, 1),
        (head_stride, row_stride, row_stride),
    )


def resize_rows(boxes: native.KvBoxes, rows: int) -> None:
    """Writes how many rows this run's q and out have, which may change between runs of one binding."""
    boxes.q.dims[2] = boxes.out.dims[2] = max(1, rows)


def resize_cache(form: native.BoxForm, leading: int, is_paged: bool, kv_layout: str) -> None:
    """Writes the first dimension of this run's K or V, likewise."""
    form.dims[3 if is_paged else 1 if kv_layout == "NHD" else 2] = max(1, leading)
