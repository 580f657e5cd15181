"""A step of the model: eager, or a captured graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .backend import AttentionBackend
from .batch import make_batch
from .forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from .graph_runner import GraphRunner, batch_sizes_to_capture
from .scheduler import Work
from .token_pool import RequestTable
from .transfer import moved, on_host, room_on_host

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


class LaunchedStep(NamedTuple):
    """A step that the card computes, or has computed."""

    works: list[Work]
    tokens: Tensor  # [batch] int32 on the host, filled when the step ends
    end: torch.cuda.Event | None  # None: on the CPU, where a step ends before its launch returns

    def read(self) -> list[int]:
        """The token that follows each work's last token; waits for the step."""
        if self.end is not None:
            self.end.synchronize()
        found: list[int] = self.tokens.tolist()
        return found


class ModelRunner:
    """Launches steps of the engine; decode steps are captured graphs if they fit.

    A step's tokens stay on the device for the next step, which can so be launched before the host has read them.

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
        # -1, then the tokens that the last step found.
        self._newest = torch.full((1 + table.max_requests,), -1, dtype=torch.int32, device=model.device)
        self._end: torch.cuda.Event | None = None  # of the last step
        self.graphs: GraphRunner | None = None
        if max_graph_batch and backend.supports_graphs:
            sizes = batch_sizes_to_capture(max_graph_batch)
            self.graphs = GraphRunner(self._forward, backend, sizes, model.device)

    def launch(self, works: list[Work]) -> LaunchedStep:
        """Starts a step after the one that was launched last."""
        device = self.model.device
        if self._end is not None:  # that step may have been launched on another stream
            torch.cuda.current_stream(device).wait_event(self._end)
        batch, writes = make_batch(works, self._block_size)
        self.table.write(*moved(writes, device))
        if self.graphs is not None and self.graphs.can_run(batch):
            found = self.graphs.run(batch)
        else:
            batch = batch.to(device)
            self.backend.init_forward_metadata(batch)
            found = self._forward(batch)
        tokens = room_on_host(len(works), device).copy_(found, non_blocking=True)
        if device.type == "cuda":
            self._end = torch.cuda.current_stream(device).record_event()
        return LaunchedStep(works, tokens, self._end)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """The next token of each request, valid until the next step."""
        # Token -1 - i is the i-th of the newest ones; a known token reads the -1 before them, and is larger.
        newest = self._newest.index_select(0, batch.tokens.neg().clamp_(min=0))
        batch = dataclasses.replace(batch, tokens=torch.maximum(batch.tokens, newest))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.backend.forward(q, k, v, self._layers[layer], batch)

        hidden = self.model.forward(batch.tokens, batch.positions, attend)
        if batch.mode is ForwardMode.EXTEND:  # last token of each request
            (last,) = moved([on_host(batch.new_lens.numpy().cumsum() - 1, hidden.device)], hidden.device)
            hidden = hidden.index_select(0, last)
        return self._newest[1 : 1 + batch.batch_size].copy_(self.model.logits(hidden).argmax(-1))
