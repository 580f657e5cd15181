"""A step's work as tensors on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .forward_batch import ForwardBatch, ForwardMode
from .scheduler import Work


class TableWrites(NamedTuple):
    """Slots that the request table needs before the step, [tokens] int32 each."""

    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


def make_batch(works: list[Work], block_size: int) -> tuple[ForwardBatch, TableWrites]:
    """The batch of a step: DECODE if each request has one new token, else EXTEND."""
    spans = [(request, begin, end) for request, begin, end, _ in works]
    # Slots of a shared prefix are new to the table too.
    spans += [(request, 0, begin) for request, begin, _, is_first in works if is_first]
    places = [(of.row, at, of.blocks[at // block_size]) for of, begin, end in spans for at in range(begin, end)]
    rows, positions, blocks = _numbers(places).view(-1, 3).T.contiguous()
    writes = TableWrites(rows, positions, slots=blocks * block_size + positions % block_size)
    tokens = [token for request, begin, end, _ in works for token in request.tokens[begin:end]]
    new_lens = [end - begin for _, begin, end, _ in works]
    batch = ForwardBatch(
        ForwardMode.DECODE if all(count == 1 for count in new_lens) else ForwardMode.EXTEND,
        tokens=_numbers(tokens),
        positions=positions[: len(tokens)],
        out_slots=writes.slots[: len(tokens)],
        rows=_numbers([work.request.row for work in works]),
        seq_lens=_numbers([work.end for work in works]),
        new_lens=_numbers(new_lens),
    )
    return batch, writes


def _numbers(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
