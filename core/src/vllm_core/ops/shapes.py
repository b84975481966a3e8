"""Shape classes of the input generators: which sequences are in a step, and the sizes of heads and blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Per class: (tokens before the step, tokens of the step) of each row, query heads, KV heads, head size, block size.
_ROWS: dict[str, tuple[tuple[tuple[int, int], ...], int, int, int, int]] = {
    "one_token": (((0, 1),), 4, 4, 64, 16),
    "one_sequence": (((0, 37),), 4, 4, 96, 16),
    "block_edges": (((15, 1), (16, 1), (0, 16), (0, 17), (31, 2), (8, 8)), 4, 4, 64, 16),
    "mixed": (((40, 1), (0, 23), (5, 9), (63, 1), (20, 1), (11, 30)), 8, 4, 128, 16),
    "gqa": (((9, 1), (0, 5), (33, 3)), 9, 3, 80, 8),
    "long": (((700, 1), (0, 300), (500, 40)), 4, 1, 256, 32),
    "empty": ((), 4, 4, 64, 16),
}
CLASSES = tuple(_ROWS)
KV_CLASSES = tuple(name for name in CLASSES if name != "empty")
ENCODER_CLASSES = KV_CLASSES


@dataclass(frozen=True, slots=True)
class Shape:
    """One step's rows. Blocks of a row lie scattered; block 0 belongs to nobody."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    tokens_per_block: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(count for _, count in self.rows)

    @property
    def hidden(self) -> int:
        """Width of hidden states."""
        return self.num_heads * self.head_size // 2

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
        table = order[: len(self.rows) * self._blocks_per_row].view(len(self.rows), -1).int()
        used = torch.arange(self._blocks_per_row) * self.tokens_per_block < self.seq_lens[:, None]
        return torch.where(used, table, 0)

    @property
    def slot_mapping(self) -> Tensor:
        """int64 [T]."""
        table, size = self.block_table.tolist(), self.tokens_per_block
        return torch.tensor(
            [
                table[row][at // size] * size + at % size
                for row, (before, count) in enumerate(self.rows)
                for at in range(before, before + count)
            ],
            dtype=torch.int64,
        )


def shape_of(shape_class: str) -> Shape:
    """The shape of a class. Raises KeyError for an unknown one."""
    return Shape(*_ROWS[shape_class])
