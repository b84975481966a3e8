"""Tiles of the product of few rows (`kernels/few_rows.cu`), and the shared memory that they take. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 64
"""Columns of K in a stage."""

BAND = 64
"""Rows of x that a group of four warps multiplies."""

PLAIN, ADD, GATED = 0, 1, 2

_ITEM_BYTES, _BARRIER_BYTES = 2, 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weight in a tile (of gate and up together), programs that split K, stages of weight and of x."""

    rows: int
    cluster: int
    stages: int
    x_stages: int


@dataclass(frozen=True, slots=True)
class Form:
    """What is compiled apart: a tile, bands of 64 rows of x, the epilogue, the activation of a gate, a bias, a float32 out."""

    tile: Tile
    bands: int
    epilogue: int
    kind: int
    bias: bool
    wide_out: bool

    @property
    def threads(self) -> int:
        """Those that multiply, and a warp that brings."""
        return self.bands * 128 + 32

    @property
    def shared_bytes(self) -> int:
        """Rings and their barriers."""
        tile = self.tile
        rings = (tile.stages * tile.rows + tile.x_stages * self.bands * BAND) * DEPTH * _ITEM_BYTES
        return rings + (tile.stages + 2 * tile.x_stages) * _BARRIER_BYTES


def tile_within(shared_bytes: int, rows: int, cluster: int, bands: int, x_stages: int) -> Tile:
    """The tile with as many stages of weight as fit beside those of x."""
    left = shared_bytes // (DEPTH * _ITEM_BYTES) - x_stages * bands * BAND
    return Tile(rows, cluster, max(1, left // rows), x_stages)
