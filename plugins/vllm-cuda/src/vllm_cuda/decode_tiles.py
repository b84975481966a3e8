"""Forms of attention of single queries (`kernels/decode.cu`), and the shared memory that they take. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

KEYS = 16
"""Of a box, which has their values, too."""

WARPS = 5
"""That attend; two more bring, and one puts sums together."""

MOST_HEADS = 8
"""Of queries that share a KV head: columns of a product."""

SLOTS = 2
"""Of rows and heads to come."""

LANES, MOST_STAGES = 32, 32

_ITEM_BYTES, _WORD_BYTES, _BARRIER_BYTES, _WORK_BYTES, _HEAD_PAD_BYTES = 2, 4, 8, 64, 16


@dataclass(frozen=True, slots=True)
class Fresh:
    """What comes along where a token's key is not in the cache yet: norms, and pairs of a head that rotate, 0: none do."""

    norm: bool
    pairs: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Form:
    """What is compiled apart: the head's size, KV heads and those of queries that share one, tokens of a block, rows of a
    lane, shared memory that a program may take, float16 instead of bfloat16, what comes along."""

    head_size: int
    kv_heads: int
    heads: int
    tokens_per_block: int
    rows: int
    most_bytes: int
    half: bool
    fresh: Fresh | None

    @property
    def threads(self) -> int:
        """Those that attend, and three warps more."""
        return (WARPS + 3) * LANES

    @property
    def box_bytes(self) -> int:
        """Of keys and values."""
        return 2 * KEYS * self.head_size * _ITEM_BYTES

    @property
    def stages(self) -> int:
        """Boxes that fit beside the rest, as many of each warp."""
        return min(MOST_STAGES, (self.most_bytes - self._rest_bytes) // self.box_bytes) // WARPS * WARPS

    @property
    def part(self) -> int:
        """float32 numbers of a piece of a row and KV head: sums, largest scores and totals."""
        return self.heads * self.head_size + 2 * MOST_HEADS

    @property
    def shared_bytes(self) -> int:
        """Ring of boxes, sums and statistics of warps, rows to come, barriers."""
        return self.stages * self.box_bytes + self._rest_bytes

    @property
    def _rest_bytes(self) -> int:
        fresh, head = self.fresh, self.head_size * _ITEM_BYTES + _HEAD_PAD_BYTES
        sums = WARPS * (self.heads * (self.head_size + 4) + 2 * MOST_HEADS) * _WORD_BYTES
        slot = _WORK_BYTES + self.heads * head + (2 * head + 2 * fresh.pairs * _WORD_BYTES if fresh else 0)
        return sums + SLOTS * slot + (2 * (MOST_STAGES + SLOTS) + 3) * _BARRIER_BYTES
