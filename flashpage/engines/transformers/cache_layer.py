"""One layer's pages in a PagedCache."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ...base.errors import RunError
from ...wrappers.append import append_paged_kv_cache
from .call import Layer
from .masks import bits
from .step import Step

_TAG = "_flashpage_layer"  # attribute of the keys that a layer's update returns; the attention function gets them

UNREACHED = (
    "keys of a PagedCache did not reach flashpage's attention. "
    "Call flashpage.hf.register() and model.set_attn_implementation(flashpage.hf.NAME)."
)


def layer_of(key: torch.Tensor) -> Any:
    """The PagedCache layer that these keys come from, or what latents.py made of its rows; otherwise None."""
    return getattr(key, _TAG, None)


def tagged(key: torch.Tensor, source: Any) -> torch.Tensor:
    """A new tensor object that carries where the keys come from."""
    key = key.view(key.shape)
    setattr(key, _TAG, source)
    return key


class PagedLayer(CacheLayerMixin):
    """One layer's pages, keys [num_pages, page_size, num_kv_heads, head_dim] and values."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.cache = cache  # the PagedCache
        self.length = 0  # tokens in a row, padding included
        self.is_pending = False  # update returned tokens that no attention has stored yet

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        page_size = self.cache.table.page_size
        self.keys, self.values = (
            torch.empty(0, page_size, t.shape[1], t.shape[3], dtype=t.dtype, device=t.device)
            for t in (key_states, value_states)
        )
        self.is_initialized = True

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes [batch, heads, tokens, dim], and returns the new tokens, which the attention function stores."""
        self.cache.require_batch(key_states.shape[0])
        if self.is_pending:
            raise RunError(UNREACHED)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.length += key_states.shape[2]
        self.is_pending = True
        return tagged(key_states, self), value_states

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Stores the new tokens and attends to all; returns [batch, q_length, num_q_heads, head_dim_vo]."""
        step = self.store(layer, key, value)
        mask = bits(layer.mask, query.shape[0], query.shape[2], self.length)
        return step.run(layer, query, (self.keys, self.values), mask)

    def store(self, layer: Layer, key: torch.Tensor, value: torch.Tensor) -> Step:
        """Writes the new tokens, for which the forward's first layer finds places."""
        try:
            step: Step = self.cache.begin(self.length, key.shape[0], layer.mask, key.device)
        except BaseException:
            self.shorten(self.length - key.shape[2])  # the new tokens have no places
            raise
        self.is_pending = False
        self._fit(self.cache.table.num_pages)
        for source, target in step.copies:
            for memory in self._memory():
                memory[target] = memory[source]
        if step.rows.places is None or step.rows.places.numel():
            self._append(step, step.rows.pack(key), step.rows.pack(value))
        return step

    def _append(self, step: Step, key: torch.Tensor, value: torch.Tensor) -> None:
        append_paged_kv_cache(key, value, *step.places, (self.keys, self.values), *step.page_lists)

    def _memory(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values

    def _take(self, *memory: torch.Tensor) -> None:
        self.keys, self.values = memory

    def _fit(self, num_pages: int) -> None:
        """Grows the layer's memory to the number of pages in the table."""
        old = self._memory()
        count = old[0].shape[0]
        if count < num_pages:
            grown = [t.new_empty(num_pages, *t.shape[1:]) for t in old]
            for new, t in zip(grown, old, strict=True):
                new[:count] = t
            self._take(*grown)

    def shorten(self, length: int) -> None:
        """Forgets all but the first `length` columns, after the cache's pages did."""
        self.length, self.is_pending = length, False

    def select(self, requests: torch.Tensor) -> None:
        """Makes row i a copy of row requests[i] in memory of this layer that is not in pages: none."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1
