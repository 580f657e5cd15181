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


def test_a_token_that_was_not_read() -> None:
    """It stands for its place among the tokens of the step before."""
    known, unread = work(0, 6), work(1, 6)
    request = unread.request
    request.tokens, request.place, request.blocks = request.tokens[:5], 2, [9, 12]
    made, _ = batch.make_batch([known, Work(request, 5, 6, False)], 4)
    assert made.tokens.tolist() == [5, -3] and made.positions.tolist() == [5, 5]
    assert made.out_slots.tolist() == [3 * 4 + 1, 12 * 4 + 1] and made.mode is ForwardMode.DECODE


def test_prompts_next_to_decodes() -> None:
    first, chunk = work(0, 3), work(1, 11)
    chunk = chunk._replace(begin=2, end=9)
    made, writes = batch.make_batch([first, chunk], 4)
    assert made.mode is ForwardMode.EXTEND and made.new_lens.tolist() == [1, 7]
    assert made.positions.tolist() == [2, *range(2, 9)] and made.tokens.tolist() == [2, *range(102, 109)]
    assert made.out_slots.tolist() == [2, 30, 31, *range(40, 44), 52]
    assert writes.rows.tolist() == [0, *[1] * 7] and writes.slots.tolist() == made.out_slots.tolist()
