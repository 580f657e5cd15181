"""Other names of `flashinfer.mla`: its records of models' dimensions, for programs that import them, and names of other
kernels, which are refused by a reason."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..base import refused


@dataclasses.dataclass(frozen=True)
class MLAHeadDimensions:
    """A head: columns of expanded keys without and with rotation, of expanded values, and of latent rows."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclasses.dataclass(frozen=True)
class MLALayerDimensions:
    """A layer: its heads and their dimensions."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


deepseek_mla_dimensions = MLAHeadDimensions(128, 64, 128, 512)
smaller_mla_dimensions = MLAHeadDimensions(64, 64, 128, 256)
nope_mla_dimensions = MLAHeadDimensions(256, 0, 256, 512)
supported_mla_head_dimensions = [deepseek_mla_dimensions, smaller_mla_dimensions, nope_mla_dimensions]
supported_mla_layer_dimensions = [
    MLALayerDimensions(deepseek_mla_dimensions, 128),
    MLALayerDimensions(deepseek_mla_dimensions, 64),
    MLALayerDimensions(smaller_mla_dimensions, 32),
]

_RECORDS = {
    "MLAHeadDimensions": MLAHeadDimensions,
    "MLALayerDimensions": MLALayerDimensions,
    "deepseek_mla_dimensions": deepseek_mla_dimensions,
    "nope_mla_dimensions": nope_mla_dimensions,
    "smaller_mla_dimensions": smaller_mla_dimensions,
    "supported_mla_head_dimensions": supported_mla_head_dimensions,
    "supported_mla_layer_dimensions": supported_mla_layer_dimensions,
}


def __getattr__(name: str) -> Any:
    """A name that `flashpage.mla` does not list."""
    if name in refused.OF_MLA:
        return getattr(refused, name)
    if name in _RECORDS:
        return _RECORDS[name]
    raise AttributeError(f"module 'flashpage.mla' has no attribute {name!r}")
