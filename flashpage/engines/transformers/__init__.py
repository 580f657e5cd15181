"""The attention of transformers models: `register()` once, then `model.set_attn_implementation(flashpage.hf.NAME)`.

`PagedCache(model.config)` is the paged KV cache of `generate(past_key_values=...)`; without it keys and values lie in
transformers' own cache and are read from there. `generate_batch` (continuous batching) reads transformers' pages.
"""

from __future__ import annotations

from .cache import PagedCache
from .registry import BATCHING_NAME, NAME, register

__all__ = ["BATCHING_NAME", "NAME", "PagedCache", "register"]
