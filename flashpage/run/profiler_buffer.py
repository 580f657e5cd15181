"""FlashInfer's profiler buffers: stamps of a run as the events that flashinfer.profiler.export_to_perfetto_trace reads.

Element 0 holds the numbers of blocks and groups, each later one an event: its tag in the lower 32 bits (kind, event,
block, SM), the lower 32 bits of a clock in nanoseconds in the upper ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..base import checks
from ..base.errors import RunError
from .stamps import NAMES, Recorder, StampedRun

_BEGIN, _END = 0, 1
_MOST_BLOCKS = 1 << 12  # bits 12 to 23 of a tag


class Event(NamedTuple):
    """An entry of the caller's list of names, between two stamps."""

    number: int  # in the list
    begin: str
    end: str


# FlashInfer's lists: prefill, decode, reduction; and for latent rows issue-load-q, issue-load-kv, write-o,
# softmax-update, gemm-qk, gemm-pv, rescale-o, write-p-smem, split-k.
PREFILL, DECODE = (Event(0, "start", "written"),), (Event(1, "start", "written"),)
REDUCTION = Event(2, "written", "end")
LATENT = (
    Event(1, "first_load", "first_tile"),
    Event(4, "first_tile", "last_tile"),
    Event(2, "last_tile", "written"),
    Event(8, "written", "end"),
)


def events_of(run: StampedRun, is_latent: bool) -> list[tuple[Event, ...]]:
    """The events of each part of a run."""
    if is_latent:
        return [LATENT for _ in run.parts]
    return [((*DECODE, REDUCTION) if "decode" in kernel else (*PREFILL, REDUCTION)) for kernel in run.kernels]


class Recorded(Protocol):
    """The part of an Attention (wrappers/base.py) that a profiled run uses."""

    def recorded(self) -> AbstractContextManager[Recorder]: ...


def run_profiled(
    attention: Recorded, buffer: Any, is_planned: bool, run: Callable[[], Any], is_latent: bool = False
) -> Any:
    """A run whose events are written to the buffer, which waits for the run. `is_planned`: plan was told of it."""
    if not is_planned:
        raise RunError("profiler_buffer was given but plan had no use_profiler: pass use_profiler=True to plan.")
    checks.tensor(buffer, "profiler_buffer", RunError)
    if buffer.dtype != torch.uint64 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise RunError(
            f"profiler_buffer has shape {tuple(buffer.shape)} and dtype {buffer.dtype}: pass contiguous uint64, [n]."
        )
    with attention.recorded() as recorder:
        result = run()
    written = encoded(recorder.runs[-1], is_latent)
    if len(written) > len(buffer):
        raise RunError(
            f"profiler_buffer has {len(buffer)} elements but this run has {len(written)}: pass a larger one."
        )
    whole = np.zeros(len(buffer), np.int64)
    whole[: len(written)] = written
    buffer.view(torch.int64).copy_(torch.from_numpy(whole))
    return result


def encoded(run: StampedRun, is_latent: bool) -> np.ndarray:
    """The elements, int64: a CTA's events follow each other in time."""
    found, block = [], 0
    for part, events in zip(run.parts, events_of(run, is_latent), strict=True):
        for row in part.cpu().numpy():
            stamps = dict(zip(NAMES, map(int, row), strict=True))
            for event in events:
                begin, end = stamps[event.begin], stamps[event.end]
                if block < _MOST_BLOCKS and 0 < begin <= end:
                    tag = (stamps["sm"] & 0xFF) << 24 | block << 12 | event.number << 2
                    found += [_element(tag | _BEGIN, begin), _element(tag | _END, end)]
            block += 1
    return np.array([1 << 32 | block, *found], np.uint64).view(np.int64)


def _element(tag: int, nanoseconds: int) -> int:
    return (nanoseconds & 0xFFFFFFFF) << 32 | tag
