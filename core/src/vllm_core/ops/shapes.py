"""Shape classes as tensors: what a step of these sequences gives to ops."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vllm_core.ops.classes import CLASSES, ENCODER_CLASSES, KV_CLASSES, SINGLE_CLASSES, THIRD, ShapeClass, parse

__all__ = ["CLASSES", "ENCODER_CLASSES", "KV_CLASSES", "SINGLE_CLASSES", "Shape", "shape_of"]


@dataclass(frozen=True, slots=True)
class Shape(ShapeClass):
    """One step's rows. Blocks of a row lie scattered; block 0 belongs to nobody."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(count for _, count in self.rows)

    @property
    def hidden(self) -> int:
        """Width of hidden states."""
        return self.width or self.num_heads * self.head_size // 2

    @property
    def query_start(self) -> Tensor:
        """int32 [S + 1]."""
        counts = torch.tensor([0, *(count for _, count in self.rows)], dtype=torch.int32)
        return counts.cumsum(0).int()

    @property
    def seq_lens(self) -> Tensor:
        """int32 [S]: lengths after the step."""
        return torch.tensor([before + count for before, count in self.rows], dtype=torch.int32)

    @property
    def max_query_len(self) -> int:
        """Most tokens of one row."""
        return max((count for _, count in self.rows), default=0)

    @property
    def max_seq_len(self) -> int:
        """Longest sequence after the step, at least 1."""
        return max((before + count for before, count in self.rows), default=1)

    @property
    def positions(self) -> Tensor:
        """int32 [T]."""
        parts = [torch.arange(before, before + count, dtype=torch.int32) for before, count in self.rows]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int32)

    @property
    def _blocks_per_row(self) -> int:
        return -(-self.max_seq_len // self.tokens_per_block)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return len(self.rows) * self._blocks_per_row + 3

    @property
    def block_table(self) -> Tensor:
        """int32 [S,B]; entries behind a row's end are the null block."""
        order = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(len(self.rows))) + 1
        table = order[: len(self.rows) * self._blocks_per_row].view(len(self.rows), self._blocks_per_row).int()
        used = torch.arange(self._blocks_per_row) * self.tokens_per_block < self.seq_lens[:, None]
        return torch.where(used, table, 0)

    @property
    def slot_mapping(self) -> Tensor:
        """int64 [T]."""
        parts = [self._slots_of(row, before, before + count) for row, (before, count) in enumerate(self.rows)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def window_of(self, window: int) -> int:
        """A variant's window in tokens."""
        return max(1, self.max_seq_len // 3) if window == THIRD else window

    def behind(self, window: int) -> Tensor:
        """int32 [S,B]: the block table with the null block wherever no query of the row looks any more."""
        table, size = self.block_table, self.tokens_per_block
        for row, (before, _) in enumerate(self.rows if window else ()):
            table[row, : max(0, before - window + 1) // size] = 0
        return table

    def visible(self, window: int) -> Tensor:
        """bool [num_blocks * tokens_per_block]: the slots that some query of the step may see."""
        seen = torch.zeros(self.num_blocks * self.tokens_per_block, dtype=torch.bool)
        for row, (before, count) in enumerate(self.rows):
            seen[self._slots_of(row, max(0, before - window + 1) if window else 0, before + count)] = True
        return seen

    def _slots_of(self, row: int, begin: int, end: int) -> Tensor:
        at = torch.arange(begin, end)
        blocks = self.block_table[row].long()[at // self.tokens_per_block]
        return blocks * self.tokens_per_block + at % self.tokens_per_block


def shape_of(shape_class: str) -> Shape:
    """The shape of a class. Raises KeyError for an unknown pattern, ValueError for an unknown option."""
    parsed = parse(shape_class)
    return Shape(*(getattr(parsed, field.name) for field in fields(ShapeClass)))
