"""reshape_and_cache and reshape_and_cache_flash on a card: one launch, which also converts to fp8. Structs are built
once for each form (shapes, strides and types) of the tensors."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch

from ... import jit, native
from ...base.dtypes import DType
from ...base.errors import RunError
from ...kernels import blocks, devices, helpers
from ...plan.session import current_stream
from . import cache_layout

_TOKENS_A_CTA = 16  # of one head: include/flashpage/kernels/blocks/write.h
_MOST_BOUND = 256  # number of forms whose structs are kept

_local = threading.local()  # bound calls of this thread; a struct serves one call at a time


def write(
    layout: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Writes new tokens to their slots in caches of "blocks" or of "rows" (flashpage/engines/vllm/cache_layout.py)."""
    rows = key.device, key.dtype, value.dtype, key.shape[1:], value.shape[1:], key.stride(), value.stride()
    caches = key_cache.shape, key_cache.stride(), key_cache.dtype, value_cache.shape, value_cache.stride()
    places = value.device, key_cache.device, value_cache.device
    form = layout, kv_cache_dtype, rows, caches, value_cache.dtype, places
    bound: dict[Any, Write] = _local.__dict__.setdefault("write", {})
    call = bound.get(form)
    if call is None:
        if len(bound) >= _MOST_BOUND:
            bound.clear()
        call = bound[form] = Write(layout, key, value, key_cache, value_cache, kv_cache_dtype)
    call.run((key, value), (key_cache, value_cache), slot_mapping, (k_scale, v_scale))


class Write:
    """Kernel and parameters for tensors of one form."""

    def __init__(
        self,
        layout: str,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        kv_cache_dtype: str,
    ) -> None:
        is_blocks = layout == "blocks"
        self.sizes = sizes = (cache_layout.block_sizes if is_blocks else cache_layout.row_sizes)(key_cache, value_cache)
        dtype = cache_layout.check_rows(key, key_cache, kv_cache_dtype, "key")
        cache_layout.check_rows(value, value_cache, kv_cache_dtype, "value")
        cache_layout.check_pair(key, value)
        self.value_size = sizes.head_size if is_blocks else value_cache.shape[3]
        if is_blocks:
            _check_places(key_cache, value_cache, sizes.block_size)
        else:
            for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
                if cache.stride(3) != 1:
                    raise RunError(f"{name} has strides {cache.stride()}: its last dimension must be contiguous.")
        self.device = device = key.device
        self.has_scales = kv_cache_dtype != "auto"
        types = (DType.of(key.dtype), DType.of(dtype)) if self.has_scales else (helpers.COPIED[dtype.itemsize],) * 2
        self._spec = blocks.write_spec(*types, layout)
        self.has_pdl = int(devices.of(device).has_pdl)
        self.params = native.BlockWriteParams(
            key_row_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_row_stride=value.stride(0),
            value_head_stride=value.stride(1),
            k_block_stride=key_cache.stride(0),
            k_slot_stride=16 // key_cache.element_size() if is_blocks else key_cache.stride(1),
            k_head_stride=key_cache.stride(1 if is_blocks else 2),
            v_block_stride=value_cache.stride(0),
            v_slot_stride=1 if is_blocks else value_cache.stride(1),
            v_head_stride=value_cache.stride(1 if is_blocks else 2),
            num_kv_heads=sizes.num_kv_heads,
            key_dim=sizes.head_size,
            value_dim=self.value_size,
            block_size=native.make_fast_div(sizes.block_size),
        )
        self._address = ctypes.addressof(self.params)

    @functools.cached_property
    def _kernel(self) -> Any:
        """Built at the first write of any token."""
        return jit.get_kernel(self._spec, self.device)

    def run(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        slot_mapping: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        slots = self.fill(rows, caches, slot_mapping, scales)
        count = len(slots)
        if count == 0:
            return
        grid = min(-(-count // _TOKENS_A_CTA) * self.sizes.num_kv_heads, helpers.MOST_CTAS)
        launch, stream = native.load().fp_launch, current_stream(self.device.index)
        native.check(launch(self._kernel.handle, self._address, grid, stream, self.has_pdl))

    def fill(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        slot_mapping: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Sets the parameters to these tensors; returns the slots, which must live until the launch."""
        params = self.params
        slots = cache_layout.checked_slots(slot_mapping, rows, self.sizes, self.value_size).contiguous()
        if self.has_scales:
            k_scale, v_scale = map(cache_layout.scale_on, (self.device,) * 2, scales, ("k_scale", "v_scale"))
            params.k_scale, params.v_scale = k_scale.data_ptr(), v_scale.data_ptr()
        params.key, params.value = rows[0].data_ptr(), rows[1].data_ptr()
        params.k, params.v = caches[0].data_ptr(), caches[1].data_ptr()
        params.slots, params.slots_are_int64 = slots.data_ptr(), slots.dtype == torch.int64
        params.num_tokens = len(slots)
        return slots


def _check_places(key_cache: torch.Tensor, value_cache: torch.Tensor, block_size: int) -> None:
    """Checks that a head's part of a block is contiguous."""
    x = key_cache.shape[4]
    if key_cache.stride()[2:] != (block_size * x, x, 1) or value_cache.stride()[2:] != (block_size, 1):
        raise RunError(
            f"key_cache has strides {key_cache.stride()} and value_cache has {value_cache.stride()}. "
            "On a card a head's part of a block must be contiguous."
        )
