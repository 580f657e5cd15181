"""The paged pool: who has which block, and which blocks hold which tokens already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks are numbered 1 to num_blocks - 1; block 0 is the token pool's page that belongs to nobody.

    A published block can be found by its hash as long as nobody overwrites it: by the requests that share it, and after
    them until a new block is needed and it is the one that lay free for longest.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))  # from the longest free to the latest
        self._owners = [0] * num_blocks  # requests that have the block
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated; what they hold is lost then."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Blocks for new tokens; there must be as many free ones."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
            if (known := self._hash_of.pop(block, None)) is not None:
                del self._block_of[known]
        return blocks

    def share(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix that is there; the caller has them too from now on."""
        blocks = []
        for known in hashes:
            if (block := self._block_of.get(known)) is None:
                break
            self._free.pop(block, None)
            self._owners[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, known: bytes) -> None:
        """The block holds what the hash stands for; of two that do, the first one is found."""
        if known not in self._block_of:
            self._block_of[known] = block
            self._hash_of[block] = known

    def release(self, blocks: Sequence[int]) -> None:
        """Gives a request's blocks back, last ones first: the beginnings of prompts stay for longest."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free[block] = None
