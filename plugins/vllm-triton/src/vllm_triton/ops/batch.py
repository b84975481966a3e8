"""The batch state: a few small kernels a step, none of which waits for the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_core.api import BatchState, StepInputs
from vllm_core.api import batch as layout
from vllm_triton.kernels import batch
from vllm_triton.ops.launch import filled
from vllm_triton.tuning import active

_HEADER = layout.HEADER_WORDS
_TOKENS = 256
"""Tokens or table columns of one program."""


def batch_update(state: BatchState, packed: Tensor, header: Sequence[int]) -> None:
    """Apply the packed difference: admitted requests, block rows, extras."""
    admitted, known, blocks, extra = (header[i] for i in (layout.H_ADMITTED, layout.H_TOKENS, layout.H_BLOCKS, layout.H_EXTRA))
    at = _HEADER + admitted * layout.ADMIT_WORDS
    if admitted:
        _admit(state, packed, admitted, at)
    at += known
    if blocks:
        for group, table in enumerate(state.block_tables):
            batch.put_blocks[(-(-blocks // _TOKENS),)](table, packed, at, blocks, group, table.shape[1], BLOCK=_TOKENS)
    at += 4 * blocks
    if extra:
        batch.put_extras[(-(-extra // _TOKENS),)](
            state.bias_ids,
            state.bias_values,
            state.stop_ids,
            state.bad_words,
            packed,
            at,
            extra,
            MAX_BIAS=layout.MAX_BIAS,
            MAX_STOP=layout.MAX_STOP,
            MAX_BAD=layout.MAX_BAD_WORDS,
            BIAS=layout.E_BIAS,
            STOP=layout.E_STOP,
            BAD=layout.E_BAD_WORD,
            BLOCK=_TOKENS,
        )


def _admit(state: BatchState, packed: Tensor, admitted: int, tokens: int) -> None:
    batch.admit[(admitted,)](
        state.params,
        state.computed,
        state.tokens,
        packed,
        _HEADER,
        tokens,
        state.tokens.shape[1],
        WORDS=layout.ADMIT_WORDS,
        BLOCK_WORDS=32,
        SLOT=layout.A_SLOT,
        KNOWN=layout.A_NUM_KNOWN,
        COMPUTED=layout.A_NUM_COMPUTED,
        BLOCK=1024,
        BLOCK_A=128,
    )
    for table in state.block_tables:
        width = table.shape[1]
        batch.clear_tables[(admitted, -(-width // 1024))](
            table, packed, _HEADER, width, WORDS=layout.ADMIT_WORDS, SLOT=layout.A_SLOT, BLOCK=1024
        )


def build_step(state: BatchState, packed: Tensor, header: Sequence[int]) -> StepInputs:
    """Gather the step's inputs."""
    rows, tokens, sampled = header[layout.H_SCHEDULED], header[layout.H_NUM_TOKENS], header[layout.H_NUM_SAMPLED]
    longest, most = header[layout.H_MAX_SEQ], header[layout.H_MAX_QUERY]
    steps = _HEADER + header[layout.H_ADMITTED] * layout.ADMIT_WORDS + header[layout.H_TOKENS]
    steps += 4 * header[layout.H_BLOCKS] + 5 * header[layout.H_EXTRA]
    counts = (tokens, tokens, rows, rows + 1, rows, sampled)
    sizes = [filled(count) for count in counts]
    narrow = torch.empty(sum(sizes), dtype=torch.int32, device=packed.device).split(sizes)
    token_ids, positions, slots, query_start, seq_lens, sample_lengths = (
        piece[:count] for piece, count in zip(narrow, counts, strict=True)
    )
    wide = torch.empty((2, filled(sampled)), dtype=torch.int64, device=packed.device)
    sample_rows, sample_slots = wide[0, :sampled], wide[1, :sampled]
    dependent = active().dependent
    if rows:
        # Two variants of the kernel: a tile of one lane is as quick as the smallest that there is.
        block = 16 if most == 1 else _TOKENS
        batch.build_rows[(rows, -(-most // block))](
            token_ids,
            positions,
            slots,
            query_start,
            seq_lens,
            sample_rows,
            sample_slots,
            sample_lengths,
            packed,
            steps,
            rows,
            state.computed,
            state.tokens,
            state.tokens.shape[1],
            BLOCK_S=128,
            BLOCK=block,
            num_warps=1,
            **dependent,
        )
    else:
        query_start.zero_()
    mapping, tables = [], []
    for table, size in zip(state.block_tables, state.tokens_per_block, strict=True):
        width = max(1, -(-longest // size))
        mapping.append(torch.empty(tokens, dtype=torch.int64, device=packed.device))
        tables.append(torch.empty((rows, width), dtype=torch.int32, device=packed.device))
        if rows:
            batch.build_group[(rows, -(-max(width, most) // _TOKENS))](
                mapping[-1],
                tables[-1],
                slots,
                query_start,
                seq_lens,
                table,
                table.shape[1],
                width,
                size,
                BLOCK=_TOKENS,
                num_warps=2,
                **dependent,
            )
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_start=query_start,
        seq_lens=seq_lens,
        sample_rows=sample_rows,
        sample_slots=sample_slots,
        sample_lengths=sample_lengths,
        slot_mapping=tuple(mapping),
        block_tables=tuple(tables),
        num_tokens=tokens,
        num_rows=rows,
        max_query_len=most,
        max_seq_len=longest,
    )


def advance(state: BatchState, inputs: StepInputs, tokens: Tensor) -> None:
    """Count the rows' tokens as computed; append the sampled ones where they fit."""
    rows = inputs.num_rows
    if not rows:
        return
    dependent = active().dependent
    sampled = min(len(tokens), len(inputs.sample_slots))
    batch.advance[(-(-max(rows, sampled) // 128),)](
        state.computed,
        state.tokens,
        inputs.slots,
        inputs.seq_lens,
        inputs.sample_slots,
        inputs.sample_lengths,
        tokens,
        rows,
        sampled,
        state.num_slots,
        state.tokens.shape[1],
        BLOCK=128,
        num_warps=4,
        **dependent,
    )
