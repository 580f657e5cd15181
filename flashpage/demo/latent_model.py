"""The demo's model with latent attention (MLA, as in DeepSeek-V3): a token's K and V are one row for all heads, whose
first columns are normalised and the others rotated.

Queries are multiplied by the matrix that expands rows to keys, outputs by the one that expands them to values, so
attention reads the rows as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .model import Config, Llama, rms_norm, rotate


@dataclasses.dataclass(frozen=True)
class LatentConfig(Config):
    """The shape of the model; `head_dim` is the columns of a row."""

    num_kv_heads: int = 1
    head_dim: int = 160
    v_head_dim: int = 128  # columns of a row that are V, and K with the rotated ones
    expanded_dim: int = 64  # of a head's keys without their rotated columns, and of its values

    @property
    def rope_dim(self) -> int:
        """Columns of a query and of a row that are rotated."""
        return self.head_dim - self.v_head_dim

    @property
    def sm_scale(self) -> float:
        """Multiplies the scores, which are those of expanded heads."""
        return (self.expanded_dim + self.rope_dim) ** -0.5


class LatentLayer:
    """The weights of one layer; matrices are stored [in, out], those of heads [heads, in, out]."""

    def __init__(self, config: LatentConfig, make: Callable[..., Tensor]) -> None:
        c = config
        heads, dim = c.num_q_heads, c.expanded_dim
        self.attention_norm, self.row_norm = make(c.hidden), make(c.v_head_dim)
        # Gains as in the model without latent rows.
        self.wq = make(c.hidden, heads * (dim + c.rope_dim), gain=2.0)
        self.wrow = make(c.hidden, c.head_dim, gain=2.0)
        self.expand_k = make(c.v_head_dim, heads * dim).view(-1, heads, dim).permute(1, 2, 0).contiguous()
        self.expand_v = make(c.v_head_dim, heads * dim).view(-1, heads, dim).transpose(0, 1).contiguous()
        self.wo = make(heads * dim, c.hidden, gain=3.0)
        self.mlp_norm = make(c.hidden)
        self.gate_and_up = torch.cat([make(c.hidden, c.intermediate) for _ in range(2)], 1)
        self.down = make(c.intermediate, c.hidden)


class LatentModel(Llama):
    """The Llama of the demo with latent attention."""

    config: LatentConfig

    def make_layer(self, make: Callable[..., Tensor]) -> LatentLayer:
        """The weights of a layer."""
        return LatentLayer(self.config, make)

    def attention(
        self,
        layer: LatentLayer,
        h: Tensor,
        turn: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """The output of one layer's attention before `wo`, [rows, columns]."""
        c = self.config
        query, rotated = (h @ layer.wq).view(len(h), c.num_q_heads, -1).split([c.expanded_dim, c.rope_dim], -1)
        absorbed = torch.einsum("rhd,hdc->rhc", query, layer.expand_k)
        latent, key = (h @ layer.wrow).unsqueeze(1).split([c.v_head_dim, c.rope_dim], -1)
        rows = torch.cat([rms_norm(latent, layer.row_norm, c.norm_eps), rotate(key, turn)], -1)
        out = attend(torch.cat([absorbed, rotate(rotated, turn)], -1), rows, rows[..., : c.v_head_dim])
        return torch.einsum("rhc,hcd->rhd", out, layer.expand_v).flatten(1)
