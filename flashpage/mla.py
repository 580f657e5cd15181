"""`flashinfer.mla`: multi-head latent attention."""

from __future__ import annotations

from typing import Any

from .base import refused
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
from .wrappers import latent_dimensions
from .wrappers.latent import BatchMLAPagedAttentionWrapper
from .wrappers.latent_batch import MLAPlanMetadata
from .wrappers.latent_functions import (
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_prefill_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
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


def __getattr__(name: str) -> Any:
    """FlashInfer's other names: records of dimensions, and names of other kernels, which are refused by a reason."""
    if name in refused.OF_MLA:
        return getattr(refused, name)
    if name in latent_dimensions.__all__:
        return getattr(latent_dimensions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
