"""`flashinfer.prefill`: many query rows a request, over a paged or a ragged KV cache."""

from .base.refused import (
    cudnn_batch_prefill_with_kv_cache,
    fmha_varlen,
    trtllm_fmha_v2_prefill,
    trtllm_ragged_attention_deepseek,
)
from .wrappers.latent_functions import trtllm_prefill_with_kv_cache_mla
from .wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from .wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from .wrappers.single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from .wrappers.table_functions import trtllm_batch_context_with_kv_cache
from .wrappers.variant_functions import single_prefill_with_kv_cache_with_jit_module

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
    "trtllm_prefill_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
]
