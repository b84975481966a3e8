"""Inputs of steps in which every row has one token and is sampled: the common step, and the one whose host time counts.

The tensors are kept and written again in place while the number of rows stays, so such a step makes no small tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm_core.api import StepInputs

if TYPE_CHECKING:
    from vllm_cpu.ops.state import Int32s, Views


class DecodeStep:
    """Inputs for ``count`` rows, as tensors and as arrays on the same memory; valid until `fill` is called again."""

    def __init__(self, count: int, num_groups: int) -> None:
        self.count = count
        int32s = [np.empty(count, dtype=np.int32) for _ in range(4)]
        self.token_ids, self.positions, self.slots, self.lengths = int32s
        self.rows = np.empty(count, dtype=np.int64)
        self._columns = np.empty_like(self.rows)
        self._mapping = [np.empty_like(self.rows) for _ in range(num_groups)]
        token_ids, positions, slots, lengths = map(torch.from_numpy, int32s)
        self.inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=torch.arange(count + 1, dtype=torch.int32),
            seq_lens=lengths,
            sample_rows=torch.arange(count),
            sample_slots=torch.from_numpy(self.rows),
            sample_lengths=lengths,
            slot_mapping=tuple(map(torch.from_numpy, self._mapping)),
            block_tables=(),
            num_tokens=count,
            num_rows=count,
            max_query_len=1,
            max_seq_len=1,
        )

    def fill(self, view: Views, slots: Int32s, longest: int) -> StepInputs:
        """Gather the inputs of ``slots``, whose longest sequence has ``longest`` tokens after the step."""
        self.slots[:] = slots
        rows, positions = self.rows, self.positions
        rows[:] = slots
        view.computed.take(rows, out=positions, mode="clip")
        self.token_ids[:] = view.tokens[rows, positions]
        np.add(positions, 1, out=self.lengths)
        sizes = view.state.tokens_per_block
        groups = zip(view.tables, sizes, self._mapping, strict=True)
        self.inputs.block_tables = tuple([self._group(table, size, mapping, longest) for table, size, mapping in groups])
        self.inputs.max_seq_len = longest
        return self.inputs

    def _group(self, table: Int32s, size: int, mapping: npt.NDArray[np.int64], longest: int) -> Tensor:
        columns = self._columns
        np.floor_divide(self.positions, size, out=columns)
        mapping[:] = table[self.rows, columns]
        # block * size + position - column * size; in 64 bits, since large caches exceed 2**31 tokens over all layers.
        mapping -= columns
        mapping *= size
        mapping += self.positions
        return torch.from_numpy(table[self.rows, : max(1, -(-longest // size))])
