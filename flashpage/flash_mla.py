"""FlashMLA's functions for inference: `from flashpage.flash_mla import flash_mla_with_kvcache, get_mla_metadata`."""

from .engines.flash_mla import fused_norm_rope_attn_rope_cast as fused_norm_rope_attn_rope_cast
from .engines.flash_mla.functions import flash_mla_with_kvcache
from .engines.flash_mla.metadata import FlashMLASchedMeta, get_mla_decoding_metadata, get_mla_metadata
from .engines.flash_mla.prefill import flash_attn_varlen_func, flash_mla_sparse_fwd, has_legacy

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]
