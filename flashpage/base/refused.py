"""FlashInfer's functions for other hardware and other kernels: their names are here, and a call says what to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from .errors import CapabilityError

_DECODE = "use BatchDecodeWithPagedKVCacheWrapper, whose plan takes block_tables and seq_lens"
_PREFILL = "use BatchPrefillWithPagedKVCacheWrapper, whose plan takes block_tables and seq_lens"
_RAGGED = "use BatchPrefillWithRaggedKVCacheWrapper, which takes head_dim_qk=192 and head_dim_vo=128 too"
_NVFP4 = "nvfp4 caches need Blackwell kernels: use a 16-bit or fp8 cache, append_paged_kv_cache and k_scale, v_scale"
_MLA = (
    "no kernel here takes MLA's 576/512 latent rows: expand K and V and use BatchPrefillWithRaggedKVCacheWrapper "
    "(head_dim_qk=192, head_dim_vo=128)"
)


def refuse(name: str, reason: str) -> NoReturn:
    raise CapabilityError(f"{name} is not supported: {reason}.")


def _function(name: str, reason: str) -> Callable[..., NoReturn]:
    def refused(*_: Any, **__: Any) -> NoReturn:
        refuse(name, reason)

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Refused: {reason}."
    return refused


class _RefusedClass:
    """Refused when it is made; engines may import its name and compare types with it."""

    _reason: str

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse(type(self).__name__, self._reason)


class BatchMLAPagedAttentionWrapper(_RefusedClass):
    """Refused: no kernel here takes MLA's latent rows."""

    _reason = _MLA


class BatchDecodeMlaWithPagedKVCacheWrapper(_RefusedClass):
    """Refused: no kernel here takes MLA's latent rows."""

    _reason = _MLA


class FP4Tensor(_RefusedClass):
    """Refused: nvfp4 outputs need Blackwell kernels."""

    _reason = _NVFP4


trtllm_batch_decode_with_kv_cache = _function("trtllm_batch_decode_with_kv_cache", _DECODE)
xqa_batch_decode_with_kv_cache = _function("xqa_batch_decode_with_kv_cache", _DECODE)
cudnn_batch_decode_with_kv_cache = _function("cudnn_batch_decode_with_kv_cache", _DECODE)
xqa = _function("xqa", _DECODE)
trtllm_batch_context_with_kv_cache = _function("trtllm_batch_context_with_kv_cache", _PREFILL)
cudnn_batch_prefill_with_kv_cache = _function("cudnn_batch_prefill_with_kv_cache", _PREFILL)
trtllm_fmha_v2_prefill = _function("trtllm_fmha_v2_prefill", _PREFILL)
trtllm_ragged_attention_deepseek = _function("trtllm_ragged_attention_deepseek", _RAGGED)
fmha_varlen = _function("fmha_varlen", _RAGGED)
trtllm_batch_decode_with_kv_cache_mla = _function("trtllm_batch_decode_with_kv_cache_mla", _MLA)
xqa_batch_decode_with_kv_cache_mla = _function("xqa_batch_decode_with_kv_cache_mla", _MLA)
xqa_mla = _function("xqa_mla", _MLA)
nvfp4_quantize_append_paged_kv_cache = _function("nvfp4_quantize_append_paged_kv_cache", _NVFP4)
nvfp4_quantize_append_paged_kv_cache_with_slot_mapping = _function(
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", _NVFP4
)
nvfp4_quantize = _function("nvfp4_quantize", _NVFP4)
nvfp4_kv_quantize = _function("nvfp4_kv_quantize", _NVFP4)
nvfp4_kv_dequantize = _function("nvfp4_kv_dequantize", _NVFP4)
