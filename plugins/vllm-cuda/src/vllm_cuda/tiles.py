"""Tiles of the product of few rows (`kernels/few_rows.cu`), and the shared memory that they take. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 64
"""Columns of K in a stage."""

GROUP_ROWS = 64
"""Rows of the weight that a group of four warps multiplies."""

MOST_TOKENS = 256
"""Rows of x in a tile."""

PLAIN, ADD, GATED = 0, 1, 2

_ITEM_BYTES, _SUM_BYTES, _BARRIER_BYTES = 2, 4, 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weight (of gate and up together), rows of x, programs that split K, stages.
    ``late``: a stage is held until the next one is multiplied."""

    rows: int
    tokens: int
    parts: int
    stages: int
    late: bool

    @property
    def groups(self) -> int:
        """Of four warps."""
        return -(-self.rows // GROUP_ROWS)

    @property
    def trade(self) -> bool:
        """Whether sums take more registers than 14 warps can have."""
        return self.groups == 3 and self.tokens > 128

    @property
    def products(self) -> int:
        """Matrix instructions for all rows of x: the compiler grants one no more registers than all threads can have."""
        return 2 if self.trade and self.tokens > 192 else 1


@dataclass(frozen=True, slots=True)
class Form:
    """What is compiled apart: a tile, the epilogue, the activation of a gate, a bias."""

    tile: Tile
    epilogue: int
    kind: int
    bias: bool

    @property
    def threads(self) -> int:
        """Those that multiply, and two warps that bring, or four of which two do."""
        return self.tile.groups * 128 + (128 if self.tile.trade else 64)

    @property
    def shared_bytes(self) -> int:
        """The ring, what other programs give, and barriers."""
        tile = self.tile
        return tile.stages * stage_bytes(tile.rows, tile.tokens) + given_bytes(tile.rows, tile.tokens, tile.parts)


def stage_bytes(rows: int, tokens: int) -> int:
    """Of a stage of so many rows of the weight and of x, and its two barriers."""
    return (_whole(rows) + tokens) * DEPTH * _ITEM_BYTES + 2 * _BARRIER_BYTES


def given_bytes(rows: int, tokens: int, parts: int) -> int:
    """Of the sums that one of so many programs gets from the others, and their barrier."""
    return _whole(rows) * (tokens // parts) * (parts - 1) * _SUM_BYTES + _BARRIER_BYTES


def _whole(rows: int) -> int:
    return -(-rows // GROUP_ROWS) * GROUP_ROWS
