"""A step's work as tensors on the host."""

from __future__ import annotations

from typing import NamedTuple

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
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    writes: tuple[list[int], list[int], list[int]] = ([], [], [])
    if all(end - begin == 1 and not is_first for _, begin, end, is_first in works):
        return _decodes_in_table(works, block_size)
    for request, begin, end, is_first in works:
        first = 0 if is_first else begin  # slots of a shared prefix are new to the table too
        known = _slots(request.blocks, first, end, block_size)
        tokens += request.tokens[begin:end]
        positions += range(begin, end)
        slots += known[begin - first :]
        writes[0].extend([request.row] * (end - first))
        writes[1].extend(range(first, end))
        writes[2].extend(known)
    is_decode = all(end - begin == 1 for _, begin, end, _ in works)
    batch = ForwardBatch(
        ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
        tokens=_numbers(tokens),
        positions=_numbers(positions),
        out_slots=_numbers(slots),
        rows=_numbers([work.request.row for work in works]),
        seq_lens=_numbers([work.end for work in works]),
        new_lens=_numbers([work.end - work.begin for work in works]),
    )
    return batch, TableWrites(*map(_numbers, writes))


def _decodes_in_table(works: list[Work], block_size: int) -> tuple[ForwardBatch, TableWrites]:
    """A DECODE step whose requests are all in the table; make_batch itself builds those with a newly admitted one. What
    the model reads and what is written to the table are the same tensors."""
    places = [
        (request.tokens[at], at, request.blocks[at // block_size] * block_size + at % block_size, request.row)
        for request, at, _, _ in works
    ]
    tokens, positions, slots, rows = torch.tensor(places, dtype=torch.int32, device="cpu").T.contiguous()
    batch = ForwardBatch(
        ForwardMode.DECODE,
        tokens=tokens,
        positions=positions,
        out_slots=slots,
        rows=rows,
        seq_lens=positions + 1,
        new_lens=torch.ones_like(positions),
    )
    return batch, TableWrites(rows, positions, slots)


def _slots(blocks: list[int], first: int, end: int, block_size: int) -> list[int]:
    """Slots of tokens [first, end) of a request."""
    if end - first == 1:
        return [blocks[first // block_size] * block_size + first % block_size]
    return [blocks[i // block_size] * block_size + i % block_size for i in range(first, end)]


def _numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
