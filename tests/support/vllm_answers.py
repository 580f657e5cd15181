"""What the vLLM backend answers when vLLM asks it before a model is loaded. Runs in an environment with vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from flashpage.engines.vllm.plugin import register

HOPPER, AMPERE, TURING = DeviceCapability(9, 0), DeviceCapability(8, 0), DeviceCapability(7, 5)
USUAL: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": HOPPER,
    "attn_type": "decoder",
}
SERVED: list[dict[str, Any]] = [
    {},
    {"head_size": 80},
    {"head_size": 16},
    {"head_size": 512},
    {"block_size": 1},
    {"block_size": 100},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"has_sink": True},
    {"has_sliding_window": True, "has_sink": True, "kv_cache_dtype": "fp8_e4m3"},
    {"use_non_causal": True},
    {"use_batch_invariant": True},
    {"attn_type": "encoder_only"},
    {"attn_type": "encoder_decoder"},
    {"use_dcp": True},
    {"device_capability": AMPERE, "kv_cache_dtype": "fp8"},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"head_size": 100}, "head_size"),
    ({"head_size": 520}, "head_size"),
    ({"dtype": torch.float32}, "dtype"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
    ({"kv_cache_dtype": "float16"}, "flashpage: no kernel can honour this request"),
    ({"use_mla": True}, "MLA"),
    ({"use_sparse": True}, "sparse"),
    ({"use_mm_prefix": True}, "partial multimodal"),
    ({"use_per_head_quant_scales": True}, "per-head quant"),
    ({"device_capability": TURING}, "compute capability"),
]


def main() -> None:
    load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.is_overridden() and not AttentionBackendEnum.CPU_ATTN.is_overridden()
    register()  # twice is once
    backend = AttentionBackendEnum.CUSTOM.get_class()
    for changes in SERVED:
        assert backend.validate_configuration(**USUAL | changes) == [], changes
    for changes, reason in REFUSED:
        found = backend.validate_configuration(**USUAL | changes)
        assert any(reason in text for text in found), (changes, found)


if __name__ == "__main__":
    main()
