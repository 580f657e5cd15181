"""Steps of a draft model, planned together, so that several guesses a request cost the host one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .backend import AttentionBackend
from .forward_batch import AttentionLayer, ForwardBatch
from .paged_attention import PagedAttention


class DraftSteps(AttentionBackend):
    """DECODE steps that follow each other, all planned before the first: nothing between them asks the host, and a
    GraphRunner may capture them as one.

    Step i's token stands i tokens behind the batch's own, in the slot that the request table holds for it already. A
    tree of guesses has a row of the table for each branch.

    Args:
        backends: one a step, over one table and one pool.
    """

    supports_graphs = True

    def __init__(self, backends: Sequence[PagedAttention]) -> None:
        self.backends, self._now = backends, backends[0]

    def enter(self, batch: ForwardBatch, step: int, tokens: torch.Tensor) -> ForwardBatch:
        """The batch of a step, and attention as it was planned for it; tokens: [batch], the guesses so far."""
        self._now = self.backends[step]
        if step == 0:
            return dataclasses.replace(batch, tokens=tokens)
        table, page_size = self._now.table, self._now.pool.page_size
        positions = batch.positions + step
        slots = table.slots[batch.rows, positions]
        slots = torch.where(batch.out_slots < page_size, batch.out_slots, slots)  # padding stays on nobody's page
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
        """Every request has `step` tokens more; empty ones, which pad a captured batch, stay empty."""
        longer = torch.where(batch.seq_lens > 0, batch.seq_lens + step, batch.seq_lens)
        return dataclasses.replace(batch, seq_lens=longer)
