"""Plans of an engine's groups of layers at the same time.

A plan on the card is the work of one CTA, some 25 us for each group, in which all other SMs would idle. vLLM plans the
groups one after the other in each step: all but the last plan on streams of their own, and the last one waits for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

_T = TypeVar("_T")


class PlanStreams:
    """The streams of one engine. `plan` must be called for every group in each step, in the order of `add`."""

    _of_engines: ClassVar[weakref.WeakValueDictionary[int, PlanStreams]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream | None] = []
        self._pending: list[torch.cuda.Stream] = []

    @classmethod
    def of(cls, config: Any, device: torch.device) -> PlanStreams | None:
        """The streams of vLLM's configuration; None: groups may be planned without the last one (drafts, and steps that
        vLLM cuts in two), or not on a card."""
        if device.type != "cuda" or config.speculative_config is not None or config.parallel_config.use_ubatching:
            return None
        return cls._of_engines.setdefault(id(config), cls())

    def add(self) -> int:
        """The number of one more group."""
        self._streams.append(None)
        return len(self._streams) - 1

    def plan(self, group: int, make: Callable[[], _T]) -> _T:
        """`make()`, whose launches the current stream waits for after the plan of the last group."""
        current = torch.cuda.current_stream()
        if group < len(self._streams) - 1:
            stream = self._streams[group]
            if stream is None:
                stream = self._streams[group] = torch.cuda.Stream()
            stream.wait_stream(current)
            self._pending.append(stream)
            with torch.cuda.stream(stream):
                return make()
        try:
            return make()
        finally:
            for stream in self._pending:
                current.wait_stream(stream)
            self._pending.clear()
