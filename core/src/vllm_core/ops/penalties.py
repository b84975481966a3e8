"""Reference of `logit_adjust`: penalties, bias, suppressed stop tokens, bad words."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_core.api import batch as layout
from vllm_core.api.batch import BatchState

_NEVER = float("-inf")


def logit_adjust(logits: Tensor, state: BatchState, slots: Tensor, lengths: Tensor, features: int) -> None:
    """Change logits [R,V] in place, each row by its own parameters. `lengths` exclude the token to be sampled."""
    params = state.params[slots]
    if features & layout.F_PENALTIES:
        _penalties(logits, params, state.tokens[slots].long(), lengths)
    if features & layout.F_BIAS:
        _bias(logits, params, state.bias_ids[slots].long(), state.bias_values[slots])
    if features & layout.F_MIN_LEN:
        _minimum_length(logits, params, state.stop_ids[slots].long(), lengths)
    if features & layout.F_BAD_WORDS:
        _bad_words(logits, params, state.bad_words[slots].long(), state.tokens[slots].long(), lengths)


def _asked(params: Tensor, bit: int) -> Tensor:
    return (params[:, layout.A_FEATURES, None] & bit) != 0


def _penalties(logits: Tensor, params: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    values = params.view(torch.float32)
    repetition, presence, frequency = (
        values[:, column, None] for column in (layout.A_REPETITION, layout.A_PRESENCE, layout.A_FREQUENCY)
    )
    at = torch.arange(tokens.shape[1], device=tokens.device)
    known = at < lengths[:, None]
    output = known & (at >= params[:, layout.A_PROMPT_LEN, None])
    seen = _counts(tokens, known, logits.shape[1]) > 0
    times = _counts(tokens, output, logits.shape[1])
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    adjusted = torch.where(seen, repeated, logits)
    adjusted = adjusted - frequency * times
    adjusted = adjusted - presence * (times > 0)
    logits.copy_(torch.where(_asked(params, layout.F_PENALTIES), adjusted, logits))


def _counts(tokens: Tensor, valid: Tensor, vocab: int) -> Tensor:
    """int32 [R, vocab]: how often each token occurs where valid. One more column takes the rest."""
    counts = torch.zeros(len(tokens), vocab + 1, dtype=torch.int32, device=tokens.device)
    counts.scatter_add_(1, torch.where(valid, tokens, vocab), torch.ones_like(tokens, dtype=torch.int32))
    return counts[:, :vocab]


def _bias(logits: Tensor, params: Tensor, ids: Tensor, values: Tensor) -> None:
    valid = torch.arange(ids.shape[1], device=ids.device) < params[:, layout.A_NUM_BIAS, None]
    valid &= _asked(params, layout.F_BIAS)
    logits.scatter_add_(1, torch.where(valid, ids, 0), torch.where(valid, values, 0.0))


def _minimum_length(logits: Tensor, params: Tensor, ids: Tensor, lengths: Tensor) -> None:
    valid = torch.arange(ids.shape[1], device=ids.device) < params[:, layout.A_NUM_STOP, None]
    valid &= _asked(params, layout.F_MIN_LEN) & (lengths < params[:, layout.A_MIN_LEN])[:, None]
    _forbid(logits, ids, valid)


def _forbid(logits: Tensor, ids: Tensor, valid: Tensor) -> None:
    """Set logits to -inf at the valid ids; one more column takes the rest."""
    vocab = logits.shape[1]
    forbidden = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device)
    forbidden.scatter_(1, torch.where(valid, ids, vocab), True)
    logits.masked_fill_(forbidden[:, :vocab], _NEVER)


def _bad_words(logits: Tensor, params: Tensor, record: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """Walk the ragged records word by word, all rows at once: at most one word for every two entries."""
    width = record.shape[1]
    end = torch.where(_asked(params, layout.F_BAD_WORDS)[:, 0], params[:, layout.A_NUM_BAD], 0).long()
    start = torch.zeros_like(end)
    step = torch.arange(width, device=record.device)
    last, matched = [], []
    for _ in range(width // 2):
        count = record.gather(1, start[:, None].clamp(max=width - 1))[:, 0]
        body = record.gather(1, (start[:, None] + 1 + step).clamp(max=width - 1))
        before = lengths.long()[:, None] - (count[:, None] - 1) + step
        context = tokens.gather(1, before.clamp(0, tokens.shape[1] - 1))
        same = ((body == context) & (before >= 0)) | (step >= count[:, None] - 1)
        matched.append(same.all(1) & (start < end))
        last.append(body.gather(1, (count[:, None] - 1).clamp(0, width - 1)))
        start = torch.where(start < end, start + 1 + count, start)
    _forbid(logits, torch.cat(last, 1), torch.stack(matched, 1))
