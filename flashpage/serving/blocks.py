"""The paged pool: which request has which block, and which tokens blocks still hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks are numbered 1 to num_blocks - 1; block 0 is the token pool's unowned page.

    A published block can be found by its hash until it is overwritten: requests share it, and after them it stays until
    a new block is needed and this one has been free for longest.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))  # longest free first
        self._owners = [0] * num_blocks  # number of requests that have each block
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated; allocating one loses its contents."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` blocks, of which there must be enough free ones."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
            if (known := self._hash_of.pop(block, None)) is not None:
                del self._block_of[known]
        return blocks

    def share(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix in the pool; the caller becomes one of their owners."""
        blocks = []
        for known in hashes:
            if (block := self._block_of.get(known)) is None:
                break
            self._free.pop(block, None)
            self._owners[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, known: bytes) -> None:
        """Publishes the block's contents under the hash; of two equal blocks, the first one is found."""
        if known not in self._block_of:
            self._block_of[known] = block
            self._hash_of[block] = known

    def release(self, blocks: Sequence[int]) -> None:
        """Frees a request's blocks, last ones first, so that the beginnings of prompts stay for longest."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free[block] = None
