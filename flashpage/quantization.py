"""`flashinfer.quantization`: bits of masks packed into bytes."""

from .base.refused import nvfp4_kv_dequantize, nvfp4_kv_quantize, nvfp4_quantize
from .plan.mask_bits import packbits, segment_packbits

__all__ = ["nvfp4_kv_dequantize", "nvfp4_kv_quantize", "nvfp4_quantize", "packbits", "segment_packbits"]
