"""Captured steps of a model, one for each batch size; a batch runs in the smallest one that holds it."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..base import checks
from ..base.errors import FlashpageError
from .backend import AttentionBackend
from .forward_batch import ForwardBatch, ForwardMode
from .token_pool import UNOWNED_PAGE
from .transfer import joined

Forward = Callable[[ForwardBatch], torch.Tensor]  # a step of the model: [new tokens, ...]
_WARM_UPS = 2


def batch_sizes_to_capture(max_batch: int) -> list[int]:
    """1, 2, 4 and the multiples of 8 below max_batch, and max_batch itself."""
    checks.whole("max_batch", max_batch, 1, 1 << 20)
    sizes = [1, 2, 4, *range(8, max_batch, 8), max_batch]
    return sorted({size for size in sizes if size <= max_batch})


class GraphRunner:
    """Captures a model's step at several batch sizes and replays it for any batch that fits.

    The largest size is captured first, and all sizes share one stream and one memory pool, so that smaller captures
    reuse the memory of larger ones. Without a card the step itself runs in place of the replay: on the same buffers,
    padded in the same way.

    Args:
        forward: a step; reads the tensors of its batch and calls the backend for attention.
        batch_sizes: requests of the captured batches.
        mode: DECODE, or VERIFY.
        new_len: new tokens of each request; 1 for DECODE.
        capture_context: a context to enter around each capture, such as that of tensor parallel collectives.
        compile_forward: wraps `forward` for batches of at most compile_limit requests, for example
            functools.partial(torch.compile, dynamic=False); None: nothing is compiled.
    """

    def __init__(
        self,
        forward: Forward,
        backend: AttentionBackend,
        batch_sizes: Sequence[int],
        device: torch.device,
        *,
        mode: ForwardMode = ForwardMode.DECODE,
        new_len: int = 1,
        capture_context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        compile_forward: Callable[[Forward], Forward] | None = None,
        compile_limit: int = 32,
    ) -> None:
        sizes = {checks.whole("batch_sizes", size, 1) for size in batch_sizes}
        if not sizes:
            raise FlashpageError("batch_sizes=[]: pass the sizes to capture, such as [1, 2, 4, 8].")
        self.backend, self.batch_sizes, self.device = backend, sorted(sizes), device
        self.mode, self.new_len, self.replays = mode, new_len, 0
        self._forward, self._context = forward, capture_context
        self._compiled = None if compile_forward is None else compile_forward(forward)
        self._compile_limit = compile_limit
        most = self.batch_sizes[-1]
        # Tokens, positions, slots and table rows of a batch, one after the other.
        self._inputs = torch.zeros(3 * most * new_len + most, dtype=torch.int32, device=device)
        self._graphs: dict[int, Callable[[], object]] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        # torch reuses memory that a capture has freed only for captures on the same stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool: Any = None
        backend.init_cuda_graph_state(most, most * new_len)
        for size in reversed(self.batch_sizes):
            self._capture(size)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether a captured size holds the batch."""
        fits = batch.batch_size <= self.batch_sizes[-1] and batch.encoder_slots is None
        if self.mode is ForwardMode.VERIFY and batch.tree_mask is None:
            return False  # captured steps of this mode read a mask
        return fits and batch.mode is self.mode and bool((batch.new_lens.numpy() == self.new_len).all())

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """The step's output for a batch whose tensors are on the host; valid until the next run."""
        size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, batch.batch_size)]
        padded = self._padded(batch, size)
        inputs = joined((padded.tokens, padded.positions, padded.out_slots, padded.rows), self.device)
        self._inputs[: len(inputs)].copy_(inputs, non_blocking=True)
        self.backend.init_forward_metadata_replay_cuda_graph(self._on_device(padded))
        self._graphs[size]()
        self.replays += 1
        return self._outputs[size][: batch.batch_size * self.new_len]

    def _capture(self, size: int) -> None:
        batch = self._on_device(self._padded(self._empty(), size))
        self.backend.init_forward_metadata_capture_cuda_graph(batch)
        forward = self._compiled if self._compiled is not None and size <= self._compile_limit else self._forward

        def step() -> None:
            self._outputs[size] = forward(batch)

        stream = self._stream
        if stream is None:
            step()
            self._graphs[size] = step
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._context(), torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = graph.replay

    # ---------------------------------------------------------------- batches

    def _empty(self) -> ForwardBatch:
        nothing = torch.zeros(0, dtype=torch.int32, device="cpu")
        mask = nothing.bool() if self.mode is ForwardMode.VERIFY else None
        return ForwardBatch(
            self.mode,
            tokens=nothing,
            positions=nothing,
            out_slots=nothing,
            rows=nothing,
            seq_lens=nothing,
            new_lens=nothing,
            tree_mask=mask,
            encoder_lens=nothing,
        )

    def _padded(self, batch: ForwardBatch, size: int) -> ForwardBatch:
        """The batch, padded with requests of the fill length, which write to the unowned page."""
        more = size - batch.batch_size
        if not more:
            return batch
        rows = more * self.new_len
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        mask = batch.tree_mask
        if mask is not None:
            mask = _longer(mask, rows * fill, 1)
        return dataclasses.replace(
            batch,
            tokens=_longer(batch.tokens, rows, 0),
            positions=_longer(batch.positions, rows, 0),
            out_slots=_longer(batch.out_slots, rows, UNOWNED_PAGE),
            rows=_longer(batch.rows, more, 0),
            seq_lens=_longer(batch.seq_lens, more, fill),
            new_lens=_longer(batch.new_lens, more, self.new_len),
            tree_mask=mask,
            encoder_lens=None if batch.encoder_lens is None else _longer(batch.encoder_lens, more, fill),
        )

    def _on_device(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with the captured tensors in place of its own, whose contents `run` has copied there."""
        rows = batch.batch_size * self.new_len
        parts = self._inputs[: 3 * rows + batch.batch_size].split([rows, rows, rows, batch.batch_size])
        mask = None if batch.tree_mask is None else batch.tree_mask.to(self.device, non_blocking=True)
        names = ("tokens", "positions", "out_slots", "rows")
        return dataclasses.replace(batch, **dict(zip(names, parts, strict=True)), tree_mask=mask)


def _longer(tensor: torch.Tensor, count: int, value: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_full((count,), value)])
