"""The interface between a model loop and attention: metadata once a step, forward once a layer."""

from __future__ import annotations

import abc

import torch

from .forward_batch import AttentionLayer, ForwardBatch, ForwardMode


class AttentionBackend(abc.ABC):
    """Attention for a model runner, which prepares the metadata of a step and then runs the layers.

    A step is prepared while the card may still compute the last one: init_forward_metadata* must not overwrite pinned
    memory from which an earlier call copies. Tokens that the host has not read are negative there, but not in forward.
    """

    @abc.abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepares a step; call it once, before the first layer."""

    @abc.abstractmethod
    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """One layer of a DECODE step.

        Args:
            q: [new tokens, num_q_heads, head_dim].
            k, v: [new tokens, num_kv_heads, head_dim], written to the pool first; None: nothing to write.
        """

    @abc.abstractmethod
    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """One layer of an EXTEND or VERIFY step; arguments as in forward_decode."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """One layer of any step; calls forward_decode or forward_extend."""
        call = self.forward_decode if batch.mode is ForwardMode.DECODE else self.forward_extend
        return call(q, k, v, layer, batch, save_kv_cache)

    # Captured steps; backends that do not support them inherit these.

    supports_graphs = False

    def init_cuda_graph_state(self, max_batch: int, max_rows: int) -> None:
        """Allocates memory for captured steps of at most max_batch requests and max_rows new tokens; once a runner."""
        raise NotImplementedError(f"{type(self).__name__} does not support captured steps: run steps without graphs.")

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        """init_forward_metadata for a batch that is captured next; its sizes are fixed from here on."""
        raise NotImplementedError(f"{type(self).__name__} does not support captured steps: run steps without graphs.")

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        """init_forward_metadata before a replay: the batch has as many requests as the captured one."""
        raise NotImplementedError(f"{type(self).__name__} does not support captured steps: run steps without graphs.")

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """One name for the two methods above, called by newer engines: the part of a step outside the graph."""
        if in_capture:
            self.init_forward_metadata_capture_cuda_graph(batch)
        else:
            self.init_forward_metadata_replay_cuda_graph(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:  # noqa: B027, a hook
        """The part that newer engines capture before the layers: empty, as plans are made outside the graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that pad a batch to a captured size; 0: they are empty and cost nothing."""
        return 0
