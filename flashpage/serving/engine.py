"""The loop: requests come in, steps are scheduled and run, tokens come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ..base import checks
from ..base.errors import FlashpageError
from .backend import AttentionBackend
from .blocks import BlockPool
from .forward_batch import AttentionLayer
from .paged_attention import PagedAttention
from .request import Request
from .runner import Model, ModelRunner, layers_of
from .scheduler import Scheduler
from .token_pool import RequestTable, TokenPool

MakeBackend = Callable[[RequestTable, TokenPool, Sequence[AttentionLayer], torch.dtype], AttentionBackend]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How much runs at once."""

    num_blocks: int  # of the pool; one of them belongs to nobody
    block_size: int = 16  # tokens
    max_requests: int = 32  # that run side by side
    max_context: int = 2048  # tokens of a request
    max_step_tokens: int = 512  # longer prompts come in chunks
    reuse_prefixes: bool = True
    use_graphs: bool | None = None  # None: on a card

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_requests", "max_context", "max_step_tokens"):
            checks.whole(name, getattr(self, name), 2 if name == "num_blocks" else 1)


@dataclasses.dataclass
class Statistics:
    """Of an engine since it was made."""

    steps: int = 0
    captured_steps: int = 0  # of them
    computed_tokens: int = 0
    reused_tokens: int = 0  # of prompts, found in the pool
    preemptions: int = 0


class Engine:
    """Extends requests greedily: continuous batching over a paged pool.

    Args:
        make_backend: the attention; PagedAttention, or something that takes the same arguments.
    """

    def __init__(self, model: Model, config: EngineConfig, make_backend: MakeBackend = PagedAttention) -> None:
        self.model, self.config = model, config
        shape = model.config
        self.table = RequestTable(config.max_requests, config.max_context, model.device)
        # NaN: a slot that is read before it is written shows at once.
        self.pool = TokenPool(
            *(config.num_blocks, config.block_size, shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype),
            device=model.device,
            fill=float("nan"),
        )
        layers = layers_of(shape)
        self.backend = make_backend(self.table, self.pool, layers, model.dtype)
        self.blocks = BlockPool(config.num_blocks)
        self.scheduler = Scheduler(self.blocks, self.table, config.block_size, config.max_step_tokens)
        self.scheduler.reuse_prefixes = config.reuse_prefixes
        use_graphs = model.device.type == "cuda" if config.use_graphs is None else config.use_graphs
        most = config.max_requests if use_graphs else 0
        self.runner = ModelRunner(model, self.table, self.backend, layers, config.block_size, most)
        self._steps = self._computed = 0

    def add(self, request: Request) -> None:
        """Queues a request."""
        most = min(self.config.max_context, (self.config.num_blocks - 1) * self.config.block_size)
        if not request.prompt or request.max_new_tokens < 1 or request.max_len > most:
            raise FlashpageError(
                f"a request of {request.prompt_len} tokens that asks for {request.max_new_tokens} more: pass at least "
                f"one each, and together at most the {most} that max_context and the pool hold."
            )
        self.scheduler.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drops a request that has not ended, between two steps; its tokens so far stay in it."""
        self.scheduler.cancel(request)

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Request]:
        """One step of the model; returns requests that ended with it."""
        works = self.scheduler.schedule()
        if not works:
            return []
        self._steps += 1
        self._computed += sum(work.end - work.begin for work in works)
        return self.scheduler.commit(works, self.runner.run(works))

    def run(self, requests: Sequence[Request] = (), progress: Callable[[int], None] = lambda running: None) -> None:
        """Steps until all requests, these among them, have ended; `progress` hears how many run, after each step."""
        for request in requests:
            self.add(request)
        while self.has_work:
            self.step()
            progress(len(self.scheduler.running))

    @property
    def statistics(self) -> Statistics:
        """What has been done so far."""
        graphs, scheduler = self.runner.graphs, self.scheduler
        captured = 0 if graphs is None else graphs.replays
        return Statistics(self._steps, captured, self._computed, scheduler.num_reused_tokens, scheduler.num_preemptions)
