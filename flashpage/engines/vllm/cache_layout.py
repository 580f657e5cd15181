"""KV caches in the layout of vLLM's first operators: blocks of token slots, with K in pieces of 16 bytes, V by column.

K is [num_blocks, num_kv_heads, head_size / x, block_size, x] with x = 16 / bytes of an element, V [num_blocks,
num_kv_heads, head_size, block_size]; slot n is token n % block_size of block n // block_size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...base import checks
from ...base.errors import RunError
from ...wrappers import operators

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_ROW_TYPES = (torch.float16, torch.bfloat16, torch.float32)  # of keys and values that are converted to fp8


class BlockSizes(NamedTuple):
    """The sizes of a cache."""

    num_blocks: int
    num_kv_heads: int
    head_size: int
    block_size: int  # tokens


def block_sizes(key_cache: torch.Tensor, value_cache: torch.Tensor) -> BlockSizes:
    """Checks the shapes of both caches."""
    for name, tensor, dims in (("key_cache", key_cache, 5), ("value_cache", value_cache, 4)):
        if checks.tensor(tensor, name, RunError).dim() != dims:
            raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass {dims} dimensions, the blocks first.")
    blocks, heads, pieces, block_size, x = key_cache.shape
    if x * key_cache.element_size() != 16:
        raise RunError(
            f"key_cache has shape {tuple(key_cache.shape)} and dtype {key_cache.dtype}. "
            f"Its last dimension must be 16 bytes: x={16 // key_cache.element_size()}."
        )
    if value_cache.shape != (blocks, heads, pieces * x, block_size) or value_cache.dtype != key_cache.dtype:
        raise RunError(
            f"value_cache has shape {tuple(value_cache.shape)} and dtype {value_cache.dtype}. "
            f"Pass shape {(blocks, heads, pieces * x, block_size)} and dtype {key_cache.dtype}, as in key_cache."
        )
    return BlockSizes(blocks, heads, pieces * x, block_size)


def row_sizes(key_cache: torch.Tensor, value_cache: torch.Tensor) -> BlockSizes:
    """Checks caches of rows, [num_blocks, block_size, num_kv_heads, head_size]."""
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        if checks.tensor(tensor, name, RunError).dim() != 4:
            raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass [num_blocks, block_size, heads, head_size].")
    if value_cache.shape[:3] != key_cache.shape[:3] or value_cache.dtype != key_cache.dtype:
        raise RunError(
            f"value_cache has shape {tuple(value_cache.shape)} and dtype {value_cache.dtype}. "
            f"Pass the blocks, tokens and heads {tuple(key_cache.shape[:3])} and dtype {key_cache.dtype} of key_cache."
        )
    blocks, block_size, heads, head_size = key_cache.shape
    return BlockSizes(blocks, heads, head_size, block_size)


def by_token(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views: K [num_blocks, block_size, num_kv_heads, head_size / x, x], V [num_blocks, block_size, heads, size]."""
    return key_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2)


def element_type(cache: torch.Tensor, kv_cache_dtype: str, name: str = "key_cache") -> torch.dtype:
    """The element type of the cache's bytes; fp8 caches may be given as uint8."""
    if kv_cache_dtype == "auto":
        return cache.dtype
    if kv_cache_dtype not in FP8:
        raise RunError(f"kv_cache_dtype={kv_cache_dtype!r} is unknown: pass 'auto', {', '.join(map(repr, FP8))}.")
    if cache.dtype not in (torch.uint8, FP8[kv_cache_dtype]):
        raise RunError(
            f"kv_cache_dtype={kv_cache_dtype!r} but {name} is {cache.dtype}: pass uint8 or {FP8[kv_cache_dtype]}."
        )
    return FP8[kv_cache_dtype]


def check_pair(key: torch.Tensor, value: torch.Tensor) -> None:
    """Checks that one kernel can read both."""
    if checks.tensor(key, "key", RunError).dtype != checks.tensor(value, "value", RunError).dtype:
        raise RunError(f"value has dtype {value.dtype} but key has {key.dtype}: pass equal types.")


def check_rows(rows: torch.Tensor, cache: torch.Tensor, kv_cache_dtype: str, name: str) -> torch.dtype:
    """Checks keys or values, [tokens, num_kv_heads, head_size]; returns the element type of the cache."""
    dtype = element_type(cache, kv_cache_dtype, f"{name}_cache")
    if checks.tensor(rows, name, RunError).dim() != 3:
        raise RunError(f"{name} has shape {tuple(rows.shape)}: pass [tokens, num_kv_heads, head_size].")
    checks.dense_last(rows, name, RunError)
    checks.same_device(rows, cache.device, name, RunError)
    if kv_cache_dtype != "auto" and rows.dtype not in _ROW_TYPES:
        raise RunError(f"{name} has dtype {rows.dtype}: pass float16, bfloat16 or float32.")
    if kv_cache_dtype == "auto" and rows.dtype != dtype:
        raise RunError(
            f"{name} has dtype {rows.dtype} but {name}_cache has {dtype}: convert it, or pass kv_cache_dtype."
        )
    return dtype


