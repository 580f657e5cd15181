"""The backends that vLLM chooses by their names, and what they support, which vLLM reads before it loads a model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, AttentionType

from ...plugin.versions import warn_if_untested
from . import image_ranges, reference_windows, support

warn_if_untested("vllm", vllm.__version__)

_TYPES = (AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)


class FlashpageBackend(support.Answers, AttentionBackend):
    """flashpage under the name CUSTOM."""

    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(support.CACHE_TYPES)

    @staticmethod
    def get_impl_cls() -> type[Any]:
        from .impl import FlashpageImpl

        return FlashpageImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        from .builder import FlashpageBuilder

        return FlashpageBuilder

    # ---------------------------------------------------------------- the cache

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """vLLM 0.26 calls this and the next function; later versions have this one shape."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        return support.stride_order(get_kv_cache_layout(), include_num_layers_dimension)

    # ---------------------------------------------------------------- what is supported

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 16 <= head_size <= 512

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in _TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        """vLLM 0.33 asks this."""
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **given: Any) -> list[str]:
        reasons = super().validate_configuration(*args, **given)
        if support.context_ranks() > 1:
            if given.get("has_sliding_window"):
                reasons.append(
                    "flashpage: no sliding window with decode context parallelism, as a rank's tokens are not "
                    "consecutive"
                )
            if support.has_canvas():
                reasons.append("flashpage: no diffusion models with decode context parallelism")
        config = get_current_vllm_config_or_none()
        if given.get("use_mm_prefix") and config is not None:
            reasons += image_ranges.refusals(config, support.context_ranks(), bool(given.get("use_batch_invariant")))
        if config is not None:
            reasons += reference_windows.refusals(config, bool(given.get("use_batch_invariant")))
        return reasons

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def refusal(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str, block_size: int | None, capability: Any
    ) -> str | None:
        return support.refusal(head_size, dtype, kv_cache_dtype, block_size or 16, capability)


class InPlaceOfFlashAttn(FlashpageBackend, name="FLASH_ATTN"):
    pass


class InPlaceOfFlashInfer(FlashpageBackend, name="FLASHINFER"):
    pass


class InPlaceOfTritonFlashAttn(FlashpageBackend, name="TRITON_FLASH_ATTN"):
    pass


class InPlaceOfTritonFlashInfer(FlashpageBackend, name="TRITON_FLASHINFER"):
    pass


class InPlaceOfCpuAttn(FlashpageBackend, name="CPU_ATTN"):
    supported_dtypes = support.CPU_DTYPES
