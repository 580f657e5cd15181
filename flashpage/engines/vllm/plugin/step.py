"""The plans of one step of a group of layers, which vLLM hands to each of them as attention metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ....wrappers.base import Attention
from .layers import LayerKind, LayerOptions


class LayerTensors(NamedTuple):
    """The tensors of one layer."""

    query: torch.Tensor  # [rows, num_heads, head_dim]
    key: torch.Tensor | None  # of the step's own tokens, [rows, num_kv_heads, head_dim]
    value: torch.Tensor | None
    cache: tuple[torch.Tensor, torch.Tensor] | None  # K and V, [blocks, page, num_kv_heads, head_dim] each
    output: torch.Tensor  # written
    scales: tuple[Any, Any, Any]  # of q, K and V
    sinks: torch.Tensor | None  # [num_heads] fp32


class Part(Protocol):
    """Some of a step's rows, with all that they need to run."""

    def run(self, layer: LayerOptions, tensors: LayerTensors) -> None: ...


@dataclasses.dataclass
class Step:
    """vLLM's attention metadata. vLLM itself reads and writes `slot_mapping` for cross attention."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    parts: tuple[Part, ...]
    common: Any  # vLLM's CommonAttentionMetadata, from which the step was planned
    plan_again: Callable[[], object] | None  # plans the lengths that are then on the device; None: the host planned

    @property
    def causal(self) -> bool:
        """A drafter of vLLM whose rows see later tokens checks that this is False."""
        return bool(self.common.causal)


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """Rows up to `end` over the paged cache; the plan says which of them exist."""

    attentions: dict[LayerKind, Attention]
    end: int
    is_causal: bool

    def run(self, layer: LayerOptions, tensors: LayerTensors) -> None:
        q, out, end = tensors.query, tensors.output, self.end
        if end != q.shape[0]:
            q, out = q[:end], out[:end]
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
