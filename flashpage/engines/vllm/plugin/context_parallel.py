"""Decode context parallelism: each rank has the K and V of some tokens, for its KV heads.

Every rank gathers the queries of all ranks that share its KV heads, attends to the tokens that it has, and vLLM's
collective merges the partial outputs (LSEs are base 2) and hands each rank its heads back.

- One row a request sees all tokens, so that its own needs nothing else.
- Other rows attend to earlier tokens in this way. The step's own tokens, which every rank has as tensors, are attended
  to apart and merged: planned on the host, or for steps that a graph captures from the lengths on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ....plan.lengths import Lengths
from ....plan.page_indices import NO_PAGES
from ....wrappers.base import Attention
from ....wrappers.merge import merge_state_in_place
from ...plugin.group_plans import GroupPlans, TableRows, Use
from ...plugin.layers import LayerKind, LayerOptions
from ...plugin.parts import LayerTensors, RaggedRows

_NO_WEIGHT = -1e30  # a sink that adds nothing


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

    def own_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """Sinks for the heads of all ranks: each head's sink counts on the rank that gets the head back."""
        found = sinks.new_full((self.size, len(sinks)), _NO_WEIGHT)
        found[self.rank] = sinks
        return found.flatten()


class ContextPlans:
    """The plans of the ranks' tokens and of the step's own.

    Captured launches read block tables in place, and a plan reads lengths when it runs on the device. Those that are
    computed here have tensors that stay where they are.
    """

    def __init__(self, plans: GroupPlans, ranks: Ranks) -> None:
        self._plans, self._ranks = plans, ranks
        layers = [layer.with_heads(layer.kind.num_heads * ranks.size) for layer in plans.layers]
        self.gathered = GroupPlans(layers, plans.sizes, plans.device, plans.workspaces)
        self.uses = (Use.RAGGED, Use.OWN_IN_GRAPH) if plans.sizes.graph_rows else (Use.RAGGED,)

    def plan(self, common: Any, is_causal: bool) -> tuple[ContextRows, Callable[[], object] | None]:
        """Plans a step; with it what plans it again from the lengths that are then on the device."""
        sizes, most = self._plans.sizes, common.max_query_len
        plan: Callable[[], ContextRows]
        # A step must get the plan that captured steps of its size read, whatever its own rows.
        if common.num_actual_tokens <= sizes.graph_rows and most <= sizes.few_rows:
            plan = functools.partial(self._few_rows, common, is_causal)
        elif most <= 1:
            use = Use.DECODE_IN_GRAPH if common.num_reqs <= sizes.graph_requests else Use.DECODE
            plan = functools.partial(self._decode, use, common)
        else:
            return self._on_host(common, is_causal), None
        return plan(), plan

    def _decode(self, use: Use, common: Any) -> ContextRows:
        requests = common.num_reqs
        lens = self._local(common.seq_lens[:requests])
        tables = TableRows(lens, common.block_table_tensor[:requests], None, requests)
        return ContextRows(self.gathered.plan_tables(use, tables, False), None, self._ranks, requests)

    def _few_rows(self, common: Any, is_causal: bool) -> ContextRows:
        """Rows of captured steps; the step's own K and V are pages of one token."""
        requests, rows = common.num_reqs, common.num_actual_tokens
        starts = common.query_start_loc[: requests + 1]
        context = self._earlier(Use.ROWS_IN_GRAPH, common)
        counts, pages = self._own_counts[:requests], self._own_pages[:requests]
        torch.sub(starts[1:], starts[:-1], out=counts)
        torch.add(starts[:-1, None], self._places, out=pages).clamp_(max=max(0, rows - 1))
        own = self._plans.plan_tables(Use.OWN_IN_GRAPH, TableRows(counts, pages, starts, rows), is_causal)
        return ContextRows(context, OwnPages(own, rows, is_causal), self._ranks, rows)

    def _on_host(self, common: Any, is_causal: bool) -> ContextRows:
        context, own = self._earlier(Use.ROWS, common), self._plans.of(Use.RAGGED)
        indptr = common.query_start_loc_cpu[: common.num_reqs + 1]
        for kind, attention in own.items():
            attention.plan(Lengths(indptr, indptr), NO_PAGES, *self._plans.options(Use.RAGGED, kind, is_causal))
        rows = RaggedRows(own, int(indptr[-1]), is_causal)
        return ContextRows(context, rows, self._ranks, common.num_actual_tokens)

    def _earlier(self, use: Use, common: Any) -> dict[LayerKind, Attention]:
        """All rows over the tokens before the step, which every row sees."""
        requests, starts = common.num_reqs, common.query_start_loc[: common.num_reqs + 1]
        lens = self._local(common.seq_lens[:requests] - (starts[1:] - starts[:-1]))
        tables = TableRows(lens, common.block_table_tensor[:requests], starts, common.num_actual_tokens)
        return self.gathered.plan_tables(use, tables, False)

    def _local(self, lens: torch.Tensor) -> torch.Tensor:
        return self._local_lens[: len(lens)].copy_(self._ranks.local_lengths(lens))

    @functools.cached_property
    def _local_lens(self) -> torch.Tensor:
        return self._numbers(self._plans.sizes.max_requests)

    @functools.cached_property
    def _own_counts(self) -> torch.Tensor:
        return self._numbers(self._plans.sizes.max_requests)

    @functools.cached_property
    def _own_pages(self) -> torch.Tensor:
        return self._numbers(self._plans.sizes.max_requests, self._plans.sizes.few_rows)

    @functools.cached_property
    def _places(self) -> torch.Tensor:
        return torch.arange(self._plans.sizes.few_rows, dtype=torch.int32, device=self._plans.device)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._plans.device)


@dataclasses.dataclass(frozen=True)
class OwnPages:
    """Rows over the K and V of the step, whose tokens are pages."""

    attentions: dict[LayerKind, Attention]
    rows: int
    is_causal: bool

    def run(self, layer: LayerOptions, tensors: LayerTensors, lse: torch.Tensor) -> None:
        assert tensors.key is not None and tensors.value is not None
        q, out = tensors.query[: self.rows], tensors.output[: self.rows]
        cache = tensors.key[: self.rows].unsqueeze(1), tensors.value[: self.rows].unsqueeze(1)
        values = layer.values[self.is_causal]
        self.attentions[layer.kind].run(q, cache, out, lse, False, values, sinks=tensors.sinks)


@dataclasses.dataclass(frozen=True)
class ContextRows:
    """Rows over the tokens of all ranks, and over the step's own (`own` None: the ranks' tokens are all)."""

    context: dict[LayerKind, Attention]
    own: RaggedRows | OwnPages | None
    ranks: Ranks
    rows: int

    def run(self, layer: LayerOptions, tensors: LayerTensors) -> None:
        q, out = tensors.query[: self.rows], tensors.output[: self.rows]
        gathered, sinks = layer.with_heads(layer.kind.num_heads * self.ranks.size), None
        if self.own is None and tensors.sinks is not None:
            sinks = self.ranks.own_sinks(tensors.sinks)
        q, values = self.ranks.gather(q.contiguous()), gathered.values[False]
        context = self.context[gathered.kind]
        found, lse = context.run(q, tensors.cache, None, None, True, values, tensors.scales, sinks)
        found, lse = self.ranks.combine(found, lse)
        if self.own is None:
            out.copy_(found)
            return
        own_lse = out.new_empty(out.shape[:2], dtype=torch.float32)
        self.own.run(layer, tensors, own_lse)
        count = self.own.rows
        merge_state_in_place(out[:count], own_lse[:count], found[:count], lse[:count].contiguous())
