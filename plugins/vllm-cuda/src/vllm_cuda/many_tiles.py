"""Tiles of the product of many rows (`kernels/many_rows.cu`), and the shared memory that they take. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 64
"""Columns of K in a stage."""

LINES = 128
"""Rows of x in a tile."""

CLUSTER = 2
"""Programs that share what they bring of the weight, one tile below the other."""

BOX_ROWS, BOX_COLUMNS = 16, 64
"""Of out, which one copy takes from shared memory."""

THREADS = 2 * 128 + 32
"""Those that multiply, and a warp that brings."""

LEAD = 2
"""Stages that one half of the threads is behind the other: it multiplies while that one writes."""

_ITEM_BYTES, _BARRIER_BYTES = 2, 8
_BOXES_BYTES = 2 * 8 * BOX_ROWS * BOX_COLUMNS * _ITEM_BYTES
_SHARED_BYTES = 227 << 10


@dataclass(frozen=True, slots=True)
class ManyTile:
    """Rows of the weight in a tile (of gate and up together): 128, 192 (but of no gate) or 256; and how far tiles go down,
    in pairs, before they go to the right."""

    rows: int
    height: int


@dataclass(frozen=True, slots=True)
class ManyForm:
    """What is compiled apart: rows of the weight in a tile, the epilogue, the activation of a gate, a bias, float16."""

    rows: int
    epilogue: int
    kind: int
    bias: bool
    half: bool

    @property
    def stages(self) -> int:
        """As many as fit."""
        return (_SHARED_BYTES - _BOXES_BYTES) // (self._stage_bytes + 2 * _BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Ring, boxes of out and barriers."""
        return self.stages * (self._stage_bytes + 2 * _BARRIER_BYTES) + _BOXES_BYTES

    @property
    def _stage_bytes(self) -> int:
        return (LINES + self.rows) * DEPTH * _ITEM_BYTES


def clusters_of(count: int, weight_rows: int, tile_rows: int, multiprocessors: int) -> int:
    """Clusters for ``count`` rows of x: as few as are done as soon as all would be. Those left out cost no power."""
    tiles, most = -(-count // (CLUSTER * LINES)) * -(-weight_rows // tile_rows), max(1, multiprocessors // CLUSTER)
    return -(-tiles // -(-tiles // most))
