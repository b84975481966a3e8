"""Tiles of attention of prompts (`kernels/extend.cu`), and the shared memory that they take. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

LINES = 64
"""Lines of a group of four warps: queries, each with all heads of a KV head."""

_ITEM_BYTES, _SUM_BYTES, _BARRIER_BYTES, _WORK_BYTES, _SLOTS = 2, 4, 8, 32, 2


@dataclass(frozen=True, slots=True)
class Tile:
    """Groups of four warps that attend, keys of a tile, stages of keys and of values, whether groups ask in turn.

    ``split``: two groups have the same queries, and every other tile of keys each.
    """

    groups: int
    keys: int
    stages: int
    turns: bool = True
    split: bool = False

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that attends, and of one that brings: a multiprocessor has 64 Ki, in steps of 8 a thread."""
        return (232, 40) if self.groups == 2 else (152, 56)


@dataclass(frozen=True, slots=True)
class Form:
    """What is compiled apart: a tile, the head's size, KV heads and those of queries that share one, tokens of a block,
    whether rows of one query are taken, float16 instead of bfloat16; a sliding window, sinks."""

    tile: Tile
    head_size: int
    kv_heads: int
    heads: int
    tokens_per_block: int
    singles: bool
    half: bool
    window: bool = False
    sinks: bool = False

    @property
    def threads(self) -> int:
        """Those that attend, and four warps that bring."""
        return self.tile.groups * 128 + 128

    @property
    def bands(self) -> int:
        """Of `LINES` lines in a tile."""
        return 1 if self.tile.split else self.tile.groups

    @property
    def queries(self) -> int:
        """Of a group."""
        return LINES // self.heads

    @property
    def shared_bytes(self) -> int:
        """Queries, rings of keys and of values, sums of a second group, barriers, and tiles to come."""
        tile = self.tile
        rows = _SLOTS * self.bands * LINES + 2 * tile.stages * tile.keys
        sums = (self.head_size // 2 + 4) * 128 * _SUM_BYTES if tile.split else 0
        barriers = 2 * _SLOTS * self.bands + 4 * tile.stages + 1 + 2 * _SLOTS
        return rows * self.head_size * _ITEM_BYTES + sums + barriers * _BARRIER_BYTES + _SLOTS * _WORK_BYTES
