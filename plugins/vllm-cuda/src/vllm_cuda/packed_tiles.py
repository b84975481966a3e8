"""Tiles of products with a packed weight (`kernels/packed_rows.cu`, `packed_wide.cu`) and their memory. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_cuda.tiles import GATED

DEPTH = 128
"""Inputs of a record."""

UNITS = 4
"""Most sets of scales of a record."""

BLOCK = 16
"""Rows of a record."""

INT4 = 4
"""The format of four bits, as `vllm_triton.kernels.quant` has it."""

_FLOAT32 = 0
_BARRIER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """What a packed weight is of: `kernels/packed.cuh` says what format, sets, scale and zeros are."""

    format: int
    sets: int
    scale: int
    zeros: bool

    @property
    def code_bytes(self) -> int:
        """Of a record."""
        return BLOCK * DEPTH // (2 if self.format == INT4 else 1)

    @property
    def scale_bytes(self) -> int:
        """Of a record: scales and zeros."""
        return self.sets * BLOCK * ((4 if self.scale == _FLOAT32 else 2) + self.zeros)


@dataclass(frozen=True, slots=True)
class PackedTile:
    """Groups of ``row_warps`` warps share K in ``parts``, programs of a cluster share it further; blocks of rows a warp.

    ``resident`` programs are to fit on a multiprocessor; ``direct``: warps read x themselves, it is not in the ring.
    """

    row_warps: int
    parts: int
    blocks: int
    cluster: int
    stages: int
    resident: int
    direct: bool = False

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.row_warps * self.blocks * BLOCK


@dataclass(frozen=True, slots=True)
class PackedForm:
    """What is compiled apart: a layout, a tile, ``columns`` times 8 rows of x, what becomes of sums, types of x and out."""

    layout: Layout
    tile: PackedTile
    columns: int
    epilogue: int
    kind: int
    bias: bool
    wide_out: bool
    half: bool

    @property
    def threads(self) -> int:
        """Of a program."""
        return self.tile.row_warps * self.tile.parts * 32

    @property
    def shared_bytes(self) -> int:
        """A ring of weight and x, which the sums take the place of."""
        tile = self.tile
        weight = tile.row_warps * tile.parts * tile.blocks * (self.layout.code_bytes + self.layout.scale_bytes)
        x = 0 if tile.direct else tile.parts * self.columns * 8 * DEPTH * 2
        ring = tile.stages * (weight + x)
        return max(ring, tile.parts * self.columns * 8 * (tile.rows + 4) * 4)

    @property
    def out_rows(self) -> int:
        """Rows of the weight that a tile has of each of its halves, which are columns of out."""
        return self.tile.rows // (2 if self.epilogue == GATED else 1)


@dataclass(frozen=True, slots=True)
class WideTile:
    """Of `kernels/packed_wide.cu`: ``groups`` of four warps have ``bands`` times 64 rows of the weight each, for ``columns``
    times 8 rows of x. ``shares`` programs share K.
    """

    groups: int
    bands: int
    columns: int
    shares: int
    stages: int

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.groups * self.bands * 64

    @property
    def part_floats(self) -> int:
        """Sums that a program leaves to those that it shares a tile with."""
        return self.columns * 8 * (self.rows + 4)


@dataclass(frozen=True, slots=True)
class WideForm:
    """What is compiled apart, as a `PackedForm`."""

    layout: Layout
    tile: WideTile
    epilogue: int
    kind: int
    bias: bool
    wide_out: bool
    half: bool

    @property
    def threads(self) -> int:
        """Those that multiply, and as many as a group of them to bring."""
        return (self.tile.groups + 1) * 128

    @property
    def shared_bytes(self) -> int:
        """A ring of weight and x with two barriers a stage, which the sums take the place of."""
        tile = self.tile
        weight = tile.rows // BLOCK * (self.layout.code_bytes + self.layout.scale_bytes)
        ring = tile.stages * (weight + tile.columns * 8 * DEPTH * 2 + 2 * _BARRIER_BYTES)
        return max(ring, tile.part_floats * 4)

    @property
    def out_rows(self) -> int:
        """Rows of the weight that a tile has of each of its halves, which are columns of out."""
        return self.tile.rows // (2 if self.epilogue == GATED else 1)
