"""Rows that list the tokens that they see (DeepSeek V3.2, GLM-5), over the latent rows of a PagedCache.

Lists have columns of the padded batch. They become places in the pages, without columns that a row does not see.
"""

from __future__ import annotations

import torch

from ...base.errors import RunError
from ...plan.lengths import Lengths
from . import plans
from .call import Layer
from .masks import check_lists, visible_of
from .step import Step


def run(step: Step, layer: Layer, query: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Attention of each row to its list, [batch, q_length, heads, kv_lora_rank]; layers share the first one's plan.

    Args:
        layer: an absorbed one that is listed; its mask is that of the padding, or a 4-D one.
        query: [batch, heads, q_length, kv_lora_rank + qk_rope_head_dim].
        rows: the layer's pages.
        indices: [batch, q_length, topk], different columns of the padded batch.
    """
    if layer.mask is None and step.is_padded:
        raise RunError("attention_mask=None but the cache was filled without its padding: pass a mask [batch, tokens].")
    step.refuse_mixed(layer)
    topk, q_length = indices.shape[2], query.shape[2]
    planned = plans.shared(step.device, ("lists", layer.call), is_paged=True, is_listed=True)
    identity = (step, topk)
    if planned.is_for(layer, identity):
        lens = planned.batch
    else:
        lens = _lengths(step, layer, topk)
        starts = torch.arange(lens.numel() + 1, device="cpu") * topk
        planned.plan(layer, Lengths(None, starts, None, lens), page_size=step.page_size)
        planned.planned_for(layer, identity, lens)
    found = step.lists
    if found is None or found[0] is not indices:  # layers without an indexer get another layer's lists
        check_lists(indices, q_length, step.length)
        slots = _slots(step, layer, indices)
        if bool((lens < topk).any()):
            slots = slots.sort(-1, descending=True).values  # -1, which is no token, behind the planned length
        step.lists = found = indices, slots
    out = planned.run_lists(layer, step.rows.pack(query).contiguous(), rows, found[1])
    return step.rows.unpack(out, q_length)


def _lengths(step: Step, layer: Layer, topk: int) -> torch.Tensor:
    """Entries of each row's list that may be tokens, on the host; those of a 4-D mask are unknown."""
    if layer.call.has_mask or not layer.call.is_causal:
        return torch.full_like(step.positions, topk, dtype=torch.int32)
    return (step.positions + 1).clamp(max=topk).int()


def _slots(step: Step, layer: Layer, indices: torch.Tensor) -> torch.Tensor:
    """The lists of the rows that are tokens, [tokens, topk] int32: page * page_size + token of the page; -1: none."""
    batch, q_length, topk = indices.shape
    columns, places = indices.reshape(batch * q_length, topk).long(), step.rows.places
    if places is not None:
        columns = columns.index_select(0, places)
    requests, own = (t.long().unsqueeze(1) for t in step.places)
    if layer.call.has_mask:
        assert layer.mask is not None
        seen = visible_of(layer.mask, batch, q_length, step.length)
        positions, is_seen = columns, seen.reshape(batch * q_length, step.length).gather(1, columns)
    else:
        positions = columns if layer.mask is None else _positions(layer.mask).take(requests * step.length + columns)
        is_seen = positions >= 0
        if layer.call.is_causal:
            is_seen &= positions <= own
    pages, first, _ = step.page_lists
    page = first[requests] + torch.div(positions, step.page_size, rounding_mode="floor")
    # Columns that are not seen may be beyond the request's pages.
    slots = pages[page.clamp(0, max(0, len(pages) - 1))] * step.page_size + positions % step.page_size
    return torch.where(is_seen, slots, -1).int()


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """The position of each column's token among its request's, [batch, tokens]; -1: padding."""
    is_token = mask.bool()
    return torch.where(is_token, is_token.cumsum(1) - 1, -1)
