"""The batch state on the host, in numpy on the tensors' memory: host time per step is what counts here.

Oracle: `vllm_core.ops.batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_core.api import BatchState, StepInputs
from vllm_core.api import batch as layout
from vllm_cpu import recording
from vllm_cpu.ops.decode import FEW, DecodeStep
from vllm_cpu.ops.state import Int32s, Views, views
from vllm_cpu.recording import recorded

_HEADER = layout.HEADER_WORDS


@recorded
def batch_update(state: BatchState, packed: Tensor, header: Sequence[int]) -> None:
    """Apply the packed difference."""
    admitted, known, blocks, extra = (header[i] for i in (layout.H_ADMITTED, layout.H_TOKENS, layout.H_BLOCKS, layout.H_EXTRA))
    if not (admitted or blocks or extra):
        return
    words: Int32s = packed.numpy()
    view = views(state)
    at = _HEADER + admitted * layout.ADMIT_WORDS
    if admitted:
        _admit(view, words[_HEADER:at].reshape(admitted, -1), words[at : at + known])
    at += known
    if blocks:
        _blocks(view, words[at : at + 4 * blocks].reshape(blocks, 4))
    at += 4 * blocks
    if extra:
        _extras(view, words[at : at + 5 * extra].reshape(extra, 5))


def _admit(view: Views, admits: Int32s, tokens: Int32s) -> None:
    slots = admits[:, layout.A_SLOT]
    view.params[slots] = admits
    view.computed[slots] = admits[:, layout.A_NUM_COMPUTED]
    for table in view.tables:
        table[slots] = layout.NULL_BLOCK
    begin = 0
    for slot, count in zip(slots.tolist(), admits[:, layout.A_NUM_KNOWN].tolist(), strict=True):
        view.tokens[slot, :count] = tokens[begin : begin + count]
        begin += count


def _blocks(view: Views, rows: Int32s) -> None:
    if len(rows) <= FEW:
        for group, slot, column, block in rows.tolist():
            view.tables[group][slot, column] = block
        return
    for group, table in enumerate(view.tables):
        mine = rows[rows[:, 0] == group]
        table[mine[:, 1], mine[:, 2]] = mine[:, 3]


def _extras(view: Views, rows: Int32s) -> None:
    bias, stop, bad = (rows[rows[:, 0] == kind] for kind in (layout.E_BIAS, layout.E_STOP, layout.E_BAD_WORD))
    view.bias_ids[bias[:, 1], bias[:, 2]] = bias[:, 3]
    view.bias_values[bias[:, 1], bias[:, 2]] = bias[:, 4].copy().view(np.float32)
    view.stop_ids[stop[:, 1], stop[:, 2]] = stop[:, 3]
    view.bad_words[bad[:, 1], bad[:, 2]] = bad[:, 3]


def _refill(inputs: StepInputs, again: StepInputs) -> None:
    """Write the tensors of a recorded step's inputs from those of the step built again."""
    for target, source in zip(_tensors(inputs), _tensors(again), strict=True):
        target.copy_(source)


def _tensors(inputs: StepInputs) -> list[Tensor]:
    values = [getattr(inputs, field.name) for field in fields(StepInputs)]
    return [one for value in values for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, Tensor)]


@partial(recorded, refill=_refill)
def build_step(state: BatchState, packed: Tensor, header: Sequence[int]) -> StepInputs:
    """Gather the step's inputs; those of a pure decode step are valid until the next one is built."""
    inputs = _build(state, packed, header)
    return replace(inputs) if recording.now() is not None else inputs


def _build(state: BatchState, packed: Tensor, header: Sequence[int]) -> StepInputs:
    words: Int32s = packed.numpy()
    view = views(state)
    num_rows, num_tokens = header[layout.H_SCHEDULED], header[layout.H_NUM_TOKENS]
    begin = _HEADER + header[layout.H_ADMITTED] * layout.ADMIT_WORDS + header[layout.H_TOKENS]
    begin += 4 * header[layout.H_BLOCKS] + 5 * header[layout.H_EXTRA]
    steps = words[begin : begin + 4 * num_rows].reshape(num_rows, 4)
    if num_rows == num_tokens == header[layout.H_NUM_SAMPLED] and num_rows:
        return _build_decode(view, steps[:, 0], header[layout.H_MAX_SEQ])
    slots, counts, sampled, _ = steps.T
    slots = slots.astype(np.int64)
    computed = view.computed[slots]
    query_start = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    token_slots = slots.repeat(counts)
    positions = np.arange(num_tokens, dtype=np.int32)
    positions += (computed - query_start[:-1]).repeat(counts)
    mapping = [
        torch.from_numpy(_slots(table, size, token_slots, positions))
        for table, size in zip(view.tables, state.tokens_per_block, strict=True)
    ]
    longest = header[layout.H_MAX_SEQ]
    tables = [
        torch.from_numpy(table[slots, : max(1, -(-longest // size))])
        for table, size in zip(view.tables, state.tokens_per_block, strict=True)
    ]
    all_sampled = header[layout.H_NUM_SAMPLED] == num_rows
    lengths = computed + counts
    chosen = slice(None) if all_sampled else sampled.nonzero()[0]
    return StepInputs(
        token_ids=torch.from_numpy(view.tokens[token_slots, positions]),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots.astype(np.int32)),
        query_start=torch.from_numpy(query_start),
        seq_lens=torch.from_numpy(lengths),
        sample_rows=torch.from_numpy(query_start[1:][chosen].astype(np.int64) - 1),
        sample_slots=torch.from_numpy(slots[chosen]),
        sample_lengths=torch.from_numpy(lengths[chosen]),
        slot_mapping=tuple(mapping),
        block_tables=tuple(tables),
        num_tokens=num_tokens,
        num_rows=num_rows,
        max_query_len=header[layout.H_MAX_QUERY],
        max_seq_len=longest,
    )


def _build_decode(view: Views, slots: Int32s, longest: int) -> StepInputs:
    step = view.decode
    if step is None or step.count != len(slots):
        step = view.decode = DecodeStep(view, len(slots))
    return step.fill(view, slots, longest)


def _slots(table: Int32s, size: int, slots: npt.NDArray[Any], positions: Int32s) -> npt.NDArray[np.int64]:
    """block * size + offset of each token; int64, since large caches exceed 2**31 tokens over all layers."""
    columns, offsets = np.divmod(positions, size)
    mapping: npt.NDArray[np.int64] = table[slots, columns].astype(np.int64)
    mapping *= size
    mapping += offsets
    return mapping


@recorded
def advance(state: BatchState, inputs: StepInputs, tokens: Tensor) -> None:
    """Count the rows' tokens as computed; append the sampled ones where they fit."""
    view = views(state)
    values: Int32s = tokens.numpy()[:, 0]
    width = view.tokens.shape[1]
    step = view.decode
    if step is not None and inputs is step.inputs and inputs.max_seq_len < width:
        step.append(view, values)
        view.computed[state.num_slots] = 0
        return
    view.computed[inputs.slots.numpy()] = inputs.seq_lens.numpy()
    slots = inputs.sample_slots.numpy()[: len(values)]
    ends = view.computed[slots]
    if inputs.max_seq_len >= width:
        fits = ends < width
        slots, ends, values = slots[fits], ends[fits], values[fits]
    view.tokens[slots, ends] = values
    view.computed[state.num_slots] = 0