def stored(
    rows: torch.Tensor, cache: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor, name: str
) -> torch.Tensor:
    """Keys or values in the cache's element type; fp8 saturates."""
    dtype = check_rows(rows, cache, kv_cache_dtype, name)
    if kv_cache_dtype == "auto":
        return rows
    most = torch.finfo(dtype).max
    return (
        (rows.float() / scale_on(rows.device, scale, name[0] + "_scale")).clamp(-most, most).to(dtype).view(cache.dtype)
    )


def scale_on(device: torch.device, scale: torch.Tensor, name: str) -> torch.Tensor:
    """The scale of an fp8 cache as one fp32 value on the device."""
    if (scale.__class__ is not torch.Tensor or scale.numel() != 1) and checks.tensor(
        scale, name, RunError
    ).numel() != 1:
        raise RunError(f"{name} has shape {tuple(scale.shape)}: pass one value for the whole cache.")
    if scale.dtype == torch.float32 and scale.device == device:
        return scale
    return scale.to(device, torch.float32)


def write_blocks(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """reshape_and_cache. Tokens with negative slots are not written; the host does not read the slots."""
    sizes = block_sizes(key_cache, value_cache)
    rows = (
        stored(key, key_cache, kv_cache_dtype, k_scale, "key"),
        stored(value, value_cache, kv_cache_dtype, v_scale, "value"),
    )
    check_pair(key, value)
    slots = checked_slots(slot_mapping, rows, sizes, sizes.head_size)
    if slots.numel() == 0:
        return
    keys, values = by_token(key_cache, value_cache)
    is_given = slots >= 0
    stand_in = is_given.int().argmax()  # each token without a slot repeats the write of this token
    token = torch.where(is_given, torch.arange(len(slots), device=slots.device), stand_in)
    slot = slots[token].clamp(min=0).long()
    where = (slot.div(sizes.block_size, rounding_mode="floor"), slot % sizes.block_size)
    has_any = is_given.any()
    for view, given in ((keys, rows[0]), (values, rows[1])):
        cells, new = as_bytes(view), as_bytes(given.reshape(len(given), *view.shape[2:]))
        cells[where] = torch.where(has_any, new[token], cells[where])


def write_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """reshape_and_cache_flash: caches of rows, [num_blocks, block_size, num_kv_heads, head_size]."""
    sizes = row_sizes(key_cache, value_cache)
    rows = (
        stored(key, key_cache, kv_cache_dtype, k_scale, "key"),
        stored(value, value_cache, kv_cache_dtype, v_scale, "value"),
    )
    check_pair(key, value)
    blocks = sizes.num_blocks
    slots = checked_slots(slot_mapping, rows, sizes, value_cache.shape[3])
    device, whole = slots.device, torch.int32
    request = torch.where(slots < 0, -1, 0).to(whole)  # the whole cache is one request
    ends = torch.tensor([0, blocks], dtype=whole, device="cpu").to(device)
    pages = torch.arange(blocks, dtype=whole, device=device)
    cache = [as_bytes(key_cache), as_bytes(value_cache)]
    new = [as_bytes(t[: len(slots)]) for t in rows]
    operators.call("append_paged_kv_cache", *new, request, slots.to(whole), pages, ends, cache, "NHD")


def checked_slots(
    slot_mapping: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], sizes: BlockSizes, value_size: int
) -> torch.Tensor:
    """The checked slot_mapping, [tokens]; key and value may be longer (padding)."""
    checks.tensor(slot_mapping, "slot_mapping", RunError)
    checks.same_device(slot_mapping, rows[0].device, "slot_mapping", RunError)
    heads, size = sizes.num_kv_heads, sizes.head_size
    if rows[0].shape[1:] != (heads, size) or rows[1].shape != (len(rows[0]), heads, value_size):
        raise RunError(
            f"key has shape {tuple(rows[0].shape)} and value {tuple(rows[1].shape)}: "
            f"key_cache and value_cache take [tokens, {heads}, {size}] and [tokens, {heads}, {value_size}]."
        )
    is_whole = slot_mapping.dtype in (torch.int32, torch.int64)
    if slot_mapping.dim() != 1 or len(slot_mapping) > len(rows[0]) or not is_whole:
        raise RunError(
            f"slot_mapping has shape {tuple(slot_mapping.shape)} and dtype {slot_mapping.dtype}. "
            f"Pass int32 or int64 with one slot a token, at most {len(rows[0])}."
        )
    most = sizes.num_blocks * sizes.block_size
    if slot_mapping.is_cpu and bool((slot_mapping >= most).any()):
        raise RunError(f"slot_mapping reaches {int(slot_mapping.max())}: the cache has slots 0 to {most - 1}.")
    return slot_mapping


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes, because torch cannot index fp8 tensors on every device."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
