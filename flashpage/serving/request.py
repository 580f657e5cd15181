"""One request: its tokens and its progress."""

from __future__ import annotations

import array
import dataclasses
import enum
import hashlib


class State(enum.Enum):
    """The state of a request."""

    NEW = "new"  # no engine has it
    WAITING = "waiting"  # nothing of it is in the pool; preempted requests return to this state
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclasses.dataclass(eq=False)
class Request:
    """A request for up to max_new_tokens tokens after a prompt, fewer if a stop token comes first."""

    prompt: list[int]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    tokens: list[int] = dataclasses.field(init=False)  # the prompt, then generated tokens
    state: State = State.NEW
    row: int = -1  # in the request table
    is_in_table: bool = False  # whether that row has the slots of the computed tokens
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0  # tokens whose K and V are in the blocks, or will be after the steps that were launched
    num_published: int = 0  # blocks that other requests can find
    num_unread: int = 0  # tokens that launched steps find, which the host has not read
    place: int = -1  # of its newest token among those of the last step that it was in
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
        """The most tokens that it may reach."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def num_pending(self) -> int:
        """Number of tokens, read or not, that no step has computed; 1 during decode."""
        return len(self.tokens) + self.num_unread - self.num_computed

    @property
    def is_ending(self) -> bool:
        """Whether an unread token is its last one, whatever it is."""
        return self.num_unread > 0 and len(self.tokens) + self.num_unread >= self.max_len

    @property
    def is_complete(self) -> bool:
        """Whether its last token has been generated."""
        return len(self.tokens) >= self.max_len or (
            len(self.tokens) > len(self.prompt) and self.tokens[-1] in self.stop_tokens
        )

    def block_hashes(self, block_size: int) -> list[bytes]:
        """A hash for each full block of its tokens; it covers the block's own tokens and all earlier ones."""
        while (done := len(self._hashes) * block_size) + block_size <= len(self.tokens):
            before = self._hashes[-1] if self._hashes else b""
            own = array.array("q", self.tokens[done : done + block_size]).tobytes()
            self._hashes.append(hashlib.blake2b(before + own, digest_size=16).digest())
        return self._hashes
