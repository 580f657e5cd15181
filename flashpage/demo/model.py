"""A small model of the Llama architecture in plain torch: RMSNorm, RoPE, grouped-query attention, SwiGLU.

The model takes attention as a callable, so the engine and the unpaged reference share every other line.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..serving.runner import Attend


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of the model."""

    vocabulary: int = 4096
    hidden: int = 512
    num_layers: int = 4
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def rope_dim(self) -> int:
        """Columns of a query and of a key that are rotated."""
        return self.head_dim

    @property
    def sm_scale(self) -> float:
        """Multiplies the scores."""
        return self.head_dim**-0.5


class Layer:
    """The weights of one layer; matrices are stored [in, out]."""

    def __init__(self, config: Config, make: Callable[..., Tensor]) -> None:
        c = config
        self.attention_norm = make(c.hidden)
        # Sharp scores and a large output, so that the next token depends on attention and not only on the last token.
        query, key = (make(c.hidden, heads * c.head_dim, gain=2.0) for heads in (c.num_q_heads, c.num_kv_heads))
        self.wqkv = torch.cat([query, key, make(c.hidden, c.num_kv_heads * c.head_dim)], 1)
        self.wo = make(c.num_q_heads * c.head_dim, c.hidden, gain=3.0)
        self.mlp_norm = make(c.hidden)
        self.gate_and_up = torch.cat([make(c.hidden, c.intermediate) for _ in range(2)], 1)
        self.down = make(c.intermediate, c.hidden)


class Llama:
    """Seeded random weights; the embedding is not tied to the output, so tokens do not simply repeat."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def make(*shape: int, gain: float = 1.0) -> Tensor:
            values = torch.randn(*shape, generator=generator)
            values = 1 + 0.1 * values if len(shape) == 1 else values * (gain * shape[0] ** -0.5)
            return values.to(device, dtype)

        self.config, self.device, self.dtype = config, device, dtype
        self.frequencies = rope_frequencies(config.rope_dim, config.rope_theta, device)
        self.embedding = make(config.vocabulary, config.hidden) * config.vocabulary**0.5
        self.layers = [self.make_layer(make) for _ in range(config.num_layers)]
        self.norm = make(config.hidden)
        self.output = make(config.hidden, config.vocabulary)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [rows, hidden] of tokens [rows], each at its position [rows] within its request."""
        c = self.config
        x = torch.nn.functional.embedding(tokens, self.embedding)
        turn = rope_angles(positions, self.frequencies)
        for index, layer in enumerate(self.layers):
            h = rms_norm(x, layer.attention_norm, c.norm_eps)
            x.addmm_(self.attention(layer, h, turn, functools.partial(attend, index)), layer.wo)
            gate, up = (rms_norm(x, layer.mlp_norm, c.norm_eps) @ layer.gate_and_up).chunk(2, -1)
            x.addmm_(torch.nn.functional.silu(gate).mul_(up), layer.down)
        return rms_norm(x, self.norm, c.norm_eps)

    def make_layer(self, make: Callable[..., Tensor]) -> Any:
        """The weights of a layer."""
        return Layer(self.config, make)

    def attention(
        self, layer: Any, h: Tensor, turn: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The output of one layer's attention before `wo`, [rows, columns]."""
        c = self.config
        heads, rotated = (h @ layer.wqkv).view(len(h), -1, c.head_dim), c.num_q_heads + c.num_kv_heads
        q_and_k, v = rotate(heads[:, :rotated], turn), heads[:, rotated:]
        q, k = q_and_k[:, : c.num_q_heads], q_and_k[:, c.num_q_heads :]
        return attend(q, k, v).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary], fp32."""
        return (hidden @ self.output).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def rope_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Radians a position [head_dim / 2] of the rotate-half pairs (i, i + head_dim / 2)."""
    return theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos [rows, 1, head_dim], of each pair twice, and sin [rows, 1, head_dim / 2], fp32."""
    angle = positions[:, None, None] * frequencies
    return angle.cos().repeat(1, 1, 2), angle.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x [rows, heads, head_dim], rotated by the angles of its rows."""
    cos, sin = turn
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (to_first, to_second) = x.chunk(2, -1), out.chunk(2, -1)
    by_first, by_second = (x * cos).chunk(2, -1)  # fp32, as are the angles; the sums are rounded as they are written
    torch.addcmul(by_first, second, sin, value=-1, out=to_first)
    torch.addcmul(by_second, first, sin, out=to_second)
    return out
