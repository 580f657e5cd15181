"""Dense caches of e4m3 with one scale for the tensor, as FlashMLA reads them without lists."""

from __future__ import annotations

from typing import Any

import torch

from ...base import checks
from ...base.errors import CapabilityError, RunError
from ...run.checks import NO_SCALES, Scales

_E4M3 = torch.float8_e4m3fn


def with_scales(
    q: torch.Tensor, cache: torch.Tensor, is_fp8: bool, descale_q: Any, descale_k: Any
) -> tuple[torch.Tensor, Scales]:
    """The queries in 16 bits, and the scales of a run over this cache, which has rows of elements."""
    if is_fp8 != (cache.dtype == _E4M3):
        raise RunError(
            f"is_fp8_kvcache={is_fp8} but k_cache has dtype {cache.dtype}: pass None, as k_cache says it, or rows of "
            "float8_e4m3fn with True and rows of q's type with False."
        )
    if not is_fp8:
        for name, value in (("descale_q", descale_q), ("descale_k", descale_k)):
            if value is not None:
                raise CapabilityError(
                    f"{name}={checks.shown(value)} is not supported for rows of {cache.dtype}: pass None, or a k_cache "
                    "of float8_e4m3fn."
                )
        return q, NO_SCALES
    scale = _scale("descale_k", descale_k, q.device)
    if q.dtype == _E4M3:
        # The scale is on the device. Times a power of two elements are exact; otherwise they are rounded to bf16.
        return (q.float() * _scale("descale_q", descale_q, q.device)).bfloat16(), (None, scale, scale)
    if descale_q is not None:
        raise RunError(
            f"descale_q={checks.shown(descale_q)} but q has dtype {q.dtype}: pass None, as only queries in "
            "e4m3 have a scale."
        )
    return q, (None, scale, scale)


def _scale(name: str, value: Any, device: torch.device) -> Any:
    """A number, or a tensor of one float32 on the device."""
    if value is None:
        raise RunError(
            f"{name}=None: pass what elements of float8_e4m3fn are multiplied by, a float32 tensor of one entry on the "
            "device of q."
        )
    if not isinstance(value, torch.Tensor):
        return checks.real(name, value, positive=True, error=RunError)
    checks.same_device(checks.tensor(value, name, RunError), device, name, RunError)
    if value.numel() != 1 or value.dtype != torch.float32:
        raise RunError(
            f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}: pass float32 of (1,), one scale for the "
            "tensor."
        )
    return value.reshape(1)
