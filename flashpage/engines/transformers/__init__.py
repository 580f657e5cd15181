"""The attention of transformers models: `register()` once, then `model.set_attn_implementation(flashpage.hf.NAME)`.

`PagedCache(model.config)` is the paged KV cache for `generate(past_key_values=...)`; without it attention reads keys
and values from transformers' own cache. `generate_batch` (continuous batching) uses transformers' pages.
"""

from __future__ import annotations

from .cache import PagedCache
from .registry import BATCHING_NAME, NAME, register

__all__ = ["BATCHING_NAME", "NAME", "PagedCache", "register"]
