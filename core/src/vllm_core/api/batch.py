"""The batch state on the device, the packed difference that updates it, and the inputs of one step.

The host sends differences, not batches: one int32 buffer per step, laid out by this module. The device alone
knows lengths; the host keeps upper bounds. Everything here is plain data; imports no torch at run time.

Layout of the packed buffer, in int32 words:

    header  [HEADER_WORDS]                    indices `H_*`
    admit   [num_admitted, ADMIT_WORDS]       one record per request that takes a slot, columns `A_*`
    tokens  [sum of A_NUM_KNOWN]              all known tokens of the admitted requests, in their order
    blocks  [num_block_rows, 4]               group, slot, index in the table, block id
    extra   [num_extra, 5]                    kind `E_*`, slot, index, value, value (see below)
    steps   [num_scheduled, 4]                slot, number of tokens, sampled (1 or 0), first logit row to keep

`steps` is ordered as the step's rows. A slot that is admitted has its block table cleared to the null block first.
Floats travel as their bits. Slots are 0..num_slots-1; row num_slots of every state tensor belongs to padding.
Block 0 of every group is the null block: finished and padded rows write there, nobody reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAYOUT_VERSION = 1
NULL_BLOCK = 0

HEADER_WORDS = 16
H_VERSION, H_ADMITTED, H_TOKENS, H_BLOCKS, H_EXTRA, H_SCHEDULED = 0, 1, 2, 3, 4, 5
H_NUM_TOKENS = 6  # tokens of the whole step
H_NUM_SAMPLED = 7  # rows of `steps` with sampled = 1
H_MAX_QUERY = 8  # most tokens of one row
H_MAX_SEQ = 9  # upper bound of a row's length after the step

ADMIT_WORDS = 24
A_SLOT, A_NUM_KNOWN, A_NUM_COMPUTED, A_PROMPT_LEN = 0, 1, 2, 3
A_MIN_LEN = 4  # stop tokens are suppressed while the sequence is shorter than this
A_TOP_K = 5  # 0 turns it off
A_NUM_STOP, A_NUM_BIAS, A_NUM_BAD = 6, 7, 8  # entries; of bad words, int32 words of the ragged record
A_SEED_LOW, A_SEED_HIGH = 9, 10
A_FEATURES = 11  # bits `F_*`
A_TEMPERATURE, A_TOP_P, A_MIN_P, A_REPETITION, A_PRESENCE, A_FREQUENCY = 12, 13, 14, 15, 16, 17  # float32 bits
A_ADAPTER = 18

# Feature bits of a request; a step's StepKey carries their union over its sampled rows.
F_RANDOM, F_FILTER, F_PENALTIES, F_BIAS, F_MIN_LEN, F_BAD_WORDS, F_LOGPROBS, F_PROMPT_LOGPROBS, F_MASK = (
    1 << bit for bit in range(9)
)

E_BIAS, E_STOP, E_BAD_WORD = 0, 1, 2
# E_BIAS:     index in the list, token id, float32 bits of the bias
# E_STOP:     index in the list, token id, 0
# E_BAD_WORD: index in the ragged record, one int32 of it, 0. Record: length n, then n token ids, repeated.

MAX_BIAS, MAX_STOP, MAX_BAD_WORDS = 512, 64, 256
"""Capacity per slot of the ragged records, in entries."""


@dataclass(slots=True)
class BatchState:
    """Named tensors per slot, resident on the device; row `num_slots` is padding.

    tokens      int32 [num_slots + 1, max_len + 1]   every known token of the sequence, sampled ones included
    computed    int32 [num_slots + 1]                tokens whose KV is written (the next step's first position)
    params      int32 [num_slots + 1, ADMIT_WORDS]   the admit record, floats as bits
    bias_ids    int32 [num_slots + 1, MAX_BIAS];  bias_values float32, same shape
    stop_ids    int32 [num_slots + 1, MAX_STOP]
    bad_words   int32 [num_slots + 1, MAX_BAD_WORDS]
    block_tables  per KV group: int32 [num_slots + 1, max_blocks]
    tokens_per_block  per KV group, on the host
    """

    num_slots: int
    tokens: torch.Tensor
    computed: torch.Tensor
    params: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    stop_ids: torch.Tensor
    bad_words: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    tokens_per_block: tuple[int, ...]


@dataclass(slots=True)
class StepInputs:
    """Inputs of one step, written by the op `build_step`; T tokens, S rows, R sampled rows.

    token_ids     int32 [T]
    positions     int32 [T]
    slots         int32 [S]       slot of each row
    query_start   int32 [S + 1]   first token of each row; query_start[S] = T
    seq_lens      int32 [S]       length of each sequence after the step
    sample_rows   int64 [R]       index in T of the token whose logits are sampled
    sample_slots  int64 [R]
    sample_lengths  int32 [R]     length of the sequence, the token to be sampled not counted
    slot_mapping  per KV group: int64 [T]    block * tokens_per_block + offset
    block_tables  per KV group: int32 [S, max_blocks of this step]

    The int fields are host-side upper bounds, so that no kernel launch has to wait for the device.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    sample_rows: torch.Tensor
    sample_slots: torch.Tensor
    sample_lengths: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]
    block_tables: tuple[torch.Tensor, ...]
    num_tokens: int
    num_rows: int
    max_query_len: int
    max_seq_len: int


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of R rows, before penalties and temperature.

    chosen float32 [R], rank int32 [R] (1 = most likely), top_ids int32 [R, K], top float32 [R, K], descending.
    """

    chosen: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor
