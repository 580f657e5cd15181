"""Plans that layers share, and their memory: one for each kind of layer, made once in each forward."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...plan.lengths import Lengths
from ...plan.page_indices import NO_PAGES, Mask, Pages
from ...plan.session import current_stream
from ...run.checks import NO_SCALES, Tensors
from ...wrappers.base import PAGED, RAGGED, Attention
from ...wrappers.latent_sparse import SELECTED, SelectedAttention
from ...wrappers.plan_arguments import Checked
from .call import Layer

_MOST_PLANS = 16  # kinds of layers whose plans a thread keeps
_UNCOUNTED = -1  # version of a tensor whose writes torch does not count
_WORKSPACE_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}


class _Local(threading.local):
    """A thread's plans and workspaces, by device and stream: two threads or two streams share no memory."""

    def __init__(self) -> None:
        self.workspaces: dict[Any, torch.Tensor] = {}
        self.planned: dict[Any, Planned] = {}


class Planned:
    """An Attention and the batch that it is planned for."""

    def __init__(self, attention: Attention) -> None:
        self._attention, self._checked = attention, Checked()
        self.identity: tuple[Any, ...] = ()
        self._versions: tuple[int, ...] = ()  # of the tensors of `identity`
        self._number = -1  # of the last layer that the plan served
        self.batch: Any = None

    def is_for(self, layer: Layer, identity: tuple[Any, ...]) -> bool:
        """Compares tensors by identity, as one forward passes the same objects to each layer, and by their versions,
        which count writes. torch counts none for tensors of inference mode: their plan serves later layers of the same
        forward alone, which have larger numbers than the layers before them."""
        old = self.identity
        if len(old) != len(identity) or not all(
            a is b if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a == b
            for a, b in zip(old, identity, strict=True)
        ):
            return False
        versions = _versions_of(identity)
        if versions != self._versions or (_UNCOUNTED in versions and layer.number <= self._number):
            return False
        self._number = layer.number
        return True

    def plan(
        self, layer: Layer, lengths: Lengths, pages: Pages = NO_PAGES, page_size: int = 0, mask: Mask | None = None
    ) -> None:
        """Plans for this layer; layers that differ only in window or sinks use the same plan."""
        self.identity = ()  # if this plan fails, it is for no batch
        arguments = layer.call.arguments(page_size, layer.window_left, mask is not None)
        self._attention.plan(lengths, pages, *self._checked.of(arguments), mask)

    def run(self, layer: Layer, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention of the planned batch, [tokens, num_q_heads, head_dim_vo]."""
        values = self._attention.values._replace(window_left=layer.window_left)
        out: torch.Tensor = self._attention.run(q, cache, values=values, sinks=layer.sinks)
        return out

    def run_lists(self, layer: Layer, q: torch.Tensor, rows: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
        """Attention of the planned rows to listed tokens, [tokens, num_q_heads, head_dim_vo]."""
        attention, tensors = self._attention, Tensors(q, rows, None, None)
        assert isinstance(attention, SelectedAttention)
        out: torch.Tensor = attention.run_indices(tensors, lists, False, NO_SCALES, layer.sinks, None)
        return out

    def planned_for(self, layer: Layer, identity: tuple[Any, ...], batch: Any) -> Any:
        """Remembers the batch. Keeps the tensors of `identity` alive, so that no other tensor gets their id."""
        self._versions, self._number = _versions_of(identity), layer.number
        self.identity, self.batch = identity, batch
        return batch


def _versions_of(identity: tuple[Any, ...]) -> tuple[int, ...]:
    """The versions of its tensors."""
    return tuple(
        _UNCOUNTED if tensor.is_inference() else tensor._version
        for tensor in identity
        if isinstance(tensor, torch.Tensor)
    )


_local = _Local()


def place(device: torch.device) -> tuple[torch.device, int]:
    """A device and its current stream, on which work runs in order."""
    return device, current_stream(device.index or 0) if device.type == "cuda" else 0


def workspace(device: torch.device) -> torch.Tensor:
    """Memory for partial results, which live during one run: all plans of a stream share it."""
    key = place(device)
    if key not in _local.workspaces:
        _local.workspaces[key] = torch.empty(_WORKSPACE_BYTES[device.type], dtype=torch.uint8, device=device)
    return _local.workspaces[key]


def shared(device: torch.device, kind: tuple[Any, ...], is_paged: bool, is_listed: bool = False) -> Planned:
    """This thread's plan of a kind; beyond _MOST_PLANS kinds the oldest plan is dropped."""
    key = (*place(device), *kind)
    planned = _local.planned.pop(key, None)
    if planned is None:
        make = SelectedAttention if is_listed else Attention
        names = SELECTED if is_listed else PAGED if is_paged else RAGGED
        planned = Planned(make(workspace(device), names=names, owner="flashpage.hf"))
        if len(_local.planned) >= _MOST_PLANS:
            del _local.planned[next(iter(_local.planned))]
    _local.planned[key] = planned
    return planned
