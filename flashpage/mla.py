"""`flashinfer.mla`: multi-head latent attention."""

from .base.refused import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from .wrappers.latent import BatchMLAPagedAttentionWrapper
from .wrappers.latent_batch import MLAPlanMetadata
from .wrappers.latent_sparse import BatchMLASparseAttentionWrapper

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "BatchMLASparseAttentionWrapper",
    "MLAPlanMetadata",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]
