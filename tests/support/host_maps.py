"""Tensor maps of kernels that run on the host (tests/native/hopper/)."""

from __future__ import annotations

import ctypes

import torch


class Map(ctypes.Structure):
    """tests/native/hopper/flashpage/ptx/tensor_copy.h"""

    _fields_ = [
        *(("data", ctypes.c_void_p), ("element_bytes", ctypes.c_int64)),
        *((name, ctypes.c_int64 * 4) for name in ("sizes", "strides", "box")),
    ]


def map_of(cache: torch.Tensor, box: tuple[int, ...]) -> Map:
    """A tensor map of [pages, tokens, heads, columns]; q and out are [1, heads, rows, columns]."""
    pages, tokens, heads, columns = cache.shape
    size = cache.element_size()
    strides = (1, *(size * cache.stride(i) for i in (1, 2, 0)))
    return Map(cache.data_ptr(), size, (size * columns, tokens, heads, pages), strides, box)
