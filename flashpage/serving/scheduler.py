"""Which tokens of which requests the next step computes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .blocks import BlockPool
from .request import Request, State
from .token_pool import RequestTable


class Work(NamedTuple):
    """Tokens [begin, end) of a request; those in front of them are in its blocks."""

    request: Request
    begin: int
    end: int
    is_first: bool  # since it was admitted: no slot of it is in the request table yet


class Scheduler:
    """Running requests come first, in the order of their admission, then waiting ones, in the order of their arrival.

    A step computes at most max_step_tokens tokens, so long prompts come in chunks beside the others' decodes. Where
    blocks run out, the request admitted last gives its own back and waits again, in front of all others.
    """

    def __init__(self, blocks: BlockPool, table: RequestTable, block_size: int, max_step_tokens: int) -> None:
        self.blocks, self.table, self.block_size, self.max_step_tokens = blocks, table, block_size, max_step_tokens
        self.reuse_prefixes = True
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = self.num_reused_tokens = 0

    def cancel(self, request: Request) -> None:
        """Takes a request out, whatever it is doing."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self._leave(request)
        else:
            return
        request.state = State.CANCELLED

    def schedule(self) -> list[Work]:
        """The next step; their blocks are theirs already."""
        works: list[Work] = []
        budget, preemptions = self.max_step_tokens, self.num_preemptions
        while len(works) < len(self.running) and budget > 0:
            request = self.running[len(works)]
            count = min(request.num_pending, budget)
            if self._make_room(request, request.num_computed + count):
                works.append(Work(request, request.num_computed, request.num_computed + count, False))
                budget -= count
        while self.num_preemptions == preemptions and self.waiting and budget > 0:
            work = self._admit(self.waiting[0], budget)
            if work is None:
                break
            works.append(work)
            budget -= work.end - work.begin
        return works

    def commit(self, works: list[Work], next_tokens: list[int]) -> list[Request]:
        """The step is done: next_tokens[i] follows the last token of works[i]. Returns requests that have ended."""
        ended = []
        for (request, begin, end, _), token in zip(works, next_tokens, strict=True):
            request.num_computed = end
            self._publish(request, begin // self.block_size)
            if request.num_pending:
                continue  # a chunk: the token that follows it is known
            request.tokens.append(token)
            if request.is_complete:
                self._leave(request)
                request.state = State.FINISHED
                ended.append(request)
        return ended

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Blocks for that many tokens, others' if need be; False where it had to give up its own."""
        needed = -(-num_tokens // self.block_size) - len(request.blocks)
        while needed > self.blocks.num_free:
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        request.blocks += self.blocks.allocate(max(0, needed))
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.state, request.num_computed = State.WAITING, 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, request: Request, budget: int) -> Work | None:
        """Starts a waiting request behind what the pool has of its tokens; the last one is computed in any case."""
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
        """Blocks from `first` on that have become full."""
        hashes = request.block_hashes(self.block_size)
        for i in range(first, request.num_computed // self.block_size):
            self.blocks.publish(request.blocks[i], hashes[i])

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.table.release(request.row)
        self.blocks.release(request.blocks)
        request.row, request.blocks = -1, []
