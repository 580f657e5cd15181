"""FlashInfer's names that are refused by a reason, and records of its dimensions."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator

import pytest
import torch

from flashpage import CapabilityError, compat


@pytest.fixture
def flashinfer() -> Iterator[types.ModuleType]:
    yield compat.install()
    compat.uninstall()


REFUSED = {
    "decode": "BatchDecodeMlaWithPagedKVCacheWrapper cudnn_batch_decode_with_kv_cache xqa_batch_decode_with_kv_cache",
    "prefill": "cudnn_batch_prefill_with_kv_cache fmha_varlen trtllm_fmha_v2_prefill trtllm_ragged_attention_deepseek",
    "mla": "DSV4HCAMetadata SparseMLASm120Wrapper cake_mla_varq_dcp_decode nvfp4_sparse_mla_decode "
    "prepare_cake_mla_varq_dcp_decode trtllm_batch_decode_sparse_mla_dsv4 xqa_mla",
    "quantization": "nvfp4_kv_dequantize nvfp4_kv_quantize nvfp4_quantize",
    "utils": "FP4Tensor get_trtllm_gen_multi_ctas_kv_counter_bytes",
    "base.refused": "xqa xqa_mla",
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in REFUSED.items() for n in names.split()])
def test_refused(module: str, name: str) -> None:
    """Refused names raise with any arguments; the message says what to use instead."""
    found = getattr(importlib.import_module(f"flashpage.{module}"), name)
    assert found.__name__ == name and "Refused" in found.__doc__
    with pytest.raises(CapabilityError, match=rf"^{name} is not supported: .{{20,}}\.$"):
        found(torch.zeros(1), 3, backend="auto")


# Other names of flashinfer.mla in 0.7.2: its lazy exports, and those of its core.
OTHERS_OF_MLA = """
    CuteDslMlaDecodeRunner KimiK3MlaFp8PagedAttention SparseMLASm120CalibrationReport SparseMLASm120DecodeConfig
    TrtllmGenMlaDecodeRunner cake_dsv4_nvfp4_kv_rope_quantize_insert cake_dsv4_nvfp4_rope_insert_format_info
    cake_dsv4_nvfp4_rope_quantize_insert cake_dsv4_workspace_layout cake_dsv4_workspace_requirement
    cake_dsv4_workspace_reset cake_sparse_mla_sm120_dsv41_mixed_decode cake_sparse_mla_sm120_dsv41_mixed_format_info
    cake_sparse_mla_sm120_dsv41_mixed_num_chunks cake_sparse_mla_sm120_dsv41_mixed_plan_head_tiles
    cake_sparse_mla_sm120_dsv41_mixed_plan_splits cake_sparse_mla_sm120_dsv41_mixed_plan_variant
    cake_sparse_mla_sm120_dsv41_mixed_scratch_bytes cake_sparse_mla_sm120_dsv41_mixed_supported_heads
    cake_sparse_mla_sm120_dsv4_nvfp4_decode cake_sparse_mla_sm120_dsv4_nvfp4_format_info
    cake_sparse_mla_sm120_dsv4_nvfp4_num_chunks cake_sparse_mla_sm120_dsv4_nvfp4_plan_head_tiles
    cake_sparse_mla_sm120_dsv4_nvfp4_plan_prefill cake_sparse_mla_sm120_dsv4_nvfp4_plan_prefill_grid_head_blocks_first
    cake_sparse_mla_sm120_dsv4_nvfp4_plan_prefill_q_evict_first cake_sparse_mla_sm120_dsv4_nvfp4_plan_prefill_stages
    cake_sparse_mla_sm120_dsv4_nvfp4_plan_splits cake_sparse_mla_sm120_dsv4_nvfp4_prefill
    cake_sparse_mla_sm120_dsv4_nvfp4_prefill_head_tiles cake_sparse_mla_sm120_dsv4_nvfp4_scratch_bytes
    cake_sparse_mla_sm120_dsv4_nvfp4_select_kernel cake_sparse_mla_sm120_dsv4_nvfp4_supported_heads
    calibrate_sparse_mla_sm120 dsv41_fp4_quantize_append_sparse_mla_cache dsv41_fp4_quantize_pack_sparse_mla_cache
    dsv41_fp8_quantize_append_sparse_mla_cache dsv41_fp8_quantize_pack_sparse_mla_cache get_cake_dsv4_workspace_bytes
    get_prims_ts_batch_mla_decode_workspace_size get_trtllm_gen_fmha_module
    get_trtllm_gen_multi_ctas_kv_counter_bytes nvfp4_quantize_append_sparse_mla_cache
    nvfp4_quantize_pack_sparse_mla_cache resolve_cake_dsv4_sparse_metadata run_cake_kimi_k3_mla_fp8_paged_attention
    supported_sparse_mla_sm120_configs
"""


def test_other_names_of_mla(flashinfer: types.ModuleType) -> None:
    assert len(OTHERS_OF_MLA.split()) == 47
    for name in OTHERS_OF_MLA.split():
        with pytest.raises(CapabilityError, match=rf"^{name} is not supported: .{{20,}}\.$"):
            getattr(flashinfer.mla, name)(1, backend="auto")
    layer = flashinfer.mla.supported_mla_layer_dimensions[0]
    assert isinstance(layer, flashinfer.mla.MLALayerDimensions) and layer.num_heads == 128
    assert layer.head_dimensions == flashinfer.mla.deepseek_mla_dimensions
    assert flashinfer.mla.MLAHeadDimensions(64, 64, 128, 256) == flashinfer.mla.smaller_mla_dimensions
    for name in ("a_name_of_another_release", "refuse"):
        with pytest.raises(AttributeError, match=f"'flashpage.mla' has no attribute '{name}'"):
            getattr(flashinfer.mla, name)
