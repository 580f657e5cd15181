"""Steps of a draft model, planned together: several guesses a request cost the host one plan call each, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .backend import AttentionBackend
from .forward_batch import AttentionLayer, ForwardBatch
from .paged_attention import PagedAttention


class DraftSteps(AttentionBackend):
    """Consecutive DECODE steps, all planned before the first: none of them waits for the host, and a GraphRunner may
    capture them as one.

    The token of step i is i tokens after the batch's own, in a slot that the request table already holds. A tree of
    guesses has one row of the table for each branch.

    Args:
        backends: one for each step, over one table and one pool.
    """

    supports_graphs = True

    def __init__(self, backends: Sequence[PagedAttention]) -> None:
        self.backends, self._now = backends, backends[0]

    def enter(self, batch: ForwardBatch, step: int, tokens: torch.Tensor) -> ForwardBatch:
        """The batch and the attention of a step; tokens: [batch], the newest guesses."""
        self._now = self.backends[step]
        if step == 0:
            return dataclasses.replace(batch, tokens=tokens)
        table, page_size = self._now.table, self._now.pool.page_size
        positions = batch.positions + step
        slots = table.slots[batch.rows, positions]
        slots = torch.where(batch.out_slots < page_size, batch.out_slots, slots)  # padding writes to the unowned page
        batch = dataclasses.replace(batch, tokens=tokens, positions=positions, out_slots=slots)
        return self._longer(batch, step)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        for step, backend in enumerate(self.backends):
            backend.init_forward_metadata(self._longer(batch, step))

    def init_cuda_graph_state(self, max_batch: int, max_rows: int) -> None:
        for backend in self.backends:
            backend.init_cuda_graph_state(max_batch, max_rows)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        for step, backend in enumerate(self.backends):
            backend.init_forward_metadata_capture_cuda_graph(self._longer(batch, step))

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        for step, backend in enumerate(self.backends):
            backend.init_forward_metadata_replay_cuda_graph(self._longer(batch, step))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.backends[0].get_cuda_graph_seq_len_fill_value()

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self._now.forward_decode(q, k, v, layer, batch, save_kv_cache)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self._now.forward_extend(q, k, v, layer, batch, save_kv_cache)

    @staticmethod
    def _longer(batch: ForwardBatch, step: int) -> ForwardBatch:
        """The batch of step `step`: each request has `step` more tokens; empty requests (padding) stay empty."""
        longer = torch.where(batch.seq_lens > 0, batch.seq_lens + step, batch.seq_lens)
        return dataclasses.replace(batch, seq_lens=longer)
