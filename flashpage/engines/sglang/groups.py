"""Groups of a model's layers: layers of one group see the same tokens in the same pages, and share plans."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..plugin.layers import LayerOptions


class Tokens(enum.Enum):
    """The tokens that a layer sees, by their places in SGLang's table of slots."""

    ALL = "all tokens of a request"
    WINDOW = "the tokens of a window, which have slots in a pool of their own"
    RECENT = "those of a window, next to layers that see all, where a draft has branches"
    DECODER = "the decoder's, after the encoder's"
    ENCODER = "the encoder's"


class Group(NamedTuple):
    """The layers that share plans."""

    tokens: Tokens
    is_causal: bool
    ckv: int = 0  # columns of latent rows that are V too; 0: K and V are apart
    chunk: int = 0  # rows see only tokens of their own chunk of so many; 0: no chunks


def group_of(layer: Any, window_layers: set[int], has_encoder: bool, has_branches: bool = False) -> Group:
    """The group of a RadixAttention layer, but for its chunks. `window_layers`: numbers of the layers in the pool of
    windows."""
    if layer.is_cross_attention:
        return Group(Tokens.ENCODER, False)
    is_causal = layer.attn_type.value != "encoder_only"
    if layer.layer_id in window_layers:
        return Group(Tokens.WINDOW, is_causal)
    if has_branches and _has_window(layer):
        return Group(Tokens.RECENT, is_causal)
    return Group(Tokens.DECODER if has_encoder else Tokens.ALL, is_causal)


def chunk_of(layer: Any, config: Any) -> int:
    """Tokens of the chunks to which a RadixAttention layer's rows are restricted, in a model of this ModelConfig:
    Llama 4 has them in its layers with RoPE. 0: no chunks."""
    return (config.attention_chunk_size or 0) if getattr(layer, "use_irope", False) else 0


def options_of(layer: Any, chunk: int) -> LayerOptions:
    """The options of a RadixAttention layer, whose window does not count the row's own token. `chunk`: of chunk_of."""
    return LayerOptions(
        (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim),
        layer.scaling,
        window=layer.sliding_window_size + 1 if _has_window(layer) else None,
        chunk=chunk,
        soft_cap=layer.logit_cap,
    )


def _has_window(layer: Any) -> bool:
    return layer.sliding_window_size is not None and layer.sliding_window_size >= 0


def longest_window(layers: Sequence[LayerOptions]) -> int:
    """The most tokens that a row sees, itself included; 0: all of them."""
    windows = [layer.kind.chunk or layer.values[True].window_left + 1 for layer in layers]
    return max(windows) if all(windows) else 0
