"""`flashinfer.decode`: one or a few query rows a request, over a paged KV cache."""

from .base.refused import (
    BatchDecodeMlaWithPagedKVCacheWrapper,
    cudnn_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from .wrappers.latent_functions import trtllm_batch_decode_with_kv_cache_mla
from .wrappers.paged_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from .wrappers.single import single_decode_with_kv_cache
from .wrappers.table_functions import (
    _grouped_size_compiled_for_decode_kernels as _grouped_size_compiled_for_decode_kernels,
)
from .wrappers.table_functions import trtllm_batch_decode_with_kv_cache
from .wrappers.variant_functions import single_decode_with_kv_cache_with_jit_module

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
]
