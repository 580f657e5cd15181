"""Captured steps: batches that fit a captured size give the eager step's results, and others are recognised. Without a
card the captured step runs in place of its replay, padded the same way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from paged_past import DIM, KV_HEADS, PLAIN, Q_HEADS, Past, dtype_of

from flashpage import FlashpageError
from flashpage.integrations import (
    AttentionLayer,
    DraftSteps,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    PagedAttention,
    batch_sizes_to_capture,
    tree_mask,
)

LENS = [70, 1, 33, 128, 5, 64, 17, 90]
CROSS = dataclasses.replace(PLAIN, index=1, is_cross=True)
WINDOW = dataclasses.replace(PLAIN, index=1, window_left=20)


class Layers:
    """A model of attention only: its inputs are computed from the tokens' numbers and positions."""

    def __init__(self, past: Past, layers: list[AttentionLayer], device: str) -> None:
        generator = torch.Generator().manual_seed(5)
        width = (Q_HEADS + 2 * KV_HEADS) * DIM
        self.past, self.layers, self.device = past, layers, torch.device(device)
        self.weights = torch.randn(256, width, generator=generator).to(device, dtype_of(device))
        self.backend = PagedAttention(past.table, past.pool, layers, dtype_of(device))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        qkv = (self.weights[batch.tokens] + batch.positions[:, None].to(self.weights.dtype) / 64).view(-1, 8, DIM)
        out = torch.zeros_like(qkv[:, :Q_HEADS])
        for layer in self.layers:
            new = (None, None) if layer.is_cross else (qkv[:, 4:6], qkv[:, 6:])
            out = out + self.backend.forward(qkv[:, :Q_HEADS] + out, *new, layer, batch)
        return out

    def eager(self, batch: ForwardBatch) -> torch.Tensor:
        batch = batch.to(self.device)
        self.backend.init_forward_metadata(batch)
        return self.forward(batch)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit on the CPU; on a card padding may move the cuts of requests."""
    tolerance = 0.0 if found.is_cpu else 4e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def on_host(past: Past, batch: ForwardBatch, tokens: int) -> ForwardBatch:
    """The batch on the host, with numbers for its tokens, as runners take it."""
    numbers = torch.arange(len(batch.out_slots), dtype=torch.int32) * 7 % 256 + tokens % 3
    batch = dataclasses.replace(batch.to(torch.device("cpu")), tokens=numbers.int())
    return dataclasses.replace(batch, tree_mask=None if batch.tree_mask is None else batch.tree_mask.cpu())


def first(past: Past, count: int) -> Past:
    return dataclasses.replace(past, rows=past.rows[:count], slots=past.slots[:count])


def decode_batch(past: Past, layers: list[AttentionLayer], count: int) -> ForwardBatch:
    """A decode batch of the first `count` requests."""
    skip, more = [0] * count, {}
    lens = LENS[:count]
    if any(layer.is_cross for layer in layers):
        skip, lens = [32] * count, [max(1, n - 32) for n in lens]
        more = {"encoder_lens": torch.tensor([20, 0, 32, 1] * 2, dtype=torch.int32)[:count]}
    return on_host(past, first(past, count).batch(ForwardMode.DECODE, [1] * count, lens, skip, **more), count)


@pytest.mark.parametrize("layers", [[PLAIN], [PLAIN, WINDOW], [PLAIN, CROSS]], ids=["plain", "window", "cross"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_replays_give_what_eager_steps_give(page_size: int, layers: list[AttentionLayer], device: str) -> None:
    """Batches of 1 to 7 in captured sizes of 1, 4 and 7, in any order."""
    past = Past.make([max(n, 40) for n in LENS], device, page_size, len(layers))
    for layer in layers:
        past.fill(layer, [max(n, 40) for n in LENS])
    model = Layers(past, layers, device)
    runner = GraphRunner(model.forward, model.backend, [4, 1, 7], model.device)
    assert runner.batch_sizes == [1, 4, 7]
    for count in (3, 7, 1, 4, 5, 2, 6, 7, 1):
        batch = decode_batch(past, layers, count)
        assert runner.can_run(batch)
        expected = model.eager(batch)
        assert not expected.isnan().any()
        pages = past.pool.kv(0)[1:].clone()
        assert_same(runner.run(batch), expected)
        assert torch.equal(
            past.pool.kv(0)[1:].nan_to_num(), pages.nan_to_num()
        )  # the padding wrote only to the unowned page
    assert runner.replays == 9
    if device == "cpu":
        assert past.pool.kv(0)[0, 0, 1:].isnan().all()  # only slot 0 was written


def test_batches_that_do_not_fit(device: str) -> None:
    past = Past.make(LENS, device, 16, 1)
    model = Layers(past, [PLAIN], device)
    runner = GraphRunner(model.forward, model.backend, [1, 4], model.device)
    assert runner.can_run(decode_batch(past, [PLAIN], 4))
    assert not runner.can_run(decode_batch(past, [PLAIN], 5))
    extend = on_host(past, past.batch(ForwardMode.EXTEND, [1] * 8, LENS), 1)
    assert not runner.can_run(extend)
    few = first(past, 2)
    assert not runner.can_run(on_host(few, few.batch(ForwardMode.EXTEND, [2, 1], [4, 1]), 1))


def test_captured_verifying(device: str) -> None:
    """Trees of four guesses, different in every step; the padding has no guesses."""
    past = Past.make([n + 4 for n in LENS], device, 16, 1)
    past.fill(PLAIN, LENS)
    model = Layers(past, [PLAIN], device)
    runner = GraphRunner(model.forward, model.backend, [2, 8], model.device, mode=ForwardMode.VERIFY, new_len=4)
    shapes = ([-1, 0, 0, 1], [-1, 0, 1, 2], [-1, -1, -1, -1], [-1, 0, 0, 0])
    for step, count in enumerate((1, 2, 5, 8, 3)):
        part, lens = first(past, count), [n + 4 for n in LENS[:count]]
        mask = tree_mask([shapes[(i + step) % 4] for i in range(count)], lens)
        batch = on_host(past, part.batch(ForwardMode.VERIFY, [4] * count, lens, tree_mask=mask), step)
        assert runner.can_run(batch)
        assert not runner.can_run(dataclasses.replace(batch, tree_mask=None))  # the captured step reads a mask
        expected = model.eager(batch)
        assert_same(runner.run(batch), expected)
        chain = dataclasses.replace(batch, tree_mask=tree_mask([shapes[1]] * count, lens))
        if step % 4 != 1 or count > 1:
            assert not torch.equal(model.eager(chain), expected)


def test_newer_engines_plan_by_one_name(device: str) -> None:
    past = Past.make(LENS, device, 16, 1)
    past.fill(PLAIN, LENS)
    model = Layers(past, [PLAIN], device)
    model.backend.init_cuda_graph_state(4, 4)
    expected = model.eager(decode_batch(past, [PLAIN], 4))
    for in_capture in (True, False):
        model.backend.metadata = None
        batch = decode_batch(past, [PLAIN], 4).to(model.device)
        model.backend.init_forward_metadata_out_graph(batch, in_capture)
        model.backend.init_forward_metadata_in_graph(batch)
        assert_same(model.forward(batch), expected)


def test_two_runners_share_a_backend(device: str) -> None:
    """Decodes and verifies alternately; a third runner would need more memory than the first has allocated."""
    past = Past.make([n + 4 for n in LENS], device, 16, 1)
    past.fill(PLAIN, LENS)
    model = Layers(past, [PLAIN], device)
    verify = GraphRunner(model.forward, model.backend, [2, 8], model.device, mode=ForwardMode.VERIFY, new_len=4)
    decode = GraphRunner(model.forward, model.backend, [2, 8], model.device)
    for count in (2, 5, 1):
        lens = [n + 4 for n in LENS[:count]]
        mask = tree_mask([[-1, 0, 0, 1]] * count, lens)
        guesses = first(past, count).batch(ForwardMode.VERIFY, [4] * count, lens, tree_mask=mask)
        for runner, batch in ((verify, on_host(past, guesses, 1)), (decode, decode_batch(past, [PLAIN], count))):
            expected = model.eager(batch)
            assert_same(runner.run(batch), expected)
    with pytest.raises(FlashpageError, match="max_batch=16 or max_rows=16"):
        GraphRunner(model.forward, model.backend, [16], model.device)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_drafts_are_planned_before_the_first_step(captured: bool, device: str) -> None:
    """Three guesses a request equal those of steps planned one after the other. Padding leaves no trace."""
    lens = [n + 3 for n in LENS]
    steps, past = 3, Past.make(lens, device, 16, 1)
    past.fill(PLAIN, [n - 1 for n in LENS])
    model = Layers(past, [PLAIN], device)
    drafts = DraftSteps([PagedAttention(past.table, past.pool, [PLAIN], dtype_of(device)) for _ in range(steps)])
    plain = model.backend

    def draft(batch: ForwardBatch) -> torch.Tensor:
        """Guesses [batch, steps, heads, dim]; they need not be good."""
        model.backend, found, tokens = drafts, [], batch.tokens  # type: ignore[assignment]
        for step in range(steps):
            found.append(model.forward(drafts.enter(batch, step, tokens)))
            tokens = (tokens * 7 + 3) % 256
        return torch.stack(found, 1)

    runner = GraphRunner(draft, drafts, [2, 8], model.device) if captured else None
    for count in (5, 1, 8, 2):
        batch, expected = decode_batch(past, [PLAIN], count), []
        model.backend, tokens = plain, batch.tokens
        for step in range(steps):
            part = first(past, count)
            one = part.batch(ForwardMode.DECODE, [1] * count, [n + step for n in LENS[:count]])
            expected.append(model.eager(dataclasses.replace(on_host(past, one, 0), tokens=tokens)))
            tokens = (tokens * 7 + 3) % 256
        pages = past.pool.kv(0)[1:].clone()
        if runner is None:
            drafts.init_forward_metadata(batch.to(model.device))
            found = draft(batch.to(model.device))
        else:
            found = runner.run(batch)
        assert_same(found, torch.stack(expected, 1))
        assert torch.equal(past.pool.kv(0)[1:].nan_to_num(), pages.nan_to_num())
        assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (160, [1, 2, 4, *range(8, 161, 8)]),
    ],
)
def test_batch_sizes_to_capture(most: int, sizes: list[int]) -> None:
    assert batch_sizes_to_capture(most) == sizes


def test_the_largest_is_captured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    past = Past.make(LENS, "cpu", 16, 1)
    model, sizes = Layers(past, [PLAIN], "cpu"), []
    begin = model.backend.init_forward_metadata_capture_cuda_graph

    def note(batch: ForwardBatch) -> None:
        sizes.append(batch.batch_size)
        begin(batch)

    monkeypatch.setattr(model.backend, "init_forward_metadata_capture_cuda_graph", note)
    GraphRunner(model.forward, model.backend, [1, 8, 2, 4], model.device)
    assert sizes == [8, 4, 2, 1]


def test_captures_follow_each_other_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reuses a capture's freed memory only for captures on its stream. Without a card arguments are checked."""
    requested, backend = [], MagicMock()
    backend.get_cuda_graph_seq_len_fill_value.return_value = 0

    def graph(graph: Any, pool: Any, stream: Any) -> contextlib.AbstractContextManager[None]:
        requested.append((pool, stream))
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for name in ("Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: MagicMock())  # another one in each call
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **more: zeros(*size, **more))  # on the host
    GraphRunner(lambda batch: batch.tokens, backend, [1, 8, 2], torch.device("cuda"))
    pools, streams = zip(*requested, strict=True)
    assert streams[1] is streams[0] and streams[2] is streams[0]
    assert pools[0] is None and pools[1] is not None and pools[2] is pools[1]


