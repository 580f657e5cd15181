"""`flashinfer.mla`: multi-head latent attention."""

from .base.refused import (
    BatchDecodeMlaWithPagedKVCacheWrapper,
    DSV4HCAMetadata,
    SparseMLASm120Wrapper,
    cake_mla_varq_dcp_decode,
    convert_compressed_page_aligned_sparse_indices_to_hca_metadata,
    nvfp4_sparse_mla_decode,
    prepare_cake_mla_varq_dcp_decode,
    prepare_nvfp4_batch_decode_with_kv_cache_mla,
    trtllm_batch_decode_sparse_mla_dsv4,
    xqa_mla,
)
from .wrappers.latent import BatchMLAPagedAttentionWrapper
from .wrappers.latent_batch import MLAPlanMetadata
from .wrappers.latent_functions import (
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_prefill_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from .wrappers.latent_names import __getattr__  # noqa: F401  # FlashInfer's other names, by which they are found
from .wrappers.latent_sparse import BatchMLASparseAttentionWrapper

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchMLASparseAttentionWrapper",
    "DSV4HCAMetadata",
    "MLAPlanMetadata",
    "SparseMLASm120Wrapper",
    "cake_mla_varq_dcp_decode",
    "convert_compressed_page_aligned_sparse_indices_to_hca_metadata",
    "nvfp4_sparse_mla_decode",
    "prepare_cake_mla_varq_dcp_decode",
    "prepare_nvfp4_batch_decode_with_kv_cache_mla",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_prefill_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]
