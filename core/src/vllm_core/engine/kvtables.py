"""Block tables of all KV groups: growing, sharing cached prefixes, giving back what a window has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_core.api import KVGroupSpec
from vllm_core.api.batch import NULL_BLOCK
from vllm_core.engine import prefix
from vllm_core.engine.blocks import BlockPool
from vllm_core.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """One KV group as memory was given to it; `num_blocks` includes the null block."""

    spec: KVGroupSpec
    tokens_per_block: int
    num_blocks: int


class KVTables:
    """The block pools, and what each request holds of them."""

    def __init__(self, groups: Sequence[GroupLimits], *, caching: bool) -> None:
        self.groups = tuple(groups)
        self.pools = [BlockPool(group.num_blocks) for group in groups]
        self.size = groups[0].tokens_per_block if groups else 0
        # Prefixes are compared block by block, which needs one block size in all groups.
        self.caching = caching and bool(groups) and all(g.tokens_per_block == self.size for g in groups)
        self._parts = [(index, self.pools[index], group.tokens_per_block) for index, group in enumerate(groups)]
        self._windows = [
            (index, group.spec.window, group.tokens_per_block)
            for index, group in enumerate(groups)
            if group.spec.window is not None
        ]
        self.queries = self.hits = 0
        self.changes: list[tuple[int, int, int, int]] = []
        """Rows (group, slot, index, block) for the next packed difference."""
        self._short: tuple[BlockPool, int] | None = None

    def blocks_for(self, group: GroupLimits, num_tokens: int, chunk: int) -> int:
        """Blocks that one sequence of ``num_tokens`` holds at most."""
        if group.spec.window is not None:
            num_tokens = min(num_tokens, group.spec.window + chunk + group.tokens_per_block)
        return -(-num_tokens // group.tokens_per_block)

    @property
    def usage(self) -> float:
        """Fraction of all blocks that requests own, of the fullest group."""
        return max((1 - pool.num_free / max(1, pool.num_blocks - 1) for pool in self.pools), default=0.0)

    @property
    def still_short(self) -> bool:
        """Whether the pool that turned down the last admission has no more free blocks than then."""
        return self._short is not None and self._short[0].num_free <= self._short[1]

    def looks_up(self, request: Request) -> bool:
        """Whether cached blocks can stand for the request's beginning: not where every token's output is wanted."""
        return self.caching and not request.wants_prompt_logprobs and not request.is_pooling

    def match(self, request: Request) -> tuple[int, list[list[int]]]:
        """Cached blocks that begin the request; at least one token is left to compute."""
        if not self.looks_up(request):
            return 0, [[] for _ in self.pools]
        prefix.extend(request.hashes, request.tokens, self.size, request.request.salt)
        usable = request.hashes[: (len(request.tokens) - 1) // self.size]
        finders = [(pool.find, group.spec.window) for pool, group in zip(self.pools, self.groups, strict=True)]
        return prefix.longest(usable, finders, self.size)

    def admit(self, request: Request, matched: list[list[int]], start: int, count: int) -> bool:
        """Give the request its cached blocks, which hold ``start`` tokens, and room for ``count`` more.

        False, and nothing done, where a pool has too few blocks.
        """
        num_tokens = start + count
        missing = []
        for pool, group, blocks in zip(self.pools, self.groups, matched, strict=True):
            needed = -(-num_tokens // group.tokens_per_block) - len(blocks)
            if needed > pool.num_free - pool.num_idle(blocks):
                self._short = (pool, pool.num_free)
                return False
            missing.append(needed)
        self._short = None
        request.blocks = matched
        for index, (pool, needed) in enumerate(zip(self.pools, missing, strict=True)):
            pool.share(matched[index])
            matched[index].extend(pool.allocate(needed))
            request.freed[index] = next((i for i, block in enumerate(matched[index]) if block), len(matched[index]))
            self.changes.extend((index, request.slot, at, block) for at, block in enumerate(matched[index]) if block)
        request.scheduled = request.done = start
        request.cached = start // self.size if self.size else 0
        self._set_limit(request)
        self._set_settle(request)
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` in all; False, and nothing done, where a pool has too few blocks."""
        for index, pool, size in self._parts:
            if -(-num_tokens // size) - len(request.blocks[index]) > pool.num_free:
                return False
        for index, pool, size in self._parts:
            blocks = request.blocks[index]
            held = len(blocks)
            missing = -(-num_tokens // size) - held
            if missing > 0:
                blocks += pool.allocate(missing)
                for at in range(held, held + missing):
                    self.changes.append((index, request.slot, at, blocks[at]))
        self._set_limit(request)
        return True

    def _set_limit(self, request: Request) -> None:
        limit = 1 << 62
        for index, _, size in self._parts:
            held = len(request.blocks[index]) * size
            if held < limit:
                limit = held
        request.limit = limit

    def _set_settle(self, request: Request) -> None:
        at = (request.cached + 1) * self.size if self.caching else 1 << 62
        for index, window, size in self._windows:
            at = min(at, (request.freed[index] + 1) * size + window - 1)
        request.settle_at = at

    def announce(self, request: Request) -> None:
        """Cache what a step that was just scheduled fills with tokens that are known.

        Rows behind it in that step may share it already: a layer's KV is written for all rows before any of it is read. Of
        rows of one token that is not so, which may be written and read by one kernel: what these fill is cached by `settle`.
        """
        if self.caching:
            full = min(request.scheduled, len(request.tokens)) // self.size
            if full > request.cached:
                self._cache(request, full)

    def retract(self, request: Request) -> None:
        """Let nobody find what a step that failed would have filled."""
        done = request.done // self.size if self.size else 0
        for pool in self.pools:
            pool.forget(request.hashes[done:])
        request.cached = min(request.cached, done)

    def settle(self, request: Request) -> None:
        """After a step of the request has been read: cache what it filled, give back what no query will read again."""
        if self.caching:
            full = min(request.done, len(request.tokens)) // self.size
            if full > request.cached:
                self._cache(request, full)
        for index, window, size in self._windows:
            first = (request.done - window + 1) // size
            if first > request.freed[index]:
                self._leave(request, index, first)
        self._set_settle(request)

    def _cache(self, request: Request, full: int) -> None:
        prefix.extend(request.hashes, request.tokens, self.size, request.request.salt)
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            for at in range(request.cached, full):
                if blocks[at] != NULL_BLOCK:
                    pool.register(blocks[at], request.hashes[at])
        request.cached = full

    def _leave(self, request: Request, index: int, first: int) -> None:
        blocks = request.blocks[index]
        for at in range(request.freed[index], min(first, len(blocks))):
            if blocks[at] != NULL_BLOCK:
                self.pools[index].free((blocks[at],))
                # The device's table keeps the old entry: no query reads behind the window.
                blocks[at] = NULL_BLOCK
        request.freed[index] = first

    def distrust(self, request: Request) -> None:
        """Let nobody find what the request holds, nor what it will still write: its KV may not be finite."""
        for pool in self.pools:
            pool.forget(request.hashes)
        request.cached = 1 << 62

    def release(self, request: Request) -> None:
        """Give all blocks back, the end of the sequence first: its beginning is more likely to be asked for again."""
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            pool.free(reversed(blocks))

    def reset_cache(self) -> bool:
        """Forget all cached content; False while requests own blocks."""
        if any(pool.num_free != pool.num_blocks - 1 for pool in self.pools):
            return False
        for pool in self.pools:
            pool.reset()
        return True