def test_small_sizes_are_compiled() -> None:
    """Batches of other sizes run the step uncompiled."""
    past = Past.make(LENS, "cpu", 16, 1)
    past.fill(PLAIN, LENS)
    model, compiled = Layers(past, [PLAIN], "cpu"), []

    def compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        traced = torch.compile(forward, backend="eager", dynamic=False)

        def call(batch: ForwardBatch) -> torch.Tensor:
            compiled.append(batch.batch_size)
            return traced(batch)

        return call

    runner = GraphRunner(
        model.forward, model.backend, [2, 4, 8], model.device, compile_forward=compile_forward, compile_limit=4
    )
    assert compiled == [4, 2]
    for count in (2, 4):
        batch = decode_batch(past, [PLAIN], count)
        torch.testing.assert_close(runner.run(batch), model.eager(batch))
    assert compiled == [4, 2, 2, 4]


@pytest.mark.parametrize(("sizes", "told"), [([], "batch_sizes="), ([4, 0], "batch_sizes=0 is out of range")])
def test_sizes_that_cannot_be_captured_are_reported(sizes: list[int], told: str) -> None:
    with pytest.raises(FlashpageError, match=told):
        GraphRunner(lambda batch: batch.tokens, MagicMock(), sizes, torch.device("cpu"))


@pytest.mark.cuda
def test_captures_share_one_pool_of_memory() -> None:
    """Captures also run inside the caller's context."""
    past = Past.make(LENS, "cuda", 16, 1)
    model, entered, reserved = Layers(past, [PLAIN], "cuda"), [], []

    def forward(batch: ForwardBatch) -> torch.Tensor:
        scratch = torch.ones(batch.batch_size, 4 << 20, device="cuda")  # 16 MiB for each request
        return model.forward(batch) + scratch[:, :1, None].half() * 0

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        entered.append(1)
        yield
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())

    torch.cuda.empty_cache()  # memory that earlier tests have freed
    before = torch.cuda.memory_reserved()
    GraphRunner(forward, model.backend, [2, 4, 6, 8], model.device, capture_context=context)
    assert len(entered) == 4
    assert reserved[0] - before > 100 << 20  # the scratch memory of the largest size
    assert reserved[-1] - reserved[0] < 40 << 20  # other sizes reuse it
