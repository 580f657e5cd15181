"""The attention objects of a group of layers: one for each use and each kind of layer, made at first use."""

from __future__ import annotations

import enum
import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ...kernels.options import OptionOverride, Options, RunOptions
from ...plan.bounds import Sizes, workspace_bounds
from ...plan.capacity import Capacity
from ...plan.device_lengths import TableLengths
from ...plan.lengths import Lengths
from ...plan.page_indices import Pages
from ...variants.variant import Variant
from ...wrappers.base import DECODE, PAGED, RAGGED, Attention
from ...wrappers.plan_arguments import DecodeArguments, PrefillArguments
from .layers import LayerKind, LayerOptions, variant_of

SPLIT_TOKENS = 4096  # batch-invariant engines: requests are cut at multiples of this
_LEAST_WORKSPACE = {"cuda": 32 << 20, "cpu": 1 << 20}
_TABLE_TOKENS = 128  # engines may have room in a row of their tables for a multiple of so many
MOST_TOKENS = 2**31 - 1  # of all requests together, with those that their pages have room for


class GroupSizes(NamedTuple):
    """The types of a group's tensors, and its largest step."""

    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    max_requests: int
    max_rows: int
    max_tokens: int  # of a request
    few_rows: int = 1  # requests of at most so many rows come first: decodes, or drafts that are verified
    graph_requests: int = 0  # most requests of a captured step, if all that are captured have one row a request
    graph_rows: int = 0  # most rows of a captured step otherwise
    captures_all: bool = False  # whether steps of any rows are captured, and not only those of few rows a request
    has_exact_lengths: bool = True  # whether seq_lens_cpu_upper_bound is exact (not so with drafts)
    split_tokens: int = 0  # batch-invariant: requests are cut at multiples of it; 0: balanced
    has_rotation: bool = False  # whether RoPE and the cache write are one kernel


class Use(enum.Enum):
    """The rows that an attention object is planned for. One step may have two uses."""

    DECODE = "one row a request"
    FEW_ROWS = "few rows a request"
    ROWS = "any rows"
    DECODE_IN_GRAPH = "one row a request, captured"
    ROWS_IN_GRAPH = "any rows, captured"
    PREFIX = "all rows over tokens that all requests share"
    SUFFIX = "any rows after these tokens"
    RAGGED = "rows over the K and V of the same step"
    OWN_IN_GRAPH = "few rows a request over the K and V of the same step, captured"
    MASKED = "any rows under a mask: ancestors in a tree, chunks, images, or causal requests next to others"
    MASKED_IN_GRAPH = "any rows under such a mask, captured"

    @property
    def is_graph(self) -> bool:
        return self in (Use.DECODE_IN_GRAPH, Use.ROWS_IN_GRAPH, Use.OWN_IN_GRAPH, Use.MASKED_IN_GRAPH)

    @property
    def is_own(self) -> bool:
        """Whether K and V are the step's own tensors, and in no cache."""
        return self in (Use.RAGGED, Use.OWN_IN_GRAPH)

    @property
    def is_decode(self) -> bool:
        return self in (Use.DECODE, Use.DECODE_IN_GRAPH)

    @property
    def is_masked(self) -> bool:
        return self in (Use.MASKED, Use.MASKED_IN_GRAPH)


class TableRows(NamedTuple):
    """Lengths and block tables on the device."""

    seq_lens: torch.Tensor  # [requests]
    tables: torch.Tensor  # [requests, pages] int32
    q_indptr: torch.Tensor | None  # [requests + 1] int32; None: one row a request
    max_rows: int
    table_rows: torch.Tensor | None = None  # each request's row of the tables; None: 0, 1, 2, ...


