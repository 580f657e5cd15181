"""RoPE of new queries and keys in place, and the write of keys and values to their slots: one launch on a card."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, NamedTuple

import torch

from ... import jit, native
from ...base import checks
from ...base.dtypes import DType
from ...base.errors import RunError
from ...kernels import blocks, helpers
from ...plan.session import current_stream
from . import cache_layout, operators
from .write import Write

_ROWS_A_CTA = 8  # include/flashpage/kernels/blocks/rotate_write.h
_MOST_BOUND = 256  # number of forms whose structs are kept

_local = threading.local()  # bound calls of this thread; a struct serves one call at a time


class Rotation(NamedTuple):
    """The angles of new tokens.

    Attributes:
        positions: [rows] int64.
        cos_sin: [positions, rotary_dim], of the rows' type or fp32: the cosines of all pairs, then their sines.
        is_neox: pair i is (i, i + rotary_dim / 2), else (2 i, 2 i + 1).
    """

    positions: torch.Tensor
    cos_sin: torch.Tensor
    is_neox: bool


class Slots(NamedTuple):
    """Where keys and values go, as in reshape_and_cache_flash."""

    caches: tuple[torch.Tensor, torch.Tensor]
    mapping: torch.Tensor
    kv_cache_dtype: str
    scales: tuple[torch.Tensor, torch.Tensor]


def rotate_and_write(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation, slots: Slots
) -> None:
    """Rotates query and key, [rows, heads, head_size] each, in place, and writes keys and values to the cache."""
    _check(query, key, rotation)
    if not query.is_cuda:
        for rows in (query, key):
            _rotate(rows, rotation)
        operators.reshape_and_cache_flash(key, value, *slots.caches, slots.mapping, slots.kv_cache_dtype, *slots.scales)
        return
    tensors = query, key, value, *slots.caches, rotation.cos_sin
    form = rotation.is_neox, slots.kv_cache_dtype, *((t.shape[1:], t.stride(), t.dtype, t.device) for t in tensors)
    bound: dict[Any, _RotateWrite] = _local.__dict__.setdefault("rotate", {})
    call = bound.get(form)
    if call is None:
        if len(bound) >= _MOST_BOUND:
            bound.clear()
        call = bound[form] = _RotateWrite(query, key, value, rotation, slots)
    call.run(query, (key, value), rotation, slots)


def _check(query: torch.Tensor, key: torch.Tensor, rotation: Rotation) -> None:
    """Checks what the kernel would read or write elsewhere, except the positions, which only the card knows."""
    positions, table = rotation.positions, rotation.cos_sin
    checks.dense_last(query, "query", RunError)
    for name, tensor in (("query", query), ("positions", positions), ("cos_sin_cache", table)):
        checks.same_device(tensor, key.device, name, RunError)
    if query.dim() != 3 or query.dtype != key.dtype or query.shape[2] != key.shape[2] or len(query) != len(key):
        raise RunError(
            f"query has shape {tuple(query.shape)} and dtype {query.dtype}, key {tuple(key.shape)} and {key.dtype}. "
            "Pass rows of equal numbers, sizes and types."
        )
    if positions.shape != (len(query),) or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise RunError(
            f"positions has shape {tuple(positions.shape)} and dtype {positions.dtype}: pass [{len(query)}] int64."
        )
    is_table = table.dim() == 2 and table.stride(1) == 1 and table.dtype in (query.dtype, torch.float32)
    if not is_table or table.shape[1] % 2 or table.shape[1] > query.shape[2]:
        raise RunError(
            f"cos_sin_cache has shape {tuple(table.shape)} and dtype {table.dtype}. "
            f"Pass [positions, rotary_dim] of {query.dtype} or float32, rotary_dim even and at most {query.shape[2]}."
        )


def _rotate(rows: torch.Tensor, rotation: Rotation) -> None:
    cosines, sines = rotation.cos_sin[rotation.positions].float().unsqueeze(1).chunk(2, dim=2)
    rotated = rows[..., : rotation.cos_sin.shape[1]]
    x, y = rotated.float().chunk(2, dim=2) if rotation.is_neox else (rotated[..., i::2].float() for i in (0, 1))
    pair = x * cosines - y * sines, y * cosines + x * sines
    rotated.copy_(torch.cat(pair, dim=2) if rotation.is_neox else torch.stack(pair, dim=3).flatten(2))


def parameters(query: torch.Tensor, rotation: Rotation) -> native.RotateWriteParams:
    """Parameters that follow from shapes, strides and types."""
    table = rotation.cos_sin
    return native.RotateWriteParams(
        query_row_stride=query.stride(0),
        query_head_stride=query.stride(1),
        cos_sin_stride=table.stride(0),
        num_q_heads=query.shape[1],
        rotary_dim=table.shape[1],
        is_neox=rotation.is_neox,
        cos_sin_is_float=table.dtype == torch.float32,
    )


class _RotateWrite:
    """Kernel and parameters for tensors of one form."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation, slots: Slots
    ) -> None:
        self._write = Write("rows", key, value, *slots.caches, slots.kv_cache_dtype)
        stored = cache_layout.element_type(slots.caches[0], slots.kv_cache_dtype)
        self._spec = blocks.rotate_write_spec(DType.of(key.dtype), DType.of(stored))
        self._num_heads = query.shape[1] + 2 * key.shape[1]
        self._params = parameters(query, rotation)
        self._address = ctypes.addressof(self._params)

    @functools.cached_property
    def _kernel(self) -> Any:
        """Built at the first rotation of any token."""
        return jit.get_kernel(self._spec, self._write.device)

    def run(
        self, query: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], rotation: Rotation, slots: Slots
    ) -> None:
        count, write, params = len(query), self._write, self._params
        mapping = write.fill(rows, slots.caches, slots.mapping, slots.scales)
        if count == 0:
            return
        params.write, params.num_rows = write.params, count
        params.query, params.positions = query.data_ptr(), rotation.positions.data_ptr()
        params.cos_sin = rotation.cos_sin.data_ptr()
        grid = min(-(-count * self._num_heads // _ROWS_A_CTA), helpers.MOST_CTAS)
        launch, stream = native.load().fp_launch, current_stream(write.device.index)
        native.check(launch(self._kernel.handle, self._address, grid, stream, write.has_pdl))
        del mapping  # lives until the launch
