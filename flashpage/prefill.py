"""Prefill and append: many query rows a request, over a paged or a ragged KV cache."""

from .jit_module import single_prefill_with_kv_cache_with_jit_module
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from .prefill_ragged import BatchPrefillWithRaggedKVCacheWrapper
from .refused import (
    cudnn_batch_prefill_with_kv_cache,
    fmha_varlen,
    trtllm_batch_context_with_kv_cache,
    trtllm_fmha_v2_prefill,
    trtllm_ragged_attention_deepseek,
)
from .single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "fmha_varlen",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]
