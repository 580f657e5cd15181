"""A step's work as tensors on the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .forward_batch import ForwardBatch, ForwardMode
from .scheduler import Work


class TableWrites(NamedTuple):
    """Slots that the request table needs before the step, [tokens] int32 each."""

    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


def make_batch(works: list[Work], block_size: int) -> tuple[ForwardBatch, TableWrites]:
    """The batch of a step: DECODE if each request has one new token, else EXTEND.

    A token that the host has not read is -1 - i: the i-th of those that the step before computes.
    """
    spans = [(request, begin, end) for request, begin, end, _ in works]
    # Slots of a shared prefix are new to the table too.
    spans += [(request, 0, begin) for request, begin, _, is_first in works if is_first and begin]
    begins, ends = _array([begin for _, begin, _ in spans]), _array([end for *_, end in spans])
    first_blocks, counts = begins // block_size, ends - begins
    own_blocks = [of.blocks[begin // block_size : -(-end // block_size)] for of, begin, end in spans]
    blocks, before = _array(list(itertools.chain(*own_blocks))), _starts(_array(list(map(len, own_blocks))))
    positions = np.arange(counts.sum(), dtype=np.int32) + np.repeat(begins - _starts(counts), counts)
    places = np.repeat(before - first_blocks, counts) + positions // block_size  # of the block that holds each position
    slots = blocks[places] * block_size + positions % block_size
    rows = np.repeat(_array([of.row for of, *_ in spans]), counts)
    writes = TableWrites(*map(torch.from_numpy, (rows, positions, slots)))
    tokens: list[int] = []
    for request, begin, end, _ in works:
        tokens += request.tokens[begin:end]
        if end > len(request.tokens):
            tokens.append(-1 - request.place)
    new_lens = counts[: len(works)]
    batch = ForwardBatch(
        ForwardMode.DECODE if (new_lens == 1).all() else ForwardMode.EXTEND,
        tokens=torch.from_numpy(_array(tokens)),
        positions=writes.positions[: len(tokens)],
        out_slots=writes.slots[: len(tokens)],
        rows=torch.from_numpy(_array([work.request.row for work in works])),
        seq_lens=torch.from_numpy(ends[: len(works)]),
        new_lens=torch.from_numpy(new_lens),
    )
    return batch, writes


def _array(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _starts(counts: np.ndarray) -> np.ndarray:
    """How many lie before each part, for parts of so many."""
    return np.cumsum(counts, dtype=np.int32) - counts
