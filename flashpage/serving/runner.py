"""A step of the model: eager, or a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .backend import AttentionBackend
from .batch import make_batch
from .forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from .graph_runner import GraphRunner, batch_sizes_to_capture
from .scheduler import Work
from .token_pool import RequestTable

# attend(layer, q [rows, num_q_heads, head_dim], k, v [rows, num_kv_heads, head_dim]) -> [rows, num_q_heads, head_dim].
# A model with latent rows (MLA) passes the first v_head_dim columns of k as v; the result has as many.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class ModelConfig(Protocol):
    """The sizes of a model that the engine needs. One with latent rows (MLA) has `v_head_dim` and `sm_scale` too."""

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        ...

    @property
    def num_q_heads(self) -> int:
        """Query heads of a layer."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Head dimension of queries, keys and values."""
        ...


class Model(Protocol):
    """A model that takes its attention as a callable."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Element type of queries, keys and values."""
        ...

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [rows, hidden] of tokens [rows], each at its position [rows] within its request."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary]."""


def layers_of(config: ModelConfig) -> list[AttentionLayer]:
    """The attention layers of a model whose layers are all equal."""
    heads = (config.num_q_heads, config.num_kv_heads, config.head_dim, getattr(config, "sm_scale", None))
    rows = getattr(config, "v_head_dim", None)
    return [AttentionLayer(index, *heads, v_head_dim=rows) for index in range(config.num_layers)]


class ModelRunner:
    """Runs steps of the engine; decode steps run as captured graphs if they fit.

    Args:
        max_graph_batch: requests of the largest captured step; 0: no step is captured.
    """

    def __init__(
        self,
        model: Model,
        table: RequestTable,
        backend: AttentionBackend,
        layers: Sequence[AttentionLayer],
        block_size: int,
        max_graph_batch: int,
    ) -> None:
        self.model, self.table, self.backend, self._layers = model, table, backend, layers
        self._block_size = block_size
        self.graphs: GraphRunner | None = None
        if max_graph_batch and backend.supports_graphs:
            sizes = batch_sizes_to_capture(max_graph_batch)
            self.graphs = GraphRunner(self._forward, backend, sizes, model.device)

    def run(self, works: list[Work]) -> list[int]:
        """The token that follows each work's last token."""
        batch, writes = make_batch(works, self._block_size)
        rows, positions, slots = torch.stack(writes).to(self.model.device, non_blocking=True)
        self.table.write(rows, positions, slots)
        if self.graphs is not None and self.graphs.can_run(batch):
            return self.graphs.run(batch).tolist()
        batch = batch.to(self.model.device)
        self.backend.init_forward_metadata(batch)
        return self._forward(batch).tolist()

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """The next token of each request."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.backend.forward(q, k, v, self._layers[layer], batch)

        hidden = self.model.forward(batch.tokens, batch.positions, attend)
        if batch.mode is ForwardMode.EXTEND:  # last token of each request
            hidden = hidden[(batch.new_lens.cumsum(0) - 1).to(hidden.device, non_blocking=True)]
        return self.model.logits(hidden).argmax(-1)
