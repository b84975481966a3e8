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


_ONE = np.ones(1, dtype=np.int32)
FEW = 8
"""Rows up to which plain Python is quicker than arrays."""


class DecodeStep:
    """Inputs for ``count`` rows of a state, as tensors and as arrays on the same memory; valid until the next `fill`.

    `_at` are the places of the rows' tokens in `Views.tokens_flat`. Flat indices and operands of one dtype: with few rows
    a call's overhead is all that it costs, and two indices or a cast double it.
    """

    def __init__(self, view: Views, count: int) -> None:
        self.count = count
        int32s = [np.empty(count, dtype=np.int32) for _ in range(4)]
        self._token_ids, self._positions, self._slots, self._lengths = int32s
        self._rows, self._at, self._wide = (np.empty(count, dtype=np.int64) for _ in range(3))
        self._known, self._few = b"", [0]
        self._token_base = np.empty_like(self._rows)
        self._groups = [
            _Group(table, flat, size, count)
            for table, flat, size in zip(view.tables, view.tables_flat, view.state.tokens_per_block, strict=True)
        ]
        token_ids, positions, slots, lengths = map(torch.from_numpy, int32s)
        self.inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=torch.arange(count + 1, dtype=torch.int32),
            seq_lens=lengths,
            sample_rows=torch.arange(count),
            sample_slots=torch.from_numpy(self._rows),
            sample_lengths=lengths,
            slot_mapping=tuple(torch.from_numpy(group.mapping) for group in self._groups),
            block_tables=(),
            num_tokens=count,
            num_rows=count,
            max_query_len=1,
            max_seq_len=1,
        )

    def fill(self, view: Views, slots: Int32s, longest: int) -> StepInputs:
        """Gather the inputs of ``slots``, whose longest sequence has ``longest`` tokens after the step."""
        known = slots.tobytes()
        if known != self._known:
            self._known = known
            self._place(view, slots)
        tables = self._fill_few(view, longest) if self.count <= FEW else self._fill_many(view, longest)
        self.inputs.block_tables = tuple(tables)
        self.inputs.max_seq_len = longest
        return self.inputs

    def append(self, view: Views, tokens: Int32s) -> None:
        """Count the rows' tokens as computed and append ``tokens``, all of which fit."""
        if self.count <= FEW:
            for slot, length, at, token in zip(
                self._few, self._lengths.tolist(), self._at.tolist(), tokens.tolist(), strict=True
            ):
                view.computed[slot] = length
                view.tokens_flat[at + 1] = token
        else:
            view.computed[self._rows] = self._lengths
            view.tokens_flat[self._at + 1] = tokens

    def _fill_few(self, view: Views, longest: int) -> list[Tensor]:
        positions = [view.computed.item(slot) for slot in self._few]
        for row, (base, position) in enumerate(zip(self._token_base.tolist(), positions, strict=True)):
            self._positions[row] = position
            self._lengths[row] = position + 1
            self._at[row] = base + position
            self._token_ids[row] = view.tokens_flat.item(base + position)
        return [group.fill_few(self._few, positions, longest) for group in self._groups]

    def _fill_many(self, view: Views, longest: int) -> list[Tensor]:
        view.computed.take(self._rows, out=self._positions, mode="clip")
        np.add(self._positions, _ONE, out=self._lengths)
        self._wide[:] = self._positions
        np.add(self._token_base, self._wide, out=self._at)
        view.tokens_flat.take(self._at, out=self._token_ids, mode="clip")
        return [group.fill_many(self._rows, self._wide, longest) for group in self._groups]

    def _place(self, view: Views, slots: Int32s) -> None:
        self._slots[:] = slots
        self._rows[:] = slots
        self._few = slots[:FEW].tolist()
        np.multiply(self._rows, view.tokens.shape[1], out=self._token_base)
        for group in self._groups:
            group.place(self._rows)


class _Group:
    """The slot mapping of one KV group."""

    def __init__(self, table: Int32s, flat: Int32s, size: int, count: int) -> None:
        self._table, self._flat = table, flat
        self._most: int = table.shape[1]
        self._size, self._divisor = size, np.array([size], dtype=np.int64)
        self._few_rows = np.empty((count, 0), dtype=np.int32)
        self._few_tensor = torch.from_numpy(self._few_rows)
        self.mapping, self._base, self._columns, self._at = (np.empty(count, dtype=np.int64) for _ in range(4))

    def place(self, rows: npt.NDArray[np.int64]) -> None:
        """Rows of the table to read from now on."""
        np.multiply(rows, self._table.shape[1], out=self._base)

    def fill_few(self, slots: list[int], positions: list[int], longest: int) -> Tensor:
        """Write block * size + offset of each position, one by one; return the rows of the table."""
        table, size = self._table, self._size
        width = self._width(longest)
        if self._few_rows.shape[1] != width:
            self._few_rows = np.empty((len(slots), width), dtype=np.int32)
            self._few_tensor = torch.from_numpy(self._few_rows)
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            column = position // size
            self.mapping[row] = (table.item(slot, column) - column) * size + position
            self._few_rows[row] = table[slot, :width]
        return self._few_tensor

    def fill_many(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], longest: int) -> Tensor:
        """The same at once; in 64 bits, since large caches exceed 2**31 tokens over all layers."""
        columns, mapping = self._columns, self.mapping
        np.floor_divide(positions, self._divisor, out=columns)
        np.add(self._base, columns, out=self._at)
        mapping[:] = self._flat.take(self._at)
        np.subtract(mapping, columns, out=mapping)
        np.multiply(mapping, self._divisor, out=mapping)
        np.add(mapping, positions, out=mapping)
        return torch.from_numpy(self._table[rows, : self._width(longest)])

    def _width(self, longest: int) -> int:
        return min(max(1, -(-longest // self._size)), self._most)
