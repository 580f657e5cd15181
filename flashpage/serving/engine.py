"""The engine's loop: requests come in, steps are scheduled and run, tokens come out."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ..base import checks
from ..base.errors import FlashpageError
from .backend import AttentionBackend
from .blocks import BlockPool
from .forward_batch import AttentionLayer
from .paged_attention import PagedAttention
from .request import Request, State
from .runner import LaunchedStep, Model, ModelRunner, layers_of
from .scheduler import Scheduler
from .token_pool import RequestTable, TokenPool

MakeBackend = Callable[[RequestTable, TokenPool, Sequence[AttentionLayer], torch.dtype], AttentionBackend]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine."""

    num_blocks: int  # of the pool, the unowned one included
    block_size: int = 16  # tokens
    max_requests: int = 32  # requests that run at once
    max_context: int = 2048  # tokens of a request
    max_step_tokens: int = 512  # longer prompts are computed in chunks
    reuse_prefixes: bool = True
    use_graphs: bool | None = None  # None: only on a card

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_requests", "max_context", "max_step_tokens"):
            checks.whole(name, getattr(self, name), 2 if name == "num_blocks" else 1)


@dataclasses.dataclass
class Statistics:
    """Counts since the engine was made."""

    steps: int = 0
    captured_steps: int = 0  # steps that were captured graphs
    computed_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens that were found in the pool
    preemptions: int = 0


class Engine:
    """Greedy continuation of requests: continuous batching over a paged pool.

    Args:
        make_backend: makes the attention: PagedAttention, or a callable with the same arguments.
    """

    def __init__(self, model: Model, config: EngineConfig, make_backend: MakeBackend = PagedAttention) -> None:
        self.model, self.config = model, config
        shape = model.config
        self.table = RequestTable(config.max_requests, config.max_context, model.device)
        layers = layers_of(shape)
        # NaN, so that a read of a slot that was never written is noticed.
        self.pool = TokenPool(
            num_pages=config.num_blocks,
            page_size=config.block_size,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=model.dtype,
            device=model.device,
            fill=float("nan"),
            v_head_dim=layers[0].v_head_dim,
        )
        self.backend = make_backend(self.table, self.pool, layers, model.dtype)
        self.blocks = BlockPool(config.num_blocks)
        self.scheduler = Scheduler(self.blocks, self.table, config.block_size, config.max_step_tokens)
        self.scheduler.reuse_prefixes = config.reuse_prefixes
        use_graphs = model.device.type == "cuda" if config.use_graphs is None else config.use_graphs
        most = config.max_requests if use_graphs else 0
        self.runner = ModelRunner(model, self.table, self.backend, layers, config.block_size, most)
        self._steps = self._computed = 0
        self._launched: deque[LaunchedStep] = deque()  # whose tokens were not read
        self._has_failed = False  # whether an error or an interrupt left the last step
        self._ended: list[Request] = []  # not yet returned by step()

    def add(self, request: Request) -> None:
        """Queues a request."""
        if request.state is not State.NEW:
            raise FlashpageError(f"the request is {request.state.value}: add a new Request, each one once.")
        most = min(self.config.max_context, (self.config.num_blocks - 1) * self.config.block_size)
        if not request.prompt or request.max_new_tokens < 1 or request.max_len > most:
            raise FlashpageError(
                f"the request has {request.prompt_len} prompt tokens and max_new_tokens={request.max_new_tokens}. "
                f"Pass at least one of each, together at most {most} (max_context and the pool)."
            )
        if (least := min(request.prompt)) < 0:
            raise FlashpageError(f"the request's prompt has token {least}: pass tokens of the vocabulary, 0 or more.")
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """Drops a request that has not ended; call it between two steps. The request keeps its tokens so far."""
        self.scheduler.cancel(request)

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or step() has not returned it. False does not mean that the card is idle: it
        may still compute a step whose tokens will be dropped."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._ended)

    def step(self) -> list[Request]:
        """Launches one step of the model, then reads the tokens of the step before: the host prepares a step while the
        card computes. Returns the requests that ended with the tokens read. After an error of the model, the next step
        computes the same tokens again."""
        while self._has_failed and self._launched:  # their tokens may no longer be on the card
            self._read()
        self._has_failed = True
        works, unread = self.scheduler.schedule(), len(self._launched)
        try:
            if works:
                self._launched.append(self.runner.launch(works))
                self.scheduler.launched(works)
                self._steps += 1
                self._computed += sum(work.end - work.begin for work in works)
        finally:
            if unread:
                self._read()
        self._has_failed = False
        ended, self._ended = self._ended, []
        return ended

    def _read(self) -> None:
        """Reads the tokens of the first launched step, which is kept until then: an interrupt loses none."""
        step = self._launched[0]
        self._ended += self.scheduler.commit(step.works, step.read())
        self._launched.popleft()

    def run(self, requests: Sequence[Request] = (), progress: Callable[[int], None] = lambda running: None) -> None:
        """Runs steps until all requests have ended, these included; `progress` gets the number of running requests."""
        for request in requests:
            self.add(request)
        while self.has_work:
            self.step()
            progress(len(self.scheduler.running))

    @property
    def statistics(self) -> Statistics:
        """The counts so far."""
        graphs, scheduler = self.runner.graphs, self.scheduler
        captured = 0 if graphs is None else graphs.replays
        return Statistics(self._steps, captured, self._computed, scheduler.num_reused_tokens, scheduler.num_preemptions)
