"""Plans that layers share, and their memory: one for each kind of layer, made once a forward."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...plan.lengths import Lengths
from ...plan.page_indices import NO_PAGES, Mask, Pages
from ...plan.session import current_stream
from ...wrappers.base import PAGED, RAGGED, Attention
from ...wrappers.plan_arguments import Checked
from .call import Layer

_MOST_PLANS = 16  # kinds of layers that a thread keeps
_WORKSPACE_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}


class _Local(threading.local):
    """Work of two threads or two streams shares no memory."""

    def __init__(self) -> None:
        self.workspaces: dict[Any, torch.Tensor] = {}
        self.planned: dict[Any, Planned] = {}


class Planned:
    """An Attention and the batch that it is planned for."""

    def __init__(self, attention: Attention) -> None:
        self._attention, self._checked = attention, Checked()
        self.identity: tuple[Any, ...] = ()
        self.batch: Any = None

    def is_for(self, identity: tuple[Any, ...]) -> bool:
        """Tensors are the same where they are one object: those of a forward come to each layer as they are."""
        old = self.identity
        return len(old) == len(identity) and all(
            a is b if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a == b
            for a, b in zip(old, identity, strict=True)
        )

    def plan(
        self, layer: Layer, lengths: Lengths, pages: Pages = NO_PAGES, page_size: int = 0, mask: Mask | None = None
    ) -> None:
        """For a layer and those that differ from it in window or sinks alone."""
        arguments = layer.call.arguments(page_size, layer.window_left, mask is not None)
        self._attention.plan(lengths, pages, *self._checked.of(arguments), mask)

    def run(self, layer: Layer, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[tokens, num_q_heads, head_dim_vo]"""
        values = self._attention.values._replace(window_left=layer.window_left)
        out: torch.Tensor = self._attention.run(q, cache, values=values, sinks=layer.sinks)
        return out

    def planned_for(self, identity: tuple[Any, ...], batch: Any) -> Any:
        """Keeps the tensors of `identity` alive, so that no other gets their place."""
        self.identity, self.batch = identity, batch
        return batch


_local = _Local()


def place(device: torch.device) -> tuple[torch.device, int]:
    """What runs in order: a device and its current stream."""
    return device, current_stream(device.index or 0) if device.type == "cuda" else 0


def workspace(device: torch.device) -> torch.Tensor:
    """For partial results, which live as long as one run: the plans of one stream share it."""
    key = place(device)
    if key not in _local.workspaces:
        _local.workspaces[key] = torch.empty(_WORKSPACE_BYTES[device.type], dtype=torch.uint8, device=device)
    return _local.workspaces[key]


def shared(device: torch.device, kind: tuple[Any, ...], is_paged: bool) -> Planned:
    """This thread's plan of a kind, the oldest given up for a new one where there are many."""
    key = (*place(device), *kind)
    planned = _local.planned.pop(key, None)
    if planned is None:
        planned = Planned(Attention(workspace(device), names=PAGED if is_paged else RAGGED, owner="flashpage.hf"))
        if len(_local.planned) >= _MOST_PLANS:
            del _local.planned[next(iter(_local.planned))]
    _local.planned[key] = planned
    return planned
