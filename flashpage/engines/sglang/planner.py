"""Plans the steps of one group of layers.

Which plans a step gets:

- one row for each request, rows to verify and rows of a draft: from the lengths on the device, so that SGLang copies
  none to the host and a captured step plans itself at every replay;
- prompts, chunks of prompts and decodes among them, whose lengths the host knows: one plan on the host, in which
  requests of few rows and of many run at the same time (plan/mixed_batch.py);
- rows to verify in layers with chunks: from the lengths on the device too, under a mask of the row's chunk;
- branches of a tree that is drafted: all rows of a request over its known tokens, each row over its own guesses, and
  one merge; with windows, each row over its last tokens, whose slots are gathered for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...plan.lengths import starts_of
from ..plugin.group_plans import GroupPlans, GroupSizes, TableRows, Use, Workspaces
from ..plugin.latent_plans import LatentPlans
from ..plugin.layers import LayerOptions, chunk_variant
from ..plugin.parts import PagedRows, Part, SharedPrefix
from ..plugin.prebuild import prebuild
from .groups import Group, Tokens, longest_window
from .rows import StepRows
from .tables import SlotTables
from .trees import TreeRows


class Branches(NamedTuple):
    """A step of a draft of `steps` steps, in which each request has `width` branches."""

    width: int = 1
    steps: int = 0
    step: int = -1  # -1: no draft
    page_size: int = 1  # SGLang's

    def stride(self, known: torch.Tensor) -> torch.Tensor | int:
        """Places in the table of slots from one branch's guesses to the next one's: SGLang gives each branch pages of
        its own, which begin with a copy of the known tokens of a page that is not full. `known`: [requests]."""
        if self.page_size == 1:
            return self.steps
        pages = (known % self.page_size + self.steps + self.page_size - 1) // self.page_size
        return pages[:, None] * self.page_size


NO_BRANCHES = Branches()


class GroupPlanner:
    """Makes the plans of a group; each step replaces the plans of the step before."""

    def __init__(
        self,
        group: Group,
        layers: list[LayerOptions],
        sizes: GroupSizes,
        tables: SlotTables,
        workspaces: Workspaces,
        trees: TreeRows | None = None,
        branches: Branches = NO_BRANCHES,
    ) -> None:
        self.group, self._layers, self._tables = group, layers, tables
        self._workspaces, self._branches = workspaces, branches
        self._mask = trees.variant if trees is not None else chunk_variant(group.chunk) if group.chunk else None
        self._window = longest_window(layers)
        self._eager = self._make(sizes)
        self._captured = self._eager
        self._former: list[GroupPlans] = []  # graphs that were captured with them read their memory

    def _make(self, sizes: GroupSizes) -> GroupPlans:
        device = self._tables.slots.device
        if self.group.ckv:
            return LatentPlans(self.group.ckv, self._layers, sizes, device, self._workspaces, owner="SGLang")
        return GroupPlans(self._layers, sizes, device, self._workspaces, mask=self._mask, owner="SGLang")

    def prebuild(self) -> None:
        """Builds all kernels that later steps may need."""
        prebuild(self._eager, (Use.DECODE, Use.ROWS) if self._mask is None else (Use.DECODE, Use.ROWS, Use.MASKED))

    def allow_captures(self, max_requests: int, max_rows: int) -> None:
        """Makes room for captured steps of so many requests and rows."""
        sizes = self._captured.sizes
        requests = max_rows if self._branches.width > 1 else max_requests
        if requests <= sizes.graph_requests and max_rows <= sizes.graph_rows:
            return
        self._former.append(self._captured)
        requests, rows = max(requests, sizes.graph_requests), max(max_rows, sizes.graph_rows)
        self._captured = self._make(
            sizes._replace(graph_requests=requests, graph_rows=rows, max_requests=requests, few_rows=1)
        )

    # ---------------------------------------------------------------- plans

    def plan(self, rows: StepRows, is_captured: bool) -> Part:
        """Plans a step. `is_captured`: the call is captured, or made before it to build what it needs."""
        plans = self._captured if is_captured else self._eager
        if self._branches.width > 1 and rows.each == 1:
            return self._plan_branches(plans, rows, is_captured)
        if rows.each == 1:
            use = Use.DECODE_IN_GRAPH if is_captured else Use.DECODE
            return PagedRows(plans.plan_tables(use, self._table_rows(rows, None), False), rows.total, False)
        is_causal = self.group.is_causal
        if rows.on_host is not None and self.group.tokens is not Tokens.ENCODER:
            new, lens = rows.on_host
            pages = self._pages(rows, int(lens.max()), int(new.max()))
            attentions = plans.plan_on_host(starts_of(new), lens, pages, is_causal)
            return PagedRows(attentions, rows.total, is_causal)
        if (rows.has_tree or self.group.chunk) and self.group.tokens is not Tokens.ENCODER:
            use = Use.MASKED_IN_GRAPH if is_captured else Use.MASKED
        else:
            use = Use.ROWS_IN_GRAPH if is_captured else Use.ROWS
        tables = self._table_rows(rows, self._starts(rows))
        return PagedRows(plans.plan_tables(use, tables, is_causal), rows.total, is_causal)

    def _plan_branches(self, plans: GroupPlans, rows: StepRows, is_captured: bool) -> Part:
        """A step of a draft: each branch has one row, over the request's tokens and over the branch's own guesses."""
        branches, slots = self._branches, self._tables.slots
        known = rows.seq_lens - (branches.step + 1)
        total = len(known) * branches.width
        use = Use.DECODE_IN_GRAPH if is_captured else Use.DECODE
        numbers = torch.arange(branches.width, device=slots.device)
        first = known.long()[:, None] + numbers * branches.stride(known.long())
        if self.group.tokens in (Tokens.WINDOW, Tokens.RECENT):
            most = min(self._window or slots.shape[1], slots.shape[1])
            kept = known.long().clamp(max=most)
            own = self._tables.branch_slots(rows.requests, (kept, most), (first, branches.steps))
            lens = (kept + (branches.step + 1)).int().repeat_interleave(branches.width, output_size=total)
            return PagedRows(plans.plan_tables(use, TableRows(lens, own, None, total), False), total, False)
        starts = _steps_of(branches.width, len(known), slots.device)
        before = TableRows(known, slots, starts, total, rows.requests)
        shared = plans.plan_tables(Use.ROWS_IN_GRAPH if is_captured else Use.ROWS, before, False)
        columns = first[..., None] + torch.arange(branches.steps, device=slots.device)
        own = slots[rows.requests.long()[:, None, None], columns].view(total, branches.steps)
        lens = torch.full((total,), branches.step + 1, dtype=torch.int32, device=slots.device)
        return SharedPrefix(shared, plans.plan_tables(use, TableRows(lens, own, None, total), False), total, False)

    # ---------------------------------------------------------------- tables

    def _table_rows(self, rows: StepRows, starts: torch.Tensor | None) -> TableRows:
        """Lengths and tables on the device."""
        tables = self._tables
        if self.group.tokens is Tokens.ENCODER:
            assert rows.encoder_lens is not None
            return TableRows(rows.encoder_lens, tables.slots, starts, rows.total, rows.requests)
        if self.group.tokens is Tokens.ALL and tables.is_in_place:
            return TableRows(rows.seq_lens, tables.slots, starts, rows.total, rows.requests)
        most = tables.slots.shape[1]
        return TableRows(rows.seq_lens, self._pages(rows, most, rows.each or rows.total), starts, rows.total)

    def _pages(self, rows: StepRows, tokens: int, most_rows: int) -> torch.Tensor:
        """The pages of each request. `tokens`: the most of a request; `most_rows`: of a request."""
        if self.group.tokens is Tokens.WINDOW:
            reach = self._window + most_rows if self._window else tokens
            return self._tables.window_pages(rows.requests, rows.seq_lens, reach, tokens)
        if self.group.tokens is Tokens.DECODER:
            assert rows.encoder_lens is not None
            return self._tables.decoder_slots(rows.requests, rows.encoder_lens, tokens)
        return self._tables.pages(rows.requests, tokens)

    def _starts(self, rows: StepRows) -> torch.Tensor:
        """The first row of each request, on the device."""
        device = self._tables.slots.device
        if rows.q_indptr is not None:
            return rows.q_indptr
        if rows.on_host is not None:
            return starts_of(rows.on_host[0]).to(device, non_blocking=True)
        return _steps_of(rows.each, len(rows.seq_lens), device)


def _steps_of(step: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (count + 1) * step, step, dtype=torch.int32, device=device)
