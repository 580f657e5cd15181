"""Functions that engines import from `flashinfer.utils`: properties of the device, enums of options, arithmetic."""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch

from ..base import checks
from ..base.errors import RunError
from ..variants.variant import alibi_slopes


class PosEncodingMode(enum.Enum):
    """Values of `pos_encoding_mode`."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(enum.Enum):
    """The tokens that a row sees."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(enum.Enum):
    """Values of `kv_layout`."""

    NHD = 0
    HND = 1


def next_positive_power_of_2(x: int) -> int:
    """The smallest power of two that is at least x; 1 for x below 1."""
    return 1 if x < 1 else 1 << (x - 1).bit_length()


def last_positive_power_of_2(x: int) -> int:
    """The largest power of two that is at most x, which is at least 1."""
    return 1 << (checks.whole("x", x, 1).bit_length() - 1)


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """The smallest multiple of y that is at least x."""
    return -(-x // y) * y


def is_float8(x: torch.Tensor) -> bool:
    """Whether the elements are e4m3 or e5m2."""
    return checks.tensor(x, "x", RunError).dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def canonicalize_torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype, from a dtype or its name."""
    found = getattr(torch, dtype) if isinstance(dtype, str) and hasattr(torch, dtype) else dtype
    if not isinstance(found, torch.dtype):
        raise RunError(f"dtype={checks.shown(dtype)} is no torch dtype: pass one, or its name.")
    return found


def get_alibi_slopes(n_heads: int, device: torch.device | None = None) -> torch.Tensor:
    """ALiBi's slopes, [n_heads] fp32."""
    return alibi_slopes(checks.whole("n_heads", n_heads, 1)).to("cpu" if device is None else checks.device(device))


@functools.cache
def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """A CUDA device's compute capability as (major, minor), such as (9, 0)."""
    if torch.device(device).type != "cuda":
        raise RunError(f"device={device} is no CUDA device: pass one, as only those have a compute capability.")
    return torch.cuda.get_device_capability(device)


@functools.cache
def get_device_sm_count(device: torch.device) -> int:
    """SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_support_pdl(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch."""
    device = checks.device(device)
    return device.type == "cuda" and get_compute_capability(device)[0] >= 9


def is_sm90a_supported(device: torch.device) -> bool:
    """Whether the device runs Hopper's own instructions."""
    device = checks.device(device)
    return device.type == "cuda" and get_compute_capability(device)[0] == 9


def determine_attention_backend(device: torch.device, *_: Any, **__: Any) -> str:
    """Returns "fa2" for all options: backend names choose nothing here."""
    return "fa2"
