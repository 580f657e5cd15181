"""Plans of functions that are called once a layer and have no `plan`: this thread's objects, one for each set of
options and each stream, which share workspaces.

Lengths that the device has are planned there at every call, so a call waits for nothing and may be captured in a graph.
Lengths that decide a plan by their values on the host are planned once, and the plan stays until others are given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..base.errors import CapabilityError
from ..base.memory import is_capturing
from ..plan.device_lengths import TableLengths
from ..plan.lengths import Lengths, Names
from ..plan.page_indices import Pages
from ..plan.session import current_stream
from .base import PAGED, RAGGED, Attention
from .latent_attention import LatentAttention
from .latent_sparse import SelectedAttention
from .plan_arguments import Arguments, LatentArguments

_FLOAT_BYTES = {"cpu": 32 << 20, "cuda": 128 << 20}
_INT_BYTES = 1 << 18  # a larger plan gets more
_MOST_PLANS = 64  # sets of options that a thread keeps

_local = threading.local()
_captured: set[Attention] = set()  # kept, as graphs outlive threads
_owned: set[tuple[StorageWeakRef, Attention]] = set()  # kept as long as memory that their graphs read


class Tables(NamedTuple):
    """Lengths of a batch on the device, as `plan_on_device` takes them."""

    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    q_indptr: torch.Tensor | None = None  # None: as many rows for each request as the options say
    max_rows: int = 0  # with q_indptr: rows of q
    table_rows: torch.Tensor | None = None  # each request's row of the tables; None: 0, 1, 2, ...
    typical_requests: int | None = None  # how many have nearly all rows; None: all
    list_entries: int = 0  # of a row's lists, if it has two; 0: the tables' columns


class FunctionPlan:
    """The plan of one set of options."""

    __slots__ = ("_held", "_is_captured", "attention", "options", "values")

    def __init__(self, attention: Attention, arguments: Arguments) -> None:
        self.attention = attention
        self.options, self.values = arguments.checked()
        self._is_captured = False
        self._held: Hashable = None  # what the newest plan was made from; None: nothing that may serve again

    def on_device(self, tables: Tables, key: Hashable = None, owner: torch.Tensor | None = None) -> Attention:
        """The Attention, after it planned such lengths on the device, unless `key` is the newest plan's: the key of
        layers that have equal lengths and run one after the other, all of them or none in a graph. `owner`: memory from
        outside of the graph that a graph reads, without which nobody replays it; None: graphs are kept for ever.

        A replay makes the plan of its graph, so once a call was captured every other call plans.
        """
        captures = is_capturing(self.attention.device)
        self._is_captured |= captures
        if key is not None and key == self._held and (captures or not self._is_captured):
            return self._used(owner)
        self._held = None
        given = TableLengths(
            self.attention.device,
            tables.seq_lens,
            tables.block_tables,
            q_indptr=tables.q_indptr,
            table_rows=tables.table_rows,
            num_requests=None,
            max_rows=tables.max_rows,
            options=self.options,
            typical_requests=tables.typical_requests,
            list_entries=tables.list_entries,
        )
        self.attention.plan_on_device(given, self.options, self.values)
        self._held = key
        return self._used(owner)

    def on_host(self, key: Hashable, batch: Callable[[], tuple[Lengths, Pages]]) -> Attention:
        """The Attention with a plan of this batch; equal keys mean equal batches, None: never equal.

        A graph makes its plan at every replay, so once a call was captured every call plans.
        """
        captures = is_capturing(self.attention.device)
        if key is None or key != self._held or self._is_captured or captures:
            self._held = None
            lengths, pages = batch()
            if captures and not all(tensor is None or tensor.is_cpu for tensor in lengths):
                raise CapabilityError(
                    "lengths on the device cannot be copied to the host while a graph is captured: "
                    "pass a block table, with which the device plans, or call this outside of the graph."
                )
            self._is_captured |= captures
            self.attention.plan(lengths, pages, self.options, self.values)
            self._held = key
        return self._used()

    def _used(self, owner: torch.Tensor | None = None) -> Attention:
        if is_capturing(self.attention.device):
            if owner is None:
                _captured.add(self.attention)
            else:
                _owned.difference_update([kept for kept in tuple(_owned) if kept[0].expired()])
                _owned.add((StorageWeakRef(owner.untyped_storage()), self.attention))
        return self.attention


class _Seen:
    """A tensor and its version: equal if it is one tensor that torch has not seen written in between. On the CPU its
    numbers are compared too, because arrays that share a tensor's memory are written without torch."""

    __slots__ = ("_numbers", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, -1 if tensor.is_inference() else tensor._version
        self._numbers = tensor.tolist() if tensor.is_cpu else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen) or self._numbers != other._numbers:
            return False
        return self._tensor is other._tensor and self._version == other._version

    def __hash__(self) -> int:
        return id(self._tensor)


