"""The batch of a step, made from the scheduler's works."""

from __future__ import annotations

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


def test_decodes_next_to_a_new_request() -> None:
    """The earlier slots of a new request are written to the table too; the model reads the last tokens alone."""
    made, writes = batch.make_batch([work(2, 5), work(0, 4), work(1, 2, is_first=True)], 4)
    assert made.mode is ForwardMode.DECODE
    expected = {
        "tokens": [204, 3, 101],
        "positions": [4, 3, 1],
        "out_slots": [17 * 4, 3, 7 * 4 + 1],
        "rows": [2, 0, 1],
        "seq_lens": [5, 4, 2],
        "new_lens": [1, 1, 1],
    }
    assert {name: getattr(made, name).tolist() for name in expected} == expected
    assert [written.tolist() for written in writes] == [[2, 0, 1, 1], [4, 3, 1, 0], [17 * 4, 3, 7 * 4 + 1, 7 * 4]]
    assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in (*writes, made.positions))
