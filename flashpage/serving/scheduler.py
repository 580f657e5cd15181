"""Decides which tokens of which requests the next step computes.

A step is scheduled when the one before has been launched, whose tokens the host has not read: their number is known.
"""

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
    is_first: bool  # no step was launched since admission: the request table has none of its slots


class Scheduler:
    """Schedules running requests in the order of admission, then waiting ones in the order of arrival.

    A step computes at most max_step_tokens tokens, so long prompts are computed in chunks next to the decodes of other
    requests. If blocks run out, the request admitted last is preempted: it frees its blocks and waits again, in front.
    While a request is ending, those that lack blocks miss a step instead: its blocks are free after the next commit.
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
        place, all_fit = 0, True
        while place < len(self.running) and budget > 0:  # making room may preempt requests at the list's end
            request, place = self.running[place], place + 1
            if request.is_ending:
                continue
            begin, end = request.num_computed, request.num_computed + min(request.num_pending, budget)
            if self._make_room(request, end):
                works.append(Work(request, begin, end, not request.is_in_table))
                budget -= end - begin
            else:
                all_fit = False
        while all_fit and self.num_preemptions == preemptions and self.waiting and budget > 0:
            work = self._admit(self.waiting[0], budget)
            if work is None:
                break
            works.append(work)
            budget -= work.end - work.begin
        return works

    def launched(self, works: list[Work]) -> None:
        """Notes that a step computes these works: later ones follow it on the device."""
        for place, (request, _, end, _) in enumerate(works):
            request.num_computed, request.is_in_table, request.place = end, True, place
            if not request.num_pending:  # otherwise a chunk of a prompt: the token after it was known
                request.num_unread += 1
            self._publish(request)

    def commit(self, works: list[Work], next_tokens: list[int]) -> list[Request]:
        """Ends a launched step: next_tokens[i] follows the last token of works[i]. Returns the requests that have
        ended. A stop token is read when the next step has been launched, whose token for this request is dropped."""
        ended = []
        for (request, _, end, _), token in zip(works, next_tokens, strict=True):
            has_ended = request.state is State.FINISHED or request.state is State.CANCELLED
            if has_ended or end < len(request.tokens):
                continue
            request.tokens.append(token)
            request.num_unread -= 1
            self._publish(request)
            if request.is_complete:
                if request.state is State.RUNNING:
                    self._leave(request)
                else:  # preempted since the launch
                    self.waiting.remove(request)
                request.state = State.FINISHED
                ended.append(request)
        return ended

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Allocates blocks for that many tokens, preempting others if needed; False if this one is preempted or
        left out, because another one is ending."""
        needed = -(-num_tokens // self.block_size) - len(request.blocks)
        if needed <= 0:
            return True
        if needed > self.blocks.num_free and any(other.is_ending for other in self.running):
            return False
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
        shared: list[int] = []
        if self.reuse_prefixes:
            most = (len(request.tokens) - 1) // self.block_size
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
        request.blocks, request.num_published = shared + self.blocks.allocate(needed), len(shared)
        self.num_reused_tokens += begin
        return Work(request, begin, end, True)

    def _publish(self, request: Request) -> None:
        """Publishes the blocks that have become full of tokens that were read."""
        full = min(request.num_computed, len(request.tokens)) // self.block_size
        if full <= request.num_published or not self.reuse_prefixes:
            return
        hashes = request.block_hashes(self.block_size)
        for i in range(request.num_published, full):
            self.blocks.publish(request.blocks[i], hashes[i])
        request.num_published = full

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.table.release(request.row)
        self.blocks.release(request.blocks)
        request.row, request.blocks, request.is_in_table, request.num_published = -1, [], False, 0
