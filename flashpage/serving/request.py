"""One request: its tokens, and where it stands."""

from __future__ import annotations

import array
import dataclasses
import enum
import hashlib


class State(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # nothing of it is in the pool; preempted requests are here again
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclasses.dataclass(eq=False)
class Request:
    """Asks for up to max_new_tokens tokens behind a prompt, fewer where a stop token comes first."""

    prompt: list[int]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    tokens: list[int] = dataclasses.field(init=False)  # the prompt, then generated ones
    state: State = State.WAITING
    row: int = -1  # of the request table
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0  # tokens whose K and V are in the blocks
    num_preemptions: int = 0
    _hashes: list[bytes] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def max_len(self) -> int:
        """Tokens that it may come to have."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not in the pool: the newest one alone while it is decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_complete(self) -> bool:
        """Whether its last token has been generated."""
        return len(self.tokens) >= self.max_len or (
            len(self.tokens) > len(self.prompt) and self.tokens[-1] in self.stop_tokens
        )

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Of each full block of its tokens. A block's hash stands for its own tokens and all before them."""
        while (done := len(self._hashes) * block_size) + block_size <= len(self.tokens):
            before = self._hashes[-1] if self._hashes else b""
            own = array.array("q", self.tokens[done : done + block_size]).tobytes()
            self._hashes.append(hashlib.blake2b(before + own, digest_size=16).digest())
        return self._hashes
