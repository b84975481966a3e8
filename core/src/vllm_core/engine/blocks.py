"""Blocks of one KV group: who owns which, what is cached, and what is evicted first.

A block is owned by requests (counted), or free. A free block whose content is known by hash stays findable until it is
taken, oldest use first; blocks without a hash are taken before any that has one. Block 0 is the null block: never given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from vllm_core.api.batch import NULL_BLOCK


class BlockPool:
    """All operations cost a constant per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._owners = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._fresh = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._fresh) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Give ``count`` blocks, evicting the cached content used longest ago; the caller has checked `num_free`."""
        assert count <= self.num_free, "allocating more blocks than are free"
        given = []
        for _ in range(count):
            if self._fresh:
                block = self._fresh.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            self._owners[block] = 1
            given.append(block)
        return given

    def free(self, blocks: Iterable[int]) -> None:
        """Give up ownership, in the order in which cached content may go first; null blocks are passed over."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._owners[block] -= 1
            assert self._owners[block] >= 0, f"block {block} freed twice"
            if self._owners[block]:
                continue
            if self._hash[block] is None:
                self._fresh.append(block)
            else:
                self._idle[block] = None

    def find(self, digest: bytes) -> int | None:
        """The block that holds this content, owned or free."""
        return self._by_hash.get(digest)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `share` would take from the free ones."""
        return sum(1 for block in blocks if block in self._idle)

    def share(self, blocks: Sequence[int]) -> None:
        """Own cached blocks too; null blocks are passed over."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if not self._owners[block]:
                del self._idle[block]
            self._owners[block] += 1

    def register(self, block: int, digest: bytes) -> None:
        """Make an owned block findable. The first block of a content stays; a second one remains private."""
        assert self._owners[block], f"block {block} is cached without an owner"
        if self._hash[block] is None and digest not in self._by_hash:
            self._hash[block] = digest
            self._by_hash[digest] = block

    def forget(self, digests: Iterable[bytes]) -> None:
        """Let nobody find these contents again; unknown ones are passed over."""
        for digest in digests:
            block = self._by_hash.get(digest)
            if block is not None:
                self._forget(block)

    def reset(self) -> None:
        """Forget all content; no block is owned."""
        assert self.num_free == self.num_blocks - 1, "forgetting content that requests use"
        for block in self._idle:
            self._forget(block)
            self._fresh.append(block)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        digest = self._hash[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hash[block] = None
