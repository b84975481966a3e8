"""References: the device-resident batch state.

The shapes of the step come from the header, which the caller gives on the host; everything else is computed on the
device. Entries that do not
concern a table are written to the padding row, so that no shape depends on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_core.api import batch as layout
from vllm_core.api.batch import BatchState, StepInputs


class _Sections(NamedTuple):
    admits: Tensor
    tokens: Tensor
    blocks: Tensor
    extras: Tensor
    steps: Tensor


def _sections(packed: Tensor, header: Sequence[int]) -> _Sections:
    counts = [header[i] for i in (layout.H_ADMITTED, layout.H_TOKENS, layout.H_BLOCKS, layout.H_EXTRA, layout.H_SCHEDULED)]
    widths = (layout.ADMIT_WORDS, 1, 4, 5, 4)
    begin, parts = layout.HEADER_WORDS, []
    for count, width in zip(counts, widths, strict=True):
        parts.append(packed[begin : begin + count * width].view(count, width))
        begin += count * width
    return _Sections(*parts)


def batch_update(state: BatchState, packed: Tensor, header: Sequence[int]) -> None:
    """Apply the packed difference: admits, their tokens, block rows, extras."""
    parts = _sections(packed, header)
    if len(parts.admits):
        _admit(state, parts.admits, parts.tokens[:, 0])
    if len(parts.blocks):
        for group, table in enumerate(state.block_tables):
            mine = parts.blocks[:, 0] == group
            _put(table, state.num_slots, mine, parts.blocks[:, 1], parts.blocks[:, 2], parts.blocks[:, 3])
    if len(parts.extras):
        _extras(state, parts.extras)


def _admit(state: BatchState, admits: Tensor, tokens: Tensor) -> None:
    slots = admits[:, layout.A_SLOT].long()
    state.params[slots] = admits
    state.computed[slots] = admits[:, layout.A_NUM_COMPUTED]
    for table in state.block_tables:
        table[slots] = layout.NULL_BLOCK
    known = admits[:, layout.A_NUM_KNOWN].long()
    first = known.cumsum(0) - known
    rows = torch.repeat_interleave(slots, known, output_size=len(tokens))
    columns = torch.arange(len(tokens), device=tokens.device)
    columns -= torch.repeat_interleave(first, known, output_size=len(tokens))
    state.tokens[rows, columns] = tokens


def _put(table: Tensor, padding: int, mine: Tensor, slots: Tensor, columns: Tensor, values: Tensor) -> None:
    """Write ``values`` where ``mine``; the others write 0 to the padding row."""
    zero = torch.zeros_like(values)
    table[torch.where(mine, slots, padding).long(), torch.where(mine, columns, zero).long()] = torch.where(mine, values, zero)


def _extras(state: BatchState, extras: Tensor) -> None:
    kind, slots, columns, first, second = extras.unbind(1)
    bits = second.contiguous().view(torch.float32)
    _put(state.bias_ids, state.num_slots, kind == layout.E_BIAS, slots, columns, first)
    _put(state.bias_values, state.num_slots, kind == layout.E_BIAS, slots, columns, bits)
    _put(state.stop_ids, state.num_slots, kind == layout.E_STOP, slots, columns, first)
    _put(state.bad_words, state.num_slots, kind == layout.E_BAD_WORD, slots, columns, first)


def build_step(state: BatchState, packed: Tensor, header: Sequence[int]) -> StepInputs:
    """Gather the step's inputs."""
    steps = _sections(packed, header).steps
    num_tokens, num_rows, num_sampled = header[layout.H_NUM_TOKENS], len(steps), header[layout.H_NUM_SAMPLED]
    max_seq = header[layout.H_MAX_SEQ]
    slots, count, sampled, _ = steps.unbind(1)
    computed = state.computed[slots.long()]
    query_start = torch.zeros(num_rows + 1, dtype=torch.int32, device=steps.device)
    query_start[1:] = count.cumsum(0)
    token_row = torch.repeat_interleave(torch.arange(num_rows, device=steps.device), count, output_size=num_tokens)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=steps.device) + (computed - query_start[:-1])[token_row]
    token_slot, at = slots.long()[token_row], positions.long()
    chosen = torch.argsort(sampled, descending=True, stable=True)[:num_sampled]
    mapping, tables = [], []
    for table, size in zip(state.block_tables, state.tokens_per_block, strict=True):
        block = table[token_slot, at // size].long()
        mapping.append(block * size + at % size)
        tables.append(table[slots.long(), : max(1, -(-max_seq // size))])
    return StepInputs(
        token_ids=state.tokens[token_slot, at],
        positions=positions,
        slots=slots.contiguous(),
        query_start=query_start,
        seq_lens=computed + count,
        sample_rows=(query_start[1:][chosen] - 1).long(),
        sample_slots=slots[chosen].long(),
        sample_lengths=(computed + count)[chosen],
        slot_mapping=tuple(mapping),
        block_tables=tuple(tables),
        num_tokens=num_tokens,
        num_rows=num_rows,
        max_query_len=header[layout.H_MAX_QUERY],
        max_seq_len=max_seq,
    )


def advance(state: BatchState, inputs: StepInputs, tokens: Tensor) -> None:
    """Count the rows' tokens as computed; append the sampled ones where they fit, else to the padding row."""
    state.computed[inputs.slots.long()] = inputs.seq_lens
    slots = inputs.sample_slots[: len(tokens)]
    end = state.computed[slots].long()
    _put(state.tokens, state.num_slots, end < state.tokens.shape[1], slots, end, tokens[:, 0])
    state.computed[state.num_slots :].zero_()
