"""The tail through the C ABI. Oracles: `vllm_core.ops.sampling`, `vllm_core.ops.penalties`."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_core.api import BatchState, Logprobs
from vllm_cpu.ops.native_batch import native_state
from vllm_cpu.ops.native_call import function, packer

_pack_tail, _pack_logits = packer("PPPPPPqqq"), packer("PPPPPPPPqqqq")
_sample, _logit_adjust = map(function, ("sample", "logit_adjust"))
_log_probabilities, _grammar_mask = map(function, ("log_probabilities", "grammar_mask"))


def sample(
    tokens: Tensor, nonfinite: Tensor, logits: Tensor, state: BatchState, slots: Tensor, lengths: Tensor, features: int
) -> None:
    """Choose one token per row of float32 [R,V] into int32 [R,1]; mark rows that hold NaN or +inf, or nothing finite."""
    native = native_state(state)
    pointers = tokens.data_ptr(), nonfinite.data_ptr(), logits.data_ptr(), native.address
    kept = logits, slots, lengths, tokens, nonfinite, native
    _sample(_pack_tail(0, *pointers, slots.data_ptr(), lengths.data_ptr(), *logits.shape, features), *kept)


def logit_adjust(logits: Tensor, state: BatchState, slots: Tensor, lengths: Tensor, features: int) -> None:
    """Change float32 logits [R,V] in place, each row by its own parameters."""
    native = native_state(state)
    pointers = 0, 0, logits.data_ptr(), native.address, slots.data_ptr(), lengths.data_ptr()
    _logit_adjust(_pack_tail(0, *pointers, *logits.shape, features), logits, slots, lengths, native)


def log_probabilities(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """log_softmax at ``tokens``, rank among all, and the k largest."""
    rows, vocab = logits.shape
    chosen, rank = torch.empty(rows), torch.empty(rows, dtype=torch.int32)
    top, top_ids = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int32)
    pointers = (each.data_ptr() for each in (logits, tokens, chosen, rank, top_ids, top))
    _log_probabilities(_pack_logits(0, *pointers, 0, 0, rows, vocab, k, 0), logits, tokens, chosen, rank, top_ids, top)
    return Logprobs(chosen, rank, top_ids, top)


def grammar_mask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Set logits [R,V] to -inf where bit ``token % 32`` of word ``token // 32`` is 0, in the given rows."""
    pointers = logits.data_ptr(), 0, 0, 0, 0, 0, mask.data_ptr(), rows.data_ptr()
    _grammar_mask(_pack_logits(0, *pointers, *logits.shape, 0, rows.shape[0]), logits, mask, rows)
