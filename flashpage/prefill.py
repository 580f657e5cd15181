"""Prefill and append: many query rows a request, over a paged or a ragged KV cache."""

from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from .prefill_ragged import BatchPrefillWithRaggedKVCacheWrapper
from .single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
