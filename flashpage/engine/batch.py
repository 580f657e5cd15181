"""A step's work as tensors, on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..integrations import ForwardBatch, ForwardMode
from .scheduler import Work


class TableWrites(NamedTuple):
    """Slots that the request table must know before the step, [tokens] int32 each."""

    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


def make_batch(works: list[Work], block_size: int) -> tuple[ForwardBatch, TableWrites]:
    """One new token a request is a DECODE step, anything else an EXTEND step."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    writes: tuple[list[int], list[int], list[int]] = ([], [], [])
    for request, begin, end, is_first in works:
        new = [_slot(request.blocks, i, block_size) for i in range(begin, end)]
        tokens += request.tokens[begin:end]
        positions += range(begin, end)
        slots += new
        if is_first:  # those of the prefix that it shares
            new = [_slot(request.blocks, i, block_size) for i in range(begin)] + new
        writes[0].extend([request.row] * len(new))
        writes[1].extend(range(end - len(new), end))
        writes[2].extend(new)
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


def _slot(blocks: list[int], position: int, block_size: int) -> int:
    return blocks[position // block_size] * block_size + position % block_size


def _numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
