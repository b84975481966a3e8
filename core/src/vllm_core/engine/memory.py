"""How much memory the KV cache gets, and how core splits it over the KV groups.

A pure function of bytes: the device reports, the user may set an absolute size, and what does not fit is an error
that names the bytes needed and had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_core.api import KVGroupSpec, KVLayout, MemoryStats
from vllm_core.errors import MemoryBudgetError

SMALLEST_CONTEXT = 128
"""Tokens below which a context that nobody asked for is not cut further."""

WINDOW_SHARE_CONTEXT = 2048
"""Length of a typical sequence, in tokens: how many window blocks go with the full ones."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One KV group as memory sees it."""

    spec: KVGroupSpec
    layout: KVLayout

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return self.layout.block_bytes * len(self.spec.layers)

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks that one sequence of ``num_tokens`` holds at most, with prompts computed ``chunk`` tokens a step."""
        size = self.layout.tokens_per_block
        if self.spec.window is not None:
            num_tokens = min(num_tokens, self.spec.window + chunk + size)
        return -(-num_tokens // size)


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What the engine asks for. `explicit_len`: the user set the context, so it is not cut.

    `sharers` is how many workers of this model divide the device's memory; `absolute_bytes` is one worker's. `later_bytes` is
    what a worker allocates after the KV cache, out of the same share. `chosen` says what the Plan chose that the bytes depend
    on: an error that names none of it cannot be acted on.
    """

    max_model_len: int
    explicit_len: bool
    chunk: int
    absolute_bytes: int | None
    utilization: float
    override_blocks: int | None
    sharers: int = 1
    later_bytes: int = 0
    chosen: str = ""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Blocks per group, the null block included, the bytes they take, and the context that fits."""

    num_blocks: tuple[int, ...]
    size_bytes: int
    max_model_len: int


def kv_bytes(request: MemoryRequest, stats: MemoryStats) -> int:
    """Bytes that the KV cache may take, after what has been allocated and before what will be."""
    if request.absolute_bytes is not None:
        return request.absolute_bytes
    own = sum(stats.own_bytes.values())
    share = int(stats.total_bytes * request.utilization) // request.sharers
    return max(0, min(share - own, stats.available_bytes // request.sharers) - request.later_bytes)


def smallest(budgets: Sequence[KVBudget], groups: Sequence[GroupMemory]) -> KVBudget:
    """What fits on every worker, all of which have the same groups."""
    blocks = tuple(min(counts) for counts in zip(*(one.num_blocks for one in budgets), strict=True))
    size = sum(n * g.block_bytes for n, g in zip(blocks, groups, strict=True))
    return KVBudget(blocks, size, min(one.max_model_len for one in budgets))


def size_kv(request: MemoryRequest, groups: Sequence[GroupMemory], stats: MemoryStats) -> KVBudget:
    """Split the budget. Raises MemoryBudgetError when one sequence does not fit."""
    if not groups:
        return KVBudget((), 0, request.max_model_len)
    if request.override_blocks is not None:
        blocks = _blocks(groups, request, request.override_blocks)
        budget = sum(n * g.block_bytes for n, g in zip(blocks, groups, strict=True))
    else:
        budget = kv_bytes(request, stats)
        blocks = _largest(groups, request, budget)
    fits = _longest(groups, request, blocks)
    needed = sum((g.blocks_for(request.max_model_len, request.chunk) + 1) * g.block_bytes for g in groups)
    if fits < request.max_model_len and (request.explicit_len or fits < SMALLEST_CONTEXT):
        raise MemoryBudgetError(
            "KV cache does not hold one sequence",
            on=f"max_model_len {request.max_model_len}{f' ({request.chosen})' if request.chosen else ''}",
            found=f"{budget} bytes, enough for {fits} tokens",
            expected=f"{needed} bytes",
            fix=f"lower --max-model-len to {fits}, or raise {_size_of(request)}" if fits >= 1 else f"raise {_size_of(request)}",
        )
    size = sum(n * g.block_bytes for n, g in zip(blocks, groups, strict=True))
    return KVBudget(tuple(blocks), size, min(fits, request.max_model_len))


def _size_of(request: MemoryRequest) -> str:
    """The option that sized the KV cache, or those that may."""
    if request.override_blocks is not None:
        return "--num-gpu-blocks-override"
    given = request.absolute_bytes is not None
    return "--kv-cache-memory-bytes" if given else "--kv-cache-memory-bytes or --device-memory-utilization"


def _blocks(groups: Sequence[GroupMemory], request: MemoryRequest, lead: int) -> list[int]:
    """Blocks per group when the group that keeps most gets ``lead``: windows get their share of typical sequences."""
    has_full = any(g.spec.window is None for g in groups)
    out = []
    for group in groups:
        if group.spec.window is None or not has_full:
            out.append(lead)
            continue
        one = group.blocks_for(request.max_model_len, request.chunk) + 1
        share = (group.spec.window + group.layout.tokens_per_block) / WINDOW_SHARE_CONTEXT
        out.append(min(lead, max(one, int(lead * min(1.0, share)))))
    return out


def _largest(groups: Sequence[GroupMemory], request: MemoryRequest, budget: int) -> list[int]:
    low, high = 0, budget // min(g.block_bytes for g in groups) + 1
    while low + 1 < high:
        middle = (low + high) // 2
        cost = sum(n * g.block_bytes for n, g in zip(_blocks(groups, request, middle), groups, strict=True))
        low, high = (middle, high) if cost <= budget else (low, middle)
    return _blocks(groups, request, low)


def _longest(groups: Sequence[GroupMemory], request: MemoryRequest, blocks: Sequence[int]) -> int:
    """Tokens of the longest single sequence that the blocks hold, the null block aside."""
    limits = [request.max_model_len]
    for group, count in zip(groups, blocks, strict=True):
        size = group.layout.tokens_per_block
        if count - 1 < group.blocks_for(request.max_model_len, request.chunk):
            limits.append(max(0, count - 1) * size)
    return min(limits)