class Workspaces:
    """Memory for partial results, which the groups of one engine share: they run one after the other on one stream."""

    _of_engines: ClassVar[weakref.WeakValueDictionary[int, Workspaces]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self._tensors: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def of(cls, engine: Any) -> Workspaces:
        """The memory of one engine; the key is an object that lives as long as the engine's groups."""
        return cls._of_engines.setdefault(id(engine), cls())

    def at_least(self, size: int, device: torch.device) -> torch.Tensor:
        """A tensor of `size` bytes or more; plans keep the one that they got."""
        found = self._tensors.get(device)
        if found is None or found.numel() < size:
            found = self._tensors[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return found


class GroupPlans:
    """The attention objects, which share a workspace.

    Args:
        mask: hides tokens from the rows of Use.MASKED and Use.MASKED_IN_GRAPH.
        owner: the engine, for messages.
    """

    def __init__(
        self,
        layers: Sequence[LayerOptions],
        sizes: GroupSizes,
        device: torch.device,
        workspaces: Workspaces | None = None,
        *,
        mask: Variant | None = None,
        owner: str = "vLLM",
    ) -> None:
        self.layers, self.sizes, self.device = list(layers), sizes, device
        self.workspaces = Workspaces() if workspaces is None else workspaces
        self.is_encoder = any(layer.is_encoder for layer in self.layers)  # there are then no others in the group
        self._mask, self._owner = mask, owner
        self._kinds = list(dict.fromkeys(layer.kind for layer in layers))
        self._attentions: dict[Use, dict[LayerKind, Attention]] = {}
        self._options: dict[Any, tuple[Options, RunOptions]] = {}
        self._tables: dict[tuple[Use, LayerKind], TableLengths] = {}
        self._known_runs: set[tuple[Use, LayerKind, bool]] = set()

    def of(self, use: Use) -> dict[LayerKind, Attention]:
        """The attention of each kind of layer."""
        found = self._attentions.get(use)
        if found is None:
            found = self._attentions[use] = {kind: self._make(use, kind) for kind in self._kinds}
        return found

    def options(self, use: Use, kind: LayerKind, is_causal: bool) -> tuple[Options, RunOptions]:
        """The options of a plan: of the first layer of the kind. Runs of others give their own."""
        found = self._options.get((use, kind, is_causal))
        if found is None:
            found = self._options[use, kind, is_causal] = self._checked(use, kind, is_causal)
        return found

    def all_options(self, use: Use) -> set[Options]:
        """The options of all layers' plans, with those of layers that differ from the first one of their kind."""
        found = set()
        for layer in self.layers:
            options, _ = self.options(use, layer.kind, True)
            override = OptionOverride.of(layer.values[options.causal], layer.kind.num_heads, layer.kind.num_kv_heads)
            found.add(override.over(options))
        return found

    def plan_tables(self, use: Use, rows: TableRows, is_causal: bool) -> dict[LayerKind, Attention]:
        """Plans from lengths on the device."""
        attentions = self.of(use)
        for kind, attention in attentions.items():
            options, values = self.options(use, kind, is_causal)
            attention.plan_on_device(self._lengths(use, kind, rows, options), options, values)
            if use.is_graph and (use, kind, is_causal) not in self._known_runs:
                self._know_runs(attention, kind, is_causal)
                self._known_runs.add((use, kind, is_causal))
        return attentions

    def plan_on_host(
        self,
        q_indptr: torch.Tensor,
        lens: torch.Tensor,
        tables: torch.Tensor,
        is_causal: bool,
        use: Use = Use.ROWS,
    ) -> dict[LayerKind, Attention]:
        """Plans any rows from lengths on the host. Each request's pages begin where its row of the tables does."""
        starts = torch.arange(len(lens) + 1, device="cpu") * tables.shape[1]
        lengths, pages = Lengths(q_indptr, starts, None, lens), Pages(tables.reshape(-1))
        attentions = self.of(use)
        for kind, attention in attentions.items():
            attention.plan(lengths, pages, *self.options(use, kind, is_causal))
        return attentions

    def _lengths(self, use: Use, kind: LayerKind, rows: TableRows, options: Options) -> TableLengths:
        """The lengths of a step. Engines keep them where the last step's were, so that one object serves many steps."""
        known, places = (
            self._tables.get((use, kind)),
            (rows.tables, rows.seq_lens, rows.q_indptr, rows.table_rows, None),
        )
        if known is None or not known.are_of(places, rows.max_rows, options):
            known = self._tables[use, kind] = TableLengths(
                self.device,
                rows.seq_lens,
                rows.tables,
                q_indptr=rows.q_indptr,
                table_rows=rows.table_rows,
                num_requests=None,
                max_rows=rows.max_rows,
                options=options,
            )
        return known

    def _know_runs(self, attention: Attention, kind: LayerKind, is_causal: bool) -> None:
        """Plans for layers whose options differ from the planned ones, because no plan can be made in a capture."""
        for layer in self.layers:
            if layer.kind == kind:
                override = OptionOverride.of(layer.values[is_causal], kind.num_heads, kind.num_kv_heads)
                attention.session.find(override)

    def _checked(self, use: Use, kind: LayerKind, is_causal: bool) -> tuple[Options, RunOptions]:
        sizes, values = self.sizes, next(layer.values for layer in self.layers if layer.kind == kind)[is_causal]
        shared: dict[str, Any] = {
            "window_left": values.window_left,
            "logits_soft_cap": values.logits_soft_cap,
            "sm_scale": values.sm_scale,
            "q_data_type": sizes.q_dtype,
            "kv_data_type": sizes.q_dtype if use.is_own else sizes.kv_dtype,
            "o_data_type": kind.out_dtype,
            "own": {"variant": variant_of(kind, self.device), "chunk": kind.chunk},
        }
        if use.is_masked:  # which hides the tokens of other chunks too
            shared["own"] = {"variant": self._mask}
        page_size = 0 if use is Use.RAGGED else 1 if use.is_own else sizes.page_size
        if sizes.split_tokens:
            shared["fixed_split_size"] = max(1, sizes.split_tokens // max(1, page_size))
        heads = kind.num_heads, kind.num_kv_heads, kind.head_dim
        if use.is_decode:
            return DecodeArguments(*heads, page_size, **shared).checked()
        source = "ragged" if use is Use.RAGGED else "paged"
        return PrefillArguments(source, *heads, page_size, causal=is_causal, **shared).checked()

    def _make(self, use: Use, kind: LayerKind) -> Attention:
        names = DECODE if use.is_decode else RAGGED if use is Use.RAGGED else PAGED
        attention = Attention(
            self._workspace, is_graph=use.is_graph, names=names, owner=f"flashpage's {self._owner} backend"
        )
        if use.is_graph:
            sizes = self.sizes
            requests = sizes.graph_requests if use.is_decode else min(sizes.max_requests, sizes.graph_rows)
            pages = min(requests * -(-sizes.max_tokens // sizes.page_size), MOST_TOKENS // sizes.page_size)
            if use.is_own:
                pages = requests * sizes.few_rows
            # Their ratio chooses the kernel's tile.
            rows = 0 if use.is_decode else max(sizes.graph_rows, requests * sizes.few_rows)
            capacity = Capacity(requests, pages, rows, self._longest)
            attention.session.use_capacity(capacity, reads_tables=True)
        return attention

    @property
    def _longest(self) -> int:
        """Tokens for which a row of the block tables has room."""
        step = math.lcm(self.sizes.page_size, _TABLE_TOKENS)
        return -(-self.sizes.max_tokens // step) * step

    @functools.cached_property
    def _workspace(self) -> torch.Tensor:
        """Memory for partial results of any step, which the uses share: they run one after the other."""
        sizes, needed = self.sizes, _LEAST_WORKSPACE[self.device.type]
        requests, rows, longest = sizes.max_requests, sizes.max_rows, self._longest
        tokens = min(requests * longest, MOST_TOKENS)
        # Few rows and many have other kernels, whose bounds differ.
        steps = [(Use.ROWS, rows), (Use.ROWS, max(sizes.graph_rows, requests * sizes.few_rows)), (Use.DECODE, requests)]
        if self.is_encoder:
            steps, tokens, longest = [(Use.RAGGED, rows)], rows, rows
        elif self._mask is not None:
            steps += [(Use.MASKED, count) for use, count in steps if use is Use.ROWS]
        for kind in self._kinds:
            for use, count in steps:
                options, _ = self.options(use, kind, not use.is_decode)
                bounds = workspace_bounds(options, Sizes(requests, count, tokens, longest), self.device)
                needed = max(needed, bounds[0])
        return self.workspaces.at_least(needed, self.device)
