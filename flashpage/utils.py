"""`flashinfer.utils`: questions about the device, enums of options, arithmetic."""

from .base.refused import FP4Tensor, get_trtllm_gen_multi_ctas_kv_counter_bytes
from .wrappers.utils import (
    MaskMode,
    PosEncodingMode,
    TensorLayout,
    canonicalize_torch_dtype,
    ceil_div,
    determine_attention_backend,
    device_support_pdl,
    get_alibi_slopes,
    get_compute_capability,
    get_device_sm_count,
    is_float8,
    is_sm90a_supported,
    last_positive_power_of_2,
    next_positive_power_of_2,
    round_up,
)

__all__ = [
    "FP4Tensor",
    "MaskMode",
    "PosEncodingMode",
    "TensorLayout",
    "canonicalize_torch_dtype",
    "ceil_div",
    "determine_attention_backend",
    "device_support_pdl",
    "get_alibi_slopes",
    "get_compute_capability",
    "get_device_sm_count",
    "get_trtllm_gen_multi_ctas_kv_counter_bytes",
    "is_float8",
    "is_sm90a_supported",
    "last_positive_power_of_2",
    "next_positive_power_of_2",
    "round_up",
]
