"""flash-attn's functions for inference: `from flashpage.flash_attn import flash_attn_varlen_func`."""

from .engines.flash_attn.functions import flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]
