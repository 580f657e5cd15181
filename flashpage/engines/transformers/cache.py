"""The paged KV cache of a transformers model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ...base.errors import RunError
from ...wrappers.append import append_paged_kv_cache
from .call import Layer
from .history import History
from .masks import bits
from .pages import PageTable
from .step import Step

_TAG = "_flashpage_layer"  # attribute of the keys that a layer's update returns; the attention function gets them


def layer_of(key: torch.Tensor) -> PagedLayer | None:
    """The PagedCache layer that these keys come from, or None."""
    return getattr(key, _TAG, None)


class PagedCache(Cache):
    """Keys and values in pages: `model.generate(..., past_key_values=PagedCache(model.config))`.

    Padding is not stored. The first layer of a forward plans the batch for all layers.

    Args:
        config: the model's configuration.
        page_size: tokens in a page.
        num_pages: pages of each layer, allocated once; None: grows with the tokens, by doubling.
    """

    def __init__(self, config: Any, page_size: int = 16, num_pages: int | None = None) -> None:
        if config.is_encoder_decoder:
            raise RunError(f"{config.model_type} has layers that attend to an encoder: pass no past_key_values.")
        config = config.get_text_config(decoder=True)
        if getattr(config, "kv_lora_rank", None) is not None:
            raise RunError(
                f"{config.model_type} caches latents, which its layers expand. "
                "Pass no past_key_values: attention then reads the expanded keys and values."
            )
        others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if others:
            raise RunError(f"{config.model_type} has layers of {', '.join(sorted(others))}: pass no past_key_values.")
        self.table = PageTable(page_size, num_pages)
        self.history = History()
        self.step: Step | None = None
        super().__init__(layers=[PagedLayer(self) for _ in range(config.num_hidden_layers)])

    def begin(self, length: int, batch: int, mask: torch.Tensor | None) -> Step:
        """The step after which each row of the cache has `length` tokens, padding included."""
        if self.step is None or self.step.length != length:
            if self.table.batch != batch:
                if self.history.length:
                    raise RunError(f"the batch is {batch} but the cache holds {self.table.batch} requests: reset() it.")
                self.table.start(batch)
            self.step = Step(self.table, self.history, self.layers[0].keys.device, length, mask)
        return self.step

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last n tokens of every row, given -n. A positive number (older releases) is the length kept."""
        length, end = self.history.length, int(tokens_to_remove)  # some releases pass a tensor
        count = min(length, -end if end <= 0 else max(0, length - end))
        if count:
            self.table.shorten(self.history.crop(count, self.table.batch))
            self._set_length()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i a copy of row beam_idx[i]; rows with the same origin share its pages."""
        requests = beam_idx.cpu()
        if self.history.length:
            self.table.select(requests)
            self.history.select(requests)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times; the copies are neighbours."""
        self.reorder_cache(torch.arange(self.table.batch, device="cpu").repeat_interleave(repeats))

    def reset(self) -> None:
        """Forgets all tokens and keeps the memory."""
        self.table.reset()
        self.history = History()
        self._set_length()

    def _set_length(self) -> None:
        self.step = None
        for layer in self.layers:
            layer.length, layer.is_pending = self.history.length, False

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first one."""
        return self.table.batch if self.history.length else -1


class PagedLayer(CacheLayerMixin):
    """One layer's pages, keys [num_pages, page_size, num_kv_heads, head_dim] and values."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: PagedCache) -> None:
        super().__init__()
        self.cache = cache
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
        if self.is_pending:
            raise RunError(
                "keys of a PagedCache did not reach flashpage's attention. "
                "Call flashpage.hf.register() and model.set_attn_implementation(flashpage.hf.NAME)."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.length += key_states.shape[2]
        self.is_pending = True
        key_states = key_states.view(key_states.shape)  # a new tensor object that carries the tag
        setattr(key_states, _TAG, self)
        return key_states, value_states

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Stores the new tokens and attends to all; returns [batch, q_length, num_q_heads, head_dim_vo]."""
        batch, q_length = query.shape[0], query.shape[2]
        step = self.cache.begin(self.length, batch, layer.mask)
        self.is_pending = False
        self._fit(self.cache.table.num_pages)
        for source, target in step.copies:
            self.keys[target], self.values[target] = self.keys[source], self.values[source]
        if step.rows.places is None or step.rows.places.numel():
            pages = (self.keys, self.values)
            append_paged_kv_cache(step.rows.pack(key), step.rows.pack(value), *step.places, pages, *step.page_lists)
        mask = bits(layer.mask, batch, q_length, self.length)
        return step.run(layer, query, (self.keys, self.values), mask)

    def _fit(self, num_pages: int) -> None:
        """Grows the layer's memory to the number of pages in the table."""
        old = self.keys.shape[0]
        if old < num_pages:
            grown = [t.new_empty(num_pages, *t.shape[1:]) for t in (self.keys, self.values)]
            for new, t in zip(grown, (self.keys, self.values), strict=True):
                new[:old] = t
            self.keys, self.values = grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1
