"""Answers to vLLM's questions about what can be served, from the kernels' own rules."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionType

from ...plugin.refusal import latent_refusal as latent_refusal_of
from ...plugin.refusal import listed_refusal as listed_refusal_of
from ...plugin.refusal import refusal as refusal_of
from .. import cache_layout
from .cache import element_type

CACHE_TYPES = ("auto", "float16", "bfloat16", *cache_layout.FP8)
CPU_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LISTED_COLUMNS = 576  # of rows that are read by lists of tokens: 512, and 64 rotated ones
LISTED_COLUMNS_WITHOUT_ROTATION = 512
_STRIDE_ORDERS = {  # of [blocks, heads, page, 2 * head_dim], and with layers before
    "NHD": ((0, 2, 1, 3), (1, 0, 3, 2, 4)),
    "HND": ((0, 1, 2, 3), (1, 2, 0, 3, 4)),
}


class Answers:
    """The answers of backends over K and V and of those over latent rows, before the answers of vLLM's own classes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    has_latent_rows: ClassVar[bool] = False
    _name: ClassVar[str] = "CUSTOM"

    def __init_subclass__(cls, name: str = "", **given: Any) -> None:
        """`name`: of the class of vLLM in whose place this one stands."""
        super().__init_subclass__(**given)
        if name:
            cls._name = name

    @classmethod
    def get_name(cls) -> str:
        return cls._name

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(1)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """The reason why no kernel serves such layers; the kernels themselves give it."""
        vllms: Any = cls  # the questions of vLLM's class
        if use_mla != cls.has_latent_rows or not (vllms.supports_head_size(head_size) and vllms.supports_dtype(dtype)):
            return None  # vLLM has found a reason itself
        return cls.refusal(head_size, dtype, kv_cache_dtype or "auto", block_size, device_capability)

    @classmethod
    def refusal(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str, block_size: int | None, capability: Any
    ) -> str | None:
        """The reason why no kernel takes such layers; `block_size` None: vLLM has not chosen one yet."""
        raise NotImplementedError


class LatentLayer:
    """The first base of layers over latent rows, before vLLM's own class: what they refuse, and what vLLM asks them."""

    can_return_lse_for_decode = False
    supports_pcp = False  # prompts are not divided among ranks

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:
        given = (num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype)
        base: Any = super()
        base.__init__(*given, logits_soft_cap, attn_type, kv_sharing_target_layer_name, **latent)
        if alibi_slopes or sliding_window or logits_soft_cap or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                "flashpage has no ALiBi, windows, soft caps or encoders over latent rows. "
                "Choose another attention backend."
            )
        self.supports_quant_query_input = False


def context_ranks() -> int:
    """Ranks of decode context parallelism, of the configuration that vLLM chooses backends for."""
    config = get_current_vllm_config_or_none()
    return 1 if config is None else config.parallel_config.decode_context_parallel_size


def has_canvas() -> bool:
    """Whether that configuration is a diffusion model's."""
    return getattr(get_current_vllm_config_or_none(), "diffusion_config", None) is not None


def unserved_lists() -> list[str]:
    """What that configuration has and flashpage does not, for models whose indexer lists tokens."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return []
    reasons = []
    if context_ranks() > 1:
        reasons.append("flashpage: no decode context parallelism over lists of tokens")
    if getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        reasons.append("flashpage: no prefill context parallelism over lists of tokens")
    if getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None:
        reasons.append("flashpage: no cache in the host's memory (hisparse_config)")
    model = getattr(config.model_config, "hf_text_config", None)
    latent, rotated = getattr(model, "kv_lora_rank", 512), getattr(model, "qk_rope_head_dim", 64)
    if latent != 512 or rotated not in (0, 64):
        reasons.append(f"flashpage: lists read rows of 512 and 64 or no rotated columns, not of {latent} and {rotated}")
    return reasons


def stride_order(layout: str, has_layers: bool) -> tuple[int, ...]:
    """The order of a cache's dimensions in memory."""
    return _STRIDE_ORDERS[layout][has_layers]


def refusal(head_dim: int, dtype: torch.dtype, kv_cache_dtype: str, page_size: int, capability: Any) -> str | None:
    """The reason why no kernel of cards with this compute capability takes such layers; None: one does."""
    kv_dtype = element_type(kv_cache_dtype, dtype)
    if kv_dtype is None:
        return f"flashpage reads no KV cache of {kv_cache_dtype}"
    return refusal_of(head_dim, dtype, kv_dtype, page_size, _numbers(capability))


def latent_refusal(
    columns: int, dtype: torch.dtype, kv_cache_dtype: str, page_size: int, capability: Any
) -> str | None:
    """The reason why no kernel of such cards reads latent rows of so many columns; None: one does."""
    kv_dtype = element_type(kv_cache_dtype, dtype)
    if kv_dtype is None:
        return f"flashpage reads no KV cache of {kv_cache_dtype}"
    return latent_refusal_of(columns, dtype, kv_dtype, page_size, _numbers(capability))


def listed_refusal(
    columns: int, dtype: torch.dtype, kv_cache_dtype: str, page_size: int, row_format: str | None, capability: Any
) -> str | None:
    """As latent_refusal, over lists of tokens; `row_format`: of rows that hold their scales."""
    kv_dtype = element_type(kv_cache_dtype, dtype) if row_format is None else dtype
    if kv_dtype is None:
        return f"flashpage reads no KV cache of {kv_cache_dtype}"
    return listed_refusal_of(columns, dtype, kv_dtype, page_size, row_format, _numbers(capability))


def _numbers(capability: Any) -> tuple[int, int] | None:
    return None if capability is None else (capability.major, capability.minor)
