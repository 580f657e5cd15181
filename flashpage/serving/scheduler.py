"""Decides which tokens of which requests the next step computes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .blocks import BlockPool
from .request import Request, State
from .token_pool import RequestTable


class Work(NamedTuple):
    """Tokens [begin, end) of a request; earlier ones are already in its blocks."""

    request: Request
    begin: int
    end: int
    is_first: bool  # no step has succeeded since admission: the request table has none of its slots


class Scheduler:
    """Schedules running requests in the order of admission, then waiting ones in the order of arrival.

    A step computes at most max_step_tokens tokens, so long prompts are computed in chunks next to the decodes of other
    requests. If blocks run out, the request admitted last is preempted: it frees its blocks and waits again, in front.
    """

    def __init__(self, blocks: BlockPool, table: RequestTable, block_size: int, max_step_tokens: int) -> None:
        self.blocks, self.table, self.block_size, self.max_step_tokens = blocks, table, block_size, max_step_tokens
        self.reuse_prefixes = True
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = self.num_reused_tokens = 0

    def add(self, request: Request) -> None:
        """Queues a new request."""
        request.state = State.WAITING
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request that has not ended."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self._leave(request)
        elif request.state is not State.NEW:
            return
        request.state = State.CANCELLED

    def schedule(self) -> list[Work]:
        """The works of the next step, for which blocks are allocated."""
        works: list[Work] = []
        budget, preemptions = self.max_step_tokens, self.num_preemptions
        while len(works) < len(self.running) and budget > 0:
            request = self.running[len(works)]
            count = min(request.num_pending, budget)
            if self._make_room(request, request.num_computed + count):
                works.append(Work(request, request.num_computed, request.num_computed + count, not request.is_in_table))
                budget -= count
        while self.num_preemptions == preemptions and self.waiting and budget > 0:
            work = self._admit(self.waiting[0], budget)
            if work is None:
                break
            works.append(work)
            budget -= work.end - work.begin
        return works

    def commit(self, works: list[Work], next_tokens: list[int]) -> list[Request]:
        """Ends a step: next_tokens[i] follows the last token of works[i]. Returns the requests that have ended."""
        ended = []
        for (request, begin, end, _), token in zip(works, next_tokens, strict=True):
            request.num_computed, request.is_in_table = end, True
            self._publish(request, begin // self.block_size)
            if request.num_pending:
                continue  # a chunk of a prompt: the next token is already known
            request.tokens.append(token)
            if request.is_complete:
                self._leave(request)
                request.state = State.FINISHED
                ended.append(request)
        return ended

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Allocates blocks for that many tokens, preempting others if needed; False if it preempted this one."""
        needed = -(-num_tokens // self.block_size) - len(request.blocks)
        if needed <= 0:
            return True
        while needed > self.blocks.num_free:
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        request.blocks += self.blocks.allocate(needed)
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.state, request.num_computed = State.WAITING, 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, request: Request, budget: int) -> Work | None:
        """Starts a waiting request after its prefix in the pool; at least its last token is computed."""
        if not self.table.num_free:
            return None
        most = (len(request.tokens) - 1) // self.block_size if self.reuse_prefixes else 0
        shared = self.blocks.share(request.block_hashes(self.block_size)[:most])
        begin = len(shared) * self.block_size
        end = min(len(request.tokens), begin + budget)
        needed = -(-end // self.block_size) - len(shared)
        if needed > self.blocks.num_free:
            self.blocks.release(shared)
            return None
        self.waiting.popleft()
        self.running.append(request)
        request.state, request.row, request.num_computed = State.RUNNING, self.table.acquire(), begin
        request.blocks = shared + self.blocks.allocate(needed)
        self.num_reused_tokens += begin
        return Work(request, begin, end, True)

    def _publish(self, request: Request, first: int) -> None:
        """Publishes the blocks from `first` on that have become full."""
        if request.num_computed // self.block_size == first:
            return
        hashes = request.block_hashes(self.block_size)
        for i in range(first, request.num_computed // self.block_size):
            self.blocks.publish(request.blocks[i], hashes[i])

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.table.release(request.row)
        self.blocks.release(request.blocks)
        request.row, request.blocks, request.is_in_table = -1, [], False
