"""Continuous batching: attention over the pages of transformers' PagedAttentionCache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...base.errors import RunError
from ...base.memory import is_capturing
from ...plan.lengths import Lengths
from ...plan.page_indices import Pages
from . import decode, plans, prompts
from .call import Layer
from .ragged import joined_identity, joined_to_host, packed, padded_to


class _Slots(NamedTuple):
    """A layer's keys or values [slots, 1, num_kv_heads, head_dim]: pages of one token."""

    keys: torch.Tensor
    values: torch.Tensor


def attend(
    layer: Layer, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Stores the new tokens, and attends to all tokens of their requests; decode steps with block tables: decode.py;
    steps with prompts that may be captured: prompts.py.

    Args:
        index: layer number.
        query, key, value: [1, heads, tokens, dim], the new tokens of all requests.
        kwargs: cache; cu_seq_lens_q [requests + 1]; cu_seq_lens_k by layer type; read_index and write_index by group of
            layers: the slots of all tokens of the requests, and of the new tokens. From transformers 5.24 on models
            store new tokens themselves: `key` and `value` have all tokens of the requests, cu_seq_lens_k is of the
            layer's type, and there is no cache; `config` is then the configuration of the layer's module.

    Returns:
        [1, tokens, num_q_heads, head_dim]
    """
    if kwargs.get("block_table") is not None:
        return decode.attend(layer, index, query, key, value, kwargs)
    cache = kwargs.get("cache")
    stays_on_device = prompts.are_captured(kwargs, query.shape[2])
    if is_capturing(query.device) and not stays_on_device:
        raise RunError(
            "a step with prompts is being captured, which its manager was not made for: "
            "pass use_cuda_graph=True with the ContinuousBatchingConfig, after flashpage.hf.register()."
        )
    if cache is None:
        joined = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
        return _gathered(layer, layer.window_left, query, (key, value), joined, stays_on_device, kwargs["write_index"])
    is_newer = hasattr(cache, "layer_to_allocator")  # from transformers 5.18 on
    layer_type, group, slots = (_slots_of if is_newer else _slots_of_older)(cache, index)
    kv_ends = kwargs["cu_seq_lens_k"]
    ends = kwargs["cu_seq_lens_q"], kv_ends[layer_type] if isinstance(kv_ends, dict) else kv_ends
    read, write = kwargs["read_index"][group], kwargs["write_index"][group]
    if slots is None:
        # A window's slots are a ring: old tokens are gathered before new tokens overwrite them.
        if is_newer:
            key, value = cache.update(key_states=key, value_states=value, layer_idx=index, kwargs=dict(kwargs))
        else:
            rows = cache.update(
                key, value, layer_idx=index, read_index=kwargs["read_index"], write_index=kwargs["write_index"]
            )
            key, value = (t.transpose(0, 1).unsqueeze(0) for t in rows)
        return _gathered(layer, layer_type, query, (key, value), ends, stays_on_device, kwargs["write_index"])
    slots.keys.index_copy_(0, write, key[0].transpose(0, 1).unsqueeze(1))
    slots.values.index_copy_(0, write, value[0].transpose(0, 1).unsqueeze(1))
    # No request has earlier tokens, so there is nothing to read.
    indices = read if read.numel() else write
    if stays_on_device:
        return prompts.attend(layer, group, query, slots, ends, indices, kwargs["write_index"])
    return _paged(layer, query, slots, group, indices, ends)


def is_step(kwargs: dict[str, Any]) -> bool:
    """Whether an attention function's arguments are those of continuous batching."""
    return kwargs.get("write_index") is not None


def _gathered(
    layer: Layer,
    kind: Any,
    query: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor],
    ends: tuple[torch.Tensor, torch.Tensor],
    stays_on_device: bool,
    write: Any,
) -> torch.Tensor:
    """Attention over gathered keys and values. `kind`: of layers with equal lengths."""
    if not stays_on_device:
        return packed(layer, query, *pair, ends)
    rows = _Slots(*(t[0].transpose(0, 1).unsqueeze(1) for t in pair))
    return prompts.attend(layer, kind, query, rows, ends, None, write)


def _paged(
    layer: Layer,
    query: torch.Tensor,
    slots: _Slots,
    group: int,
    indices: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    kind = ("slots", layer.call, layer.window_left, group)  # each group of layers has slots of its own
    planned = plans.shared(query.device, kind, is_paged=True)
    identity = joined_identity(ends)
    if planned.is_for(layer, identity):
        rows = planned.batch
    else:
        q_indptr, kv_indptr = joined_to_host(*ends)
        last_page_len = (kv_indptr[1:] > kv_indptr[:-1]).int()
        planned.plan(layer, Lengths(q_indptr, kv_indptr, last_page_len), Pages(indices), page_size=1)
        rows = planned.planned_for(layer, identity, int(q_indptr[-1]))
    q = query[0].transpose(0, 1)[:rows].contiguous()
    out = planned.run(layer, q, (slots.keys, slots.values))
    return padded_to(out, query.shape[2])


def _slots_of(cache: Any, index: int) -> tuple[str, int, _Slots | None]:
    """The layer's type, its group of layers, and the slots of all tokens in that group."""
    allocator = cache.layer_to_allocator[index]
    if allocator.layer_type != "full_attention":
        return allocator.layer_type, allocator.index, None
    keys, values = (t.flatten(0, 1).unsqueeze(1) for t in allocator.get_cache_for_block_table(index))
    return allocator.layer_type, allocator.index, _Slots(keys, values)


def _slots_of_older(cache: Any, index: int) -> tuple[str, int, _Slots | None]:
    group, place = cache.layer_index_to_group_indices[index]
    if cache.sliding_windows[index] != 1:
        return "sliding_attention", group, None
    return "full_attention", group, _Slots(cache.key_cache[place].unsqueeze(1), cache.value_cache[place].unsqueeze(1))
