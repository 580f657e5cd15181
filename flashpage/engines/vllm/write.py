"""reshape_and_cache and reshape_and_cache_flash on a card: one launch, which also converts to fp8."""

from __future__ import annotations

import ctypes

import torch

from ... import jit, native
from ...base.dtypes import DType
from ...base.errors import RunError
from ...kernels import blocks, devices, helpers
from ...plan.session import current_stream
from . import cache_layout
from .decode import scale_on

_TOKENS_A_CTA = 16  # of one head: include/flashpage/kernels/blocks/write.h


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
    is_blocks = layout == "blocks"
    sizes = (cache_layout.block_sizes if is_blocks else cache_layout.row_sizes)(key_cache, value_cache)
    dtype = cache_layout.check_rows(key, key_cache, kv_cache_dtype, "key")
    cache_layout.check_rows(value, value_cache, kv_cache_dtype, "value")
    value_size = sizes.head_size if is_blocks else value_cache.shape[3]
    slots = cache_layout.checked_slots(slot_mapping, (key, value), sizes, value_size).contiguous()
    if is_blocks:
        _check_places(key_cache, value_cache, sizes.block_size)
    else:
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            if cache.stride(3) != 1:
                raise RunError(f"{name} has strides {cache.stride()}: its last dimension must be contiguous.")
    if len(slots) == 0:
        return
    device = key.device
    copied = kv_cache_dtype == "auto"
    source, stored = (helpers.COPIED[dtype.itemsize],) * 2 if copied else (DType.of(key.dtype), DType.of(dtype))
    scales = [] if copied else [scale_on(device, scale) for scale in (k_scale, v_scale)]
    params = native.BlockWriteParams(
        key=key.data_ptr(),
        value=value.data_ptr(),
        key_row_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value_row_stride=value.stride(0),
        value_head_stride=value.stride(1),
        k=key_cache.data_ptr(),
        v=value_cache.data_ptr(),
        k_block_stride=key_cache.stride(0),
        k_slot_stride=16 // key_cache.element_size() if is_blocks else key_cache.stride(1),
        k_head_stride=key_cache.stride(1 if is_blocks else 2),
        v_block_stride=value_cache.stride(0),
        v_slot_stride=1 if is_blocks else value_cache.stride(1),
        v_head_stride=value_cache.stride(1 if is_blocks else 2),
        slots=slots.data_ptr(),
        k_scale=scales[0].data_ptr() if scales else None,
        v_scale=scales[1].data_ptr() if scales else None,
        slots_are_int64=slots.dtype == torch.int64,
        num_tokens=len(slots),
        num_kv_heads=sizes.num_kv_heads,
        key_dim=sizes.head_size,
        value_dim=value_size,
        block_size=native.make_fast_div(sizes.block_size),
    )
    kernel = jit.get_kernel(blocks.write_spec(source, stored, layout), device)
    grid = min(-(-len(slots) // _TOKENS_A_CTA) * sizes.num_kv_heads, helpers.MOST_CTAS)
    stream = current_stream(device.index)
    pdl = int(devices.of(device).has_pdl)
    native.check(native.load().fp_launch(kernel.handle, ctypes.addressof(params), grid, stream, pdl))


def _check_places(key_cache: torch.Tensor, value_cache: torch.Tensor, block_size: int) -> None:
    """Checks that a head's part of a block is contiguous."""
    x = key_cache.shape[4]
    if key_cache.stride()[2:] != (block_size * x, x, 1) or value_cache.stride()[2:] != (block_size, 1):
        raise RunError(
            f"key_cache has strides {key_cache.stride()} and value_cache has {value_cache.stride()}. "
            "On a card a head's part of a block must be contiguous."
        )
