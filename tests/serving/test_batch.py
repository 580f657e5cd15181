"""The batch of a step, made from the scheduler's works."""

from __future__ import annotations

import dataclasses

import torch

from flashpage.serving import batch
from flashpage.serving.forward_batch import ForwardMode
from flashpage.serving.request import Request
from flashpage.serving.scheduler import Work


def work(row: int, length: int, is_first: bool = False) -> Work:
    """The last token of a request whose blocks of four tokens lie apart in the pool."""
    request = Request([100 * row + i for i in range(length)], 4)
    request.row, request.blocks = row, [7 * row + 3 * i for i in range(-(-length // 4))]
    return Work(request, length - 1, length, is_first)


def test_decodes_in_the_table_are_as_those_among_new_requests() -> None:
    """Both ways to build a decode step give the same numbers; the one of a new request adds its earlier slots."""
    known = [work(2, 5), work(0, 4), work(3, 9)]
    own, writes = batch.make_batch(known, 4)
    mixed, more_writes = batch.make_batch([*known, work(1, 2, is_first=True)], 4)
    assert own.mode is mixed.mode is ForwardMode.DECODE
    for field in dataclasses.fields(own):
        a, b = getattr(own, field.name), getattr(mixed, field.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype is b.dtype and torch.equal(a, b[: len(a)]), field.name
    for few, many in zip(writes, more_writes, strict=True):
        assert torch.equal(few, many[: len(few)]) and len(many) == len(few) + 2
