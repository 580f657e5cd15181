"""Decode context parallelism: each rank has the K and V of some tokens, for its KV heads.

Every rank gathers the queries of all ranks that share its KV heads, attends to its own earlier tokens, and vLLM's
collective merges the partial outputs (LSEs are base 2) and hands each rank its heads back. The step's own tokens, which
every rank has as tensors, are attended to apart and merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ....plan.lengths import Lengths
from ....plan.page_indices import NO_PAGES
from ....wrappers.base import Attention
from ....wrappers.merge import merge_state_in_place
from .group_plans import GroupPlans, TableRows, Use
from .layers import LayerKind, LayerOptions
from .step import LayerTensors, RaggedRows


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that share KV heads.

    Attributes:
        interleave: consecutive tokens of a rank.
        gather: [rows, heads, head_dim] of this rank to those of all ranks.
        combine: outputs and LSEs of all heads over this rank's tokens to those of this rank's heads over all tokens.
    """

    size: int
    rank: int
    interleave: int
    gather: Callable[[torch.Tensor], torch.Tensor]
    combine: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def local_lengths(self, lens: torch.Tensor) -> torch.Tensor:
        """The tokens of each request that this rank has, int32."""
        lens, stripe = lens.to(torch.int32), self.interleave
        base = lens // (stripe * self.size) * stripe
        rest = (lens - base * self.size - self.rank * stripe).clamp(0, stripe)
        return base + rest


class ContextPlans:
    """The plans of earlier tokens and of the step's own."""

    def __init__(self, plans: GroupPlans, ranks: Ranks) -> None:
        self._plans, self._ranks = plans, ranks
        layers = [layer.with_heads(layer.kind.num_heads * ranks.size) for layer in plans.layers]
        self.gathered = GroupPlans(layers, plans.sizes, plans.device, plans.workspaces)

    def plan(self, common: Any, is_causal: bool) -> ContextRows:
        """Plans a step, which no graph captures: the host plans its own tokens."""
        requests, rows = common.num_reqs, common.num_actual_tokens
        starts = common.query_start_loc
        earlier = common.seq_lens[:requests] - (starts[1 : requests + 1] - starts[:requests])
        lens = self._ranks.local_lengths(earlier)
        tables = TableRows(lens, common.block_table_tensor[:requests], starts[: requests + 1], rows)
        context = self.gathered.plan_tables(Use.ROWS, tables, False)
        indptr = common.query_start_loc_cpu[: requests + 1]
        own = self._plans.of(Use.RAGGED)
        for kind, attention in own.items():
            attention.plan(Lengths(indptr, indptr), NO_PAGES, *self._plans.options(Use.RAGGED, kind, is_causal))
        return ContextRows(context, RaggedRows(own, int(indptr[-1]), is_causal), self._ranks, rows)


@dataclasses.dataclass(frozen=True)
class ContextRows:
    """Rows over the earlier tokens of all ranks, and over the step's own."""

    context: dict[LayerKind, Attention]
    own: RaggedRows
    ranks: Ranks
    rows: int

    def run(self, layer: LayerOptions, tensors: LayerTensors) -> None:
        q, out = tensors.query[: self.rows], tensors.output[: self.rows]
        gathered = layer.with_heads(layer.kind.num_heads * self.ranks.size)
        found, lse = self.context[gathered.kind].run(
            self.ranks.gather(q.contiguous()), tensors.cache, None, None, True, gathered.values[False], tensors.scales
        )
        found, lse = self.ranks.combine(found, lse)
        own_lse = out.new_empty(out.shape[:2], dtype=torch.float32)
        self.own.run(layer, tensors, own_lse)
        count = self.own.rows
        merge_state_in_place(out[:count], own_lse[:count], found[:count], lse[:count].contiguous())
