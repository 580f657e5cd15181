"""FlashInfer's functions for other hardware and other kernels: the names exist, and a call says what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import CapabilityError

_DECODE = "use BatchDecodeWithPagedKVCacheWrapper, whose plan takes block_tables and seq_lens"
_PREFILL = "use BatchPrefillWithPagedKVCacheWrapper, whose plan takes block_tables and seq_lens"
_RAGGED = "use BatchPrefillWithRaggedKVCacheWrapper, which takes head_dim_qk=192 and head_dim_vo=128 too"
_NVFP4 = "nvfp4 caches are written by nvfp4_quantize_append_paged_kv_cache and read with kv_cache_sf"
_MLA = "use BatchMLAPagedAttentionWrapper, whose plan takes block tables and lengths by MLAPlanMetadata.dense"
_SPARSE_MLA = "use BatchMLASparseAttentionWrapper, which takes lists of tokens"
_BLACKWELL_MLA = f"it belongs to Blackwell kernels: {_MLA}"

REASONS = {
    "BatchDecodeMlaWithPagedKVCacheWrapper": _MLA,
    "DSV4HCAMetadata": _SPARSE_MLA,
    "FP4Tensor": _NVFP4,
    "SparseMLASm120Wrapper": _SPARSE_MLA,
    "cake_mla_varq_dcp_decode": _BLACKWELL_MLA,
    "convert_compressed_page_aligned_sparse_indices_to_hca_metadata": _SPARSE_MLA,
    "cudnn_batch_decode_with_kv_cache": _DECODE,
    "cudnn_batch_prefill_with_kv_cache": _PREFILL,
    "fmha_varlen": _RAGGED,
    "get_trtllm_gen_multi_ctas_kv_counter_bytes": "it belongs to the trtllm-gen kernels: no buffer is needed",
    "nvfp4_kv_dequantize": _NVFP4,
    "nvfp4_kv_quantize": _NVFP4,
    "nvfp4_quantize": _NVFP4,
    "nvfp4_sparse_mla_decode": _NVFP4,
    "prepare_cake_mla_varq_dcp_decode": _BLACKWELL_MLA,
    "prepare_nvfp4_batch_decode_with_kv_cache_mla": _NVFP4,
    "trtllm_batch_decode_sparse_mla_dsv4": _SPARSE_MLA,
    "trtllm_fmha_v2_prefill": _PREFILL,
    "trtllm_ragged_attention_deepseek": _RAGGED,
    "xqa": _DECODE,
    "xqa_batch_decode_with_kv_cache": _DECODE,
    "xqa_mla": _MLA,
}

_SM120_MLA = f"it belongs to kernels of SM120 cards: {_SPARSE_MLA}"
_BY_REASON = {
    _BLACKWELL_MLA: """
        CuteDslMlaDecodeRunner KimiK3MlaFp8PagedAttention TrtllmGenMlaDecodeRunner cake_dsv4_workspace_layout
        cake_dsv4_workspace_requirement cake_dsv4_workspace_reset get_cake_dsv4_workspace_bytes
        get_prims_ts_batch_mla_decode_workspace_size get_trtllm_gen_fmha_module resolve_cake_dsv4_sparse_metadata
        run_cake_kimi_k3_mla_fp8_paged_attention
    """,
    _NVFP4: """
        cake_dsv4_nvfp4_kv_rope_quantize_insert cake_dsv4_nvfp4_rope_insert_format_info
        cake_dsv4_nvfp4_rope_quantize_insert nvfp4_quantize_append_sparse_mla_cache
        nvfp4_quantize_pack_sparse_mla_cache
    """,
    _SM120_MLA: """
        SparseMLASm120CalibrationReport SparseMLASm120DecodeConfig calibrate_sparse_mla_sm120
        cake_sparse_mla_sm120_dsv41_mixed_decode cake_sparse_mla_sm120_dsv41_mixed_format_info
        cake_sparse_mla_sm120_dsv41_mixed_num_chunks cake_sparse_mla_sm120_dsv41_mixed_plan_head_tiles
        cake_sparse_mla_sm120_dsv41_mixed_plan_splits cake_sparse_mla_sm120_dsv41_mixed_plan_variant
        cake_sparse_mla_sm120_dsv41_mixed_scratch_bytes cake_sparse_mla_sm120_dsv41_mixed_supported_heads
        cake_sparse_mla_sm120_dsv4_nvfp4_decode cake_sparse_mla_sm120_dsv4_nvfp4_format_info
        cake_sparse_mla_sm120_dsv4_nvfp4_num_chunks cake_sparse_mla_sm120_dsv4_nvfp4_plan_head_tiles
        cake_sparse_mla_sm120_dsv4_nvfp4_plan_prefill
        cake_sparse_mla_sm120_dsv4_nvfp4_plan_prefill_grid_head_blocks_first
        cake_sparse_mla_sm120_dsv4_nvfp4_plan_prefill_q_evict_first
        cake_sparse_mla_sm120_dsv4_nvfp4_plan_prefill_stages cake_sparse_mla_sm120_dsv4_nvfp4_plan_splits
        cake_sparse_mla_sm120_dsv4_nvfp4_prefill cake_sparse_mla_sm120_dsv4_nvfp4_prefill_head_tiles
        cake_sparse_mla_sm120_dsv4_nvfp4_scratch_bytes cake_sparse_mla_sm120_dsv4_nvfp4_select_kernel
        cake_sparse_mla_sm120_dsv4_nvfp4_supported_heads dsv41_fp4_quantize_append_sparse_mla_cache
        dsv41_fp4_quantize_pack_sparse_mla_cache dsv41_fp8_quantize_append_sparse_mla_cache
        dsv41_fp8_quantize_pack_sparse_mla_cache supported_sparse_mla_sm120_configs
    """,
}
# Names of `flashinfer.mla` alone, which engines rarely use.
OF_MLA = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
OF_MLA["get_trtllm_gen_multi_ctas_kv_counter_bytes"] = REASONS["get_trtllm_gen_multi_ctas_kv_counter_bytes"]
_ALL_REASONS = REASONS | OF_MLA


def refuse(name: str, reason: str) -> NoReturn:
    raise CapabilityError(f"{name} is not supported: {reason}.")


def _refuse_instance(self: Any, *_: Any, **__: Any) -> None:
    refuse(type(self).__name__, _ALL_REASONS[type(self).__name__])


def __getattr__(name: str) -> Any:
    """A function, or a class if FlashInfer has one: engines import its name and compare types with it."""
    if name not in _ALL_REASONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    doc = f"Refused: {_ALL_REASONS[name]}."
    if name[0].isupper():
        made: Any = type(name, (), {"__init__": _refuse_instance, "__doc__": doc, "__module__": __name__})
    else:

        def made(*_: Any, **__: Any) -> NoReturn:
            refuse(name, _ALL_REASONS[name])

        made.__name__, made.__qualname__, made.__doc__ = name, name, doc
    globals()[name] = made
    return made
