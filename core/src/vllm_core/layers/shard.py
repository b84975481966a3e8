"""One worker's part of the model: which rows and columns of each weight it keeps, and the group it computes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from vllm_core.api import QuantTensor
    from vllm_core.models.spec import ModelSpec

ROWS, COLUMNS = 0, 1


@dataclass(frozen=True, slots=True)
class Cut:
    """The part ``begin .. end`` of a tensor along ``dim``; what lies behind the tensor's own end is zeros."""

    dim: int
    begin: int
    end: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of a tensor of shape ``whole``."""
        return *whole[: self.dim], self.end - self.begin, *whole[self.dim + 1 :]

    def inside(self, whole: tuple[int, ...]) -> slice:
        """What of it exists in a tensor of shape ``whole``."""
        size = whole[self.dim]
        return slice(min(self.begin, size), min(self.end, size))

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor, copied: a view would keep the whole."""
        import torch

        part = whole[(slice(None),) * self.dim + (self.inside(tuple(whole.shape)),)]
        return self.fill(part.clone(memory_format=torch.contiguous_format))

    def take_packed(self, whole: QuantTensor) -> QuantTensor | None:
        """The part of a whole quantised matrix, copied; None where it would cut through what shares a scale."""
        from vllm_core.ops import quant

        if self.dim == COLUMNS:
            return quant.take_columns(whole, self.begin, self.end)
        inside, size = self.inside(whole.shape), self.end - self.begin
        if whole.format == "fp8_block128" and (inside.start % quant.FP8_SIDE or inside.stop - inside.start != size):
            return None
        return quant.pad_rows(quant.copied(quant.take_rows(whole, inside.start, inside.stop)), size)

    def fill(self, part: torch.Tensor) -> torch.Tensor:
        """Add the zeros that a tensor cut off at its end misses."""
        missing = self.end - self.begin - part.shape[self.dim]
        if not missing:
            return part
        import torch

        shape = (*part.shape[: self.dim], missing, *part.shape[self.dim + 1 :])
        return torch.cat((part, part.new_zeros(shape)), dim=self.dim)


Wanted: TypeAlias = Callable[[str, tuple[int, ...]], Cut | None]
"""What to read of a checkpoint tensor of this name and shape; None is all of it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``workers``; ``group`` is the communicator's handle, 0 for one worker alone."""

    rank: int = 0
    workers: int = 1
    group: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what is added once: biases of layers whose outputs are summed."""
        return self.rank == 0

    def part(self, size: int, dim: int = ROWS) -> Cut | None:
        """An equal part of ``size``, rounded up, so that the last ranks may hold zeros; None for one worker."""
        if self.workers == 1:
            return None
        step = -(-size // self.workers)
        return Cut(dim, self.rank * step, (self.rank + 1) * step)

    def heads(self, spec: ModelSpec, dim: int = ROWS) -> Cut | None:
        """This rank's query heads; ``spec`` is that of the whole model."""
        if self.workers == 1:
            return None
        size = spec.shard(self.workers).num_heads * spec.head_size
        return Cut(dim, self.rank * size, (self.rank + 1) * size)

    def kv_heads(self, spec: ModelSpec) -> Cut | None:
        """The rows of the KV heads that this rank's query heads read; ``spec`` is that of the whole model."""
        if self.workers == 1:
            return None
        count = spec.shard(self.workers).num_kv_heads
        first = self.rank * count if self.workers <= spec.num_kv_heads else self.rank * spec.num_kv_heads // self.workers
        return Cut(ROWS, first * spec.head_size, (first + count) * spec.head_size)


ALONE = Shard()
