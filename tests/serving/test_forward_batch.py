"""A step's tensors between host and device: copies to the host are waited for, copies to the device are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashpage.integrations import ForwardBatch, ForwardMode

NAP_CYCLES = 20_000_000  # about 10 ms: the host is faster than that
MOVED = ("tokens", "positions", "out_slots", "rows", "tree_mask", "encoder_slots")


def batch_on(device: str) -> ForwardBatch:
    """Two requests, of 5 and 4 tokens, each with three new ones; no number is 0, as new memory may hold zeros."""
    new, lens = torch.arange(1, 7, dtype=torch.int32), torch.tensor([5, 4], dtype=torch.int32)
    tensors = [t.to(device) for t in (new, new + 10, new + 20, lens + 30, torch.ones(27, dtype=torch.bool), new + 40)]
    tokens, positions, out_slots, rows, mask, encoder_slots = tensors
    more = {"tree_mask": mask, "encoder_slots": encoder_slots}
    return ForwardBatch(ForwardMode.VERIFY, tokens, positions, out_slots, rows, lens, lens.new_full((2,), 3), **more)


class CopiesToTheHost(TorchDispatchMode):
    """Records for each copy whether it was non-blocking."""

    def __init__(self) -> None:
        super().__init__()
        self.unwaited: list[bool] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if call is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            self.unwaited.append(kwargs.get("non_blocking", False))
        return call(*args, **kwargs)


def test_what_comes_to_the_host_is_waited_for() -> None:
    """Uses meta tensors, as there may be no card: torch would copy to pinned memory and return at once."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = batch_on("cpu")
        on_card = torch.zeros(6, dtype=torch.int32, device="cuda")
        batch = ForwardBatch(
            batch.mode,
            tokens=on_card,
            positions=on_card,
            out_slots=on_card,
            rows=on_card,
            seq_lens=batch.seq_lens,
            new_lens=batch.new_lens,
            tree_mask=on_card,
            encoder_slots=on_card,
        )
        with CopiesToTheHost() as copies:
            found = batch.to(torch.device("cpu"))
    assert all(getattr(found, name).is_cpu for name in MOVED)
    assert copies.unwaited == [False, False, False], "one copy of all integers, and one of each other tensor"


def test_everything_arrives(device: str) -> None:
    there_and_back = batch_on("cpu").to(torch.device(device)).to(torch.device("cpu"))
    for name in (*MOVED, "seq_lens", "new_lens"):
        assert torch.equal(getattr(there_and_back, name), getattr(batch_on("cpu"), name)), name


@pytest.mark.cuda
def test_a_busy_card_is_waited_for() -> None:
    """The host reads the tensors at once, as runners do."""
    batch = batch_on("cuda")
    torch.cuda._sleep(NAP_CYCLES)
    found = batch.to(torch.device("cpu"))
    lists = {name: getattr(found, name).tolist() for name in MOVED}
    assert lists == {name: getattr(batch_on("cpu"), name).tolist() for name in MOVED}


@pytest.mark.cuda
def test_a_busy_card_is_not_waited_for_on_the_way_there() -> None:
    batch = batch_on("cpu")
    batch.to(torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * NAP_CYCLES)
    awake = torch.cuda.Event()
    awake.record()
    found = batch.to(torch.device("cuda"))
    assert not awake.query(), "the host waited for the stream"
    assert torch.equal(found.tokens.cpu(), batch.tokens)
