"""Attention for transformers: `flashpage.hf.register()`, then `model.set_attn_implementation(flashpage.hf.NAME)`."""

from .engines.transformers import BATCHING_NAME, NAME, PagedCache, register

__all__ = ["BATCHING_NAME", "NAME", "PagedCache", "register"]
