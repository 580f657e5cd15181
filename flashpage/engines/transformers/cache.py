"""The paged KV cache of a transformers model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache

from ...base.errors import RunError
from . import indexer, latents
from .cache_layer import PagedLayer
from .history import History
from .pages import PageTable
from .step import Step


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
        others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        is_indexed = others == {indexer.LAYER_TYPE} and config.model_type in indexer.MODELS
        if others and not is_indexed:
            raise RunError(f"{config.model_type} has layers of {', '.join(sorted(others))}: pass no past_key_values.")
        self.table = PageTable(page_size, num_pages)
        self.history = History()
        self.step: Step | None = None
        make: Callable[[Any], PagedLayer] = PagedLayer
        if getattr(config, "kv_lora_rank", None) is not None:
            latents.prepare(config)
            make = latents.LatentLayer
            if is_indexed:
                make = functools.partial(indexer.IndexedLayer, topk=config.index_topk)
        super().__init__(layers=[make(self) for _ in range(config.num_hidden_layers)])

    def require_batch(self, batch: int) -> None:
        """Refuses a batch of another size than that of the tokens in the cache."""
        if self.history.length and self.table.batch != batch:
            raise RunError(f"the batch is {batch} but the cache holds {self.table.batch} requests: reset() it.")

    def begin(self, length: int, batch: int, mask: torch.Tensor | None, device: torch.device) -> Step:
        """The step after which each row of the cache has `length` tokens, padding included. `device`: the layer's."""
        first = self.layers[0].keys.device
        if device != first:
            raise RunError(
                f"layers of a PagedCache are on several devices ({first} and {device}): "
                "load the model on one device, or pass no past_key_values."
            )
        if self.step is None or self.step.length != length:
            if self.table.batch != batch:
                self.table.start(batch)
            self.step = Step(self.table, self.history, device, length, mask)
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
            for layer in self.layers:
                layer.select(requests)

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
            layer.shorten(self.history.length)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first one."""
        return self.table.batch if self.history.length else -1
