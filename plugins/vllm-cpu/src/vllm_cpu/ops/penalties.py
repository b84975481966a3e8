"""`logit_adjust` on the host: only the rows that ask, and only the tokens that occur. Oracle: `vllm_core.ops.penalties`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm_core.api import BatchState
from vllm_core.api import batch as layout
from vllm_cpu.ops.state import Int32s, Views, views
from vllm_cpu.recording import recorded

Row = npt.NDArray[np.float32]
_ALL = layout.F_PENALTIES | layout.F_BIAS | layout.F_MIN_LEN | layout.F_BAD_WORDS


@recorded
def logit_adjust(logits: Tensor, state: BatchState, slots: Tensor, lengths: Tensor, features: int) -> None:
    """Change float32 logits [R,V] in place, each row by its own parameters."""
    view, rows = views(state), logits.numpy()
    asked = view.params[slots.numpy(), layout.A_FEATURES] & features & _ALL
    for row in asked.nonzero()[0].tolist():
        _adjust(rows[row], view, int(slots[row]), int(lengths[row]), int(asked[row]))


def _adjust(row: Row, view: Views, slot: int, length: int, bits: int) -> None:
    params = view.params[slot]
    tokens = view.tokens[slot, :length]
    if bits & layout.F_PENALTIES:
        _penalties(row, view.floats[slot], tokens, int(params[layout.A_PROMPT_LEN]))
    if bits & layout.F_BIAS:
        count = params[layout.A_NUM_BIAS]
        np.add.at(row, view.bias_ids[slot, :count], view.bias_values[slot, :count])
    if bits & layout.F_MIN_LEN and length < params[layout.A_MIN_LEN]:
        row[view.stop_ids[slot, : params[layout.A_NUM_STOP]]] = -np.inf
    if bits & layout.F_BAD_WORDS:
        _bad_words(row, view.bad_words[slot, : params[layout.A_NUM_BAD]].tolist(), tokens)


def _penalties(row: Row, floats: Row, tokens: Int32s, prompt_len: int) -> None:
    repetition = floats[layout.A_REPETITION]
    if repetition != 1.0:
        seen = np.unique(tokens)
        values = row[seen]
        row[seen] = np.where(values > 0, values / repetition, values * repetition)
    output, times = np.unique(tokens[prompt_len:], return_counts=True)
    row[output] -= floats[layout.A_FREQUENCY] * times.astype(np.float32)
    row[output] -= floats[layout.A_PRESENCE]


def _bad_words(row: Row, record: list[int], tokens: Int32s) -> None:
    """Record: length n, then n token ids, repeated."""
    at = 0
    while at < len(record):
        *before, last = record[at + 1 : at + 1 + record[at]]
        if len(before) <= len(tokens) and before == tokens[len(tokens) - len(before) :].tolist():
            row[last] = -np.inf
        at += 1 + record[at]
