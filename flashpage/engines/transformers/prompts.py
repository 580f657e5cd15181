"""Continuous batching's steps with prompts, planned on the device.

The lengths stay there: a step copies nothing to the host, and may be captured in a CUDA graph, which plans at every
replay. Rows, requests and slots past the last ones are padding, which gives a graph's steps one shape.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

import torch

from ...base.memory import is_capturing
from ...wrappers.function_plans import Tables, plan_of
from .call import Layer

Ends = tuple[torch.Tensor, torch.Tensor]

_local = threading.local()  # this thread's newest step of each kind of layer
# Configurations, by id, of models whose steps with prompts are captured. The step that runs before a capture must plan
# as the captured one does. From transformers 5.24 on no argument of an attention function says that one follows.
_captured: WeakValueDictionary[int, Any] = WeakValueDictionary()


def capture(config: Any, is_captured: bool) -> None:
    """Notes whether steps with prompts are captured, for the model of which this is the text's configuration."""
    if is_captured:
        _captured[id(config)] = config
    else:
        _captured.pop(id(config), None)


def are_captured(kwargs: dict[str, Any], rows: int) -> bool:
    """Whether they are, for the model of a step with these arguments and so many rows."""
    cache: Any = kwargs.get("cache")
    longest = kwargs.get("max_seqlen_k")
    if longest is not None:
        # 5.17 gives captured steps alone a bound in place of the longest request. A step that is not captured may have
        # such a longest request by chance; a plan of the device serves it as well.
        lengths = longest.values() if isinstance(longest, dict) else (longest,)
        return kwargs["max_seqlen_q"] == rows and all(_is_bound(length, cache.num_pages) for length in lengths)
    config = kwargs.get("config") if cache is None else getattr(cache, "config", None)
    return config is not None and _captured.get(id(config)) is config


def _is_bound(length: int, most: int) -> bool:
    """Whether transformers' 5.17 makes such a bound of lengths: a power of two from 1,024 on, at most `most`."""
    return length == most or (length >= 1024 and length.bit_count() == 1)


class Step:
    """Lengths and places of one forward, shared by its layers of one kind."""

    def __init__(self, ends: Ends, slots: torch.Tensor | None, count: int) -> None:
        """ends: where each request's rows and tokens end, [requests + 1]; slots: [count], None: 0, 1, 2, ..."""
        self.given = ends, slots, count
        self.q_indptr, kv_indptr = (each.int() for each in ends)
        begins, self.seq_lens = kv_indptr[:-1], kv_indptr.diff()
        if slots is None:
            slots = torch.arange(count, dtype=torch.int32, device=kv_indptr.device)
        self.table_rows: torch.Tensor | None = None  # each request's row of the table; None: 0, 1, 2, ...
        if slots.is_cpu:
            # The plan copies the table, so it has a row for each request, as long as the longest one.
            longest = int(self.seq_lens.max()) if len(begins) else 0
            padded = torch.nn.functional.pad(slots.int(), (0, longest))
            self.table = padded[begins.long().unsqueeze(1) + torch.arange(longest)]
        else:
            # Each request's row begins where its slots do, so rows overlap. The last ones end in the padding.
            padded = torch.zeros(2 * count, dtype=torch.int32, device=slots.device)
            padded[:count] = slots
            self.table, self.table_rows = padded.as_strided((count + 1, count), (1, 1)), begins

    def is_of(self, ends: Ends, slots: torch.Tensor | None, count: int) -> bool:
        """Whether it was made from these tensors: each forward passes the same objects to its layers."""
        old = self.given
        return old[0][0] is ends[0] and old[0][1] is ends[1] and old[1] is slots and old[2] == count

    @staticmethod
    def of(kind: Any, ends: Ends, slots: torch.Tensor | None, count: int) -> Step:
        """The newest step of a kind, or a new one. A forward that is captured has its own, even if the one before had
        the same tensors."""
        steps: dict[Any, Step] = _local.__dict__.setdefault("steps", {})
        key = kind, is_capturing(ends[0].device)
        held = steps.get(key)
        if held is None or not held.is_of(ends, slots, count):
            held = steps[key] = Step(ends, slots, count)
        return held


def attend(
    layer: Layer,
    kind: Any,
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    ends: Ends,
    slots: torch.Tensor | None,
    write: Any,
) -> torch.Tensor:
    """Attention of requests joined in one row.

    Args:
        kind: of layers with equal lengths and slots.
        query: [1, heads, rows, dim].
        pages: keys and values [slots of the cache, 1, num_kv_heads, dim], pages of one token.
        ends: where each request's rows and tokens end, [requests + 1]; padding has neither.
        slots: of all tokens, request after request; None: 0, 1, 2, ...
        write: write_index; its memory, which no plan holds, lives as long as the graphs of its manager.

    Returns:
        [1, rows, num_q_heads, dim_vo], zeros for padding.
    """
    q = query[0].transpose(0, 1)
    step = Step.of(kind, ends, slots, len(pages[0]) if slots is None else len(slots))
    # Most requests of a graph's shape are padding or have one row; the kernel is the one for a prompt of all rows.
    tables = Tables(step.seq_lens, step.table, step.q_indptr, len(q), step.table_rows, typical_requests=1)
    arguments = layer.call.arguments(1, layer.window_left, has_mask=False)
    owner = write if isinstance(write, torch.Tensor) else write[0]
    attention = plan_of(q.device, "NHD", arguments).on_device(tables, step, owner)
    out = q.new_zeros(*q.shape[:2], layer.call.head_dim_vo)  # rows of no request are not written
    attention.run(q, (pages[0], pages[1]), out, sinks=layer.sinks)
    return out.unsqueeze(0)