def key_of(*tensors: torch.Tensor) -> Hashable:
    """A key of `on_host` for lengths in tensors; None, so that every call plans, for tensors of inference mode, whose
    writes torch does not count. Neither does it count writes by kernels of others: give those new tensors."""
    return None if any(tensor.is_inference() for tensor in tensors) else tuple(map(_Seen, tensors))


def key_of_step(step: Hashable, *tensors: torch.Tensor) -> Hashable:
    """A key of `on_device` for calls whose caller promises equal lengths while it passes this `step`. Page numbers may
    change: cards read them in place, and on the CPU numbers are compared."""
    return (step, is_capturing(tensors[0].device), *map(_Seen, tensors))


def plan_of(
    device: torch.device, kv_layout: str, arguments: Arguments, names: Names | None = None, workspace: Any = None
) -> FunctionPlan:
    """This thread's plan for a device, its current stream, a layout and options; `names`: the caller's, of lengths;
    `workspace`: the caller's, if the function takes one (_place)."""
    place = _place(device, workspace)
    plans: dict[Any, FunctionPlan] = _local.__dict__.setdefault("plans", {})
    key: Any = place, kv_layout, names, type(arguments), arguments
    if not isinstance(arguments, LatentArguments):
        key = *key[:-1], arguments[:-1], *arguments.own.items()
    try:
        found = plans.pop(key, None)
    except TypeError:  # an argument that is no number, such as a list
        arguments.checked()
        raise
    if found is None:
        while len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        if names is None:
            names = RAGGED if getattr(arguments, "kv_source", "paged") == "ragged" else PAGED
        usual = plans.get((_Place(*place[:2]), *key[1:]))
        int_bytes = _INT_BYTES if usual is None else usual.attention.session.workspaces.int_bytes
        found = FunctionPlan(_attention(place, kv_layout, names, _kind_of(arguments), int_bytes), arguments)
    plans[key] = found  # the newest is the last
    return found


class _Place(NamedTuple):
    """What shares memory for plans and partial results."""

    device: torch.device
    stream: int
    workspace: int = 0  # address of the caller's


def _place(device: torch.device, workspace: Any) -> _Place:
    """Where a call is planned and run. torch captures all graphs on one stream, unless it is given another: those whose
    calls have different workspaces share no memory, so that they may be replayed at the same time. The calls captured
    first keep the memory that they were warmed up with."""
    found = _Place(device, current_stream(device.index) if device.type == "cuda" else 0)
    captured: dict[_Place, list[int]] = _local.__dict__.setdefault("captured", {})  # addresses of workspaces
    captures = is_capturing(device)
    if isinstance(workspace, torch.Tensor) and workspace.numel() and (captures or found in captured):
        known, address = captured.setdefault(found, []), workspace.data_ptr()
        if captures and address not in known:
            known.append(address)
        if address in known[1:]:
            return found._replace(workspace=address)
    return found


def _kind_of(arguments: Arguments) -> type[Attention]:
    if not isinstance(arguments, LatentArguments):
        return Attention
    return SelectedAttention if arguments.is_selected else LatentAttention


def _attention(place: _Place, kv_layout: str, names: Names, kind: type[Attention], int_bytes: int) -> Attention:
    device = place.device
    workspaces: dict[Any, torch.Tensor] = _local.__dict__.setdefault("workspaces", {})
    shared = workspaces.get(place)
    if shared is None:
        shared = workspaces[place] = torch.empty(_FLOAT_BYTES[device.type], dtype=torch.uint8, device=device)
    attention = kind(shared, kv_layout, names=names)
    attention.reset_workspace_buffer(shared, torch.empty(int_bytes, dtype=torch.uint8, device=device))
    return attention
