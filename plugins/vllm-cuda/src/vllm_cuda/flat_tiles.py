"""Forms of all layers at once (`kernels/flat.cu`), and the memory that they take. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

TILE, DEPTH = 8, 512
"""Rows and columns of a weight that a stage has."""

MOST_PIECES = 16
"""Of a row's keys."""

MOST_STAGES, LANES = 32, 32

WORD_BYTES, WORDS_BYTES = 8, 8 << 20
"""Of what programs tell one another, and of all of it: for one launch at a time, as all of a device's are."""

_ITEM_BYTES, _WORD_BYTES, _PAD_BYTES, _LAYER_BYTES, _BARRIER_BYTES = 2, 4, 64, 72, 8
_ALIGNMENT_BYTES = 256
"""What members of shared memory may begin later than the one before them ends, all together."""

STAGE_BYTES = TILE * (DEPTH * _ITEM_BYTES + _PAD_BYTES)


@dataclass(frozen=True, slots=True)
class Work:
    """How a program works: warps that compute and warps that bring, stages of each of these that are on their way at once, keys
    that a lane reads at once, and keys of a piece where programs are enough."""

    warps: int
    bringers: int
    flying: int
    deep: int
    span: int


@dataclass(frozen=True, slots=True)
class Form:
    """What is compiled apart: the model's sizes, tokens of a block, most rows of a step, programs, shared memory that one may
    take, and how it works."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    norm: bool
    tokens_per_block: int
    rows: int
    programs: int
    most_bytes: int
    work: Work

    @property
    def threads(self) -> int:
        """Of a program."""
        return (self.work.warps + self.work.bringers) * LANES

    @property
    def stages(self) -> int:
        """Of the ring: as many of each warp, whether it computes or brings; 0 where none fit."""
        most = min(MOST_STAGES, (self.most_bytes - self._rest_bytes) // STAGE_BYTES)
        fitting = (n for n in range(most, 0, -1) if n % self.work.warps == 0 and n % self.work.bringers == 0)
        return next(fitting, 0)

    @property
    def shared_bytes(self) -> int:
        """Ring, inputs of products, sums, what attention has, barriers and the layers' addresses."""
        return self.stages * STAGE_BYTES + self._rest_bytes

    @property
    def words(self) -> tuple[int, ...]:
        """Of 8 bytes, that programs tell one another: heads, the residual stream, the MLP's middle, what was attended, the
        residual stream again, and pieces of rows."""
        group = self.heads // self.kv_heads
        pieces = self.kv_heads * MOST_PIECES * group * (self.head_size + 2)
        return tuple(
            self.rows * count for count in (self._qkv, self.hidden, self.inner // 2, self._q // 2, self.hidden, pieces)
        )

    @property
    def _q(self) -> int:
        return self.heads * self.head_size

    @property
    def _qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    def _share(self, count: int) -> int:
        return -(-count // self.programs)

    @property
    def _most_sums(self) -> int:
        """Stages of a phase at most."""
        products = (
            (self._share(self._qkv), self.hidden),
            (self._share(self.hidden), self._q),
            (4 * self._share(self.inner // 2), self.hidden),
            (self._share(self.hidden), self.inner),
        )
        return max(-(-rows // TILE) * -(-columns // DEPTH) for rows, columns in products)

    @property
    def _rest_bytes(self) -> int:
        group, warps, rows, size = self.heads // self.kv_heads, self.work.warps, self.rows, self.head_size
        x = rows * (max(self.inner, self._q, self.hidden) * _ITEM_BYTES + _PAD_BYTES)
        words = self._most_sums * TILE * rows + (group + 3) * size + 2 * MOST_PIECES * group
        words += rows * (self._share(self.hidden) + warps + 3) + 2 * warps * group
        fixed = self.layers * _LAYER_BYTES + 2 * MOST_STAGES * _BARRIER_BYTES + _ALIGNMENT_BYTES
        return max(x, warps * group * size * _WORD_BYTES) + words * _WORD_BYTES + fixed
