"""Parts of a step: some of its rows, with the plans by which each layer runs them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import torch

from ...run.checks import Scales
from ...wrappers.base import Attention
from ...wrappers.merge import merge_parts
from .layers import LayerKind, LayerOptions


class LayerTensors(NamedTuple):
    """The tensors of one layer."""

    query: torch.Tensor  # [rows, num_heads, head_dim]
    key: torch.Tensor | None  # of the step's own tokens, [rows, num_kv_heads, head_dim]
    value: torch.Tensor | None
    cache: tuple[torch.Tensor, torch.Tensor] | None  # K and V, [blocks, page, num_kv_heads, head_dim] each
    output: torch.Tensor  # written
    scales: Scales
    sinks: torch.Tensor | None  # [num_heads] fp32


class Part(Protocol):
    """Some of a step's rows, with all that they need to run."""

    def run(self, layer: LayerOptions, tensors: LayerTensors) -> None: ...


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """Rows from `begin` up to `end` over the paged cache; the plan says which of them exist."""

    attentions: dict[LayerKind, Attention]
    end: int
    is_causal: bool
    begin: int = 0

    def run(self, layer: LayerOptions, tensors: LayerTensors) -> None:
        q, out, begin, end = tensors.query, tensors.output, self.begin, self.end
        if begin or end != q.shape[0]:
            q, out = q[begin:end], out[begin:end]
        attention, values = self.attentions[layer.kind], layer.values[self.is_causal]
        attention.run(q, tensors.cache, out, None, False, values, tensors.scales, tensors.sinks)


@dataclasses.dataclass(frozen=True)
class RaggedRows:
    """The first rows over the K and V of the same tokens."""

    attentions: dict[LayerKind, Attention]
    rows: int
    is_causal: bool

    def run(self, layer: LayerOptions, tensors: LayerTensors, lse: torch.Tensor | None = None) -> None:
        assert tensors.key is not None and tensors.value is not None
        q, out = tensors.query[: self.rows], tensors.output[: self.rows]
        cache = tensors.key[: self.rows], tensors.value[: self.rows]
        values = layer.values[self.is_causal]
        self.attentions[layer.kind].run(q, cache, out, lse, False, values, sinks=tensors.sinks)


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """All rows over the shared tokens and over each request's own."""

    shared: dict[LayerKind, Attention]
    own: dict[LayerKind, Attention]
    rows: int
    own_is_causal: bool = True

    def run(self, layer: LayerOptions, tensors: LayerTensors) -> None:
        q, out = tensors.query[: self.rows], tensors.output[: self.rows]
        shared, own = self.shared[layer.kind], self.own[layer.kind]
        cache, scales = tensors.cache, tensors.scales

        def run_shared(to: torch.Tensor, lse: torch.Tensor | None) -> None:
            shared.run(q, cache, to, lse, False, layer.values[False], scales)

        def run_own(to: torch.Tensor, lse: torch.Tensor | None) -> None:  # sinks count once
            own.run(q, cache, to, lse, False, layer.values[self.own_is_causal], scales, tensors.sinks)

        merge_parts((run_shared, run_own), out, None)
