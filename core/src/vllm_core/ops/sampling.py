"""References of the tail: sampling, log-probabilities, grammar masks. Each row depends on itself alone."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_core.api import batch as layout
from vllm_core.api.batch import BatchState, Logprobs
from vllm_core.ops.penalties import logit_adjust
from vllm_core.ops.random import uniform

__all__ = ["grammar_mask", "log_probabilities", "logit_adjust", "sample"]


def grammar_mask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Set logits [R,V] to -inf where bit ``token % 32`` of word ``token // 32`` is 0, in the given rows."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = ((mask.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill_(~allowed, float("-inf"))


def sample(
    tokens: Tensor, nonfinite: Tensor, logits: Tensor, state: BatchState, slots: Tensor, lengths: Tensor, features: int
) -> None:
    """Choose one token per row of float32 [R,V]; softmax in float32, cumulative sums in float64."""
    largest, chosen = logits.max(dim=1)
    # NaN and +inf win the maximum; -inf wins only where nothing is finite.
    finite = torch.isfinite(largest)
    nonfinite.copy_(~finite)
    if features & layout.F_RANDOM:
        params = state.params[slots]
        draws = (params.view(torch.float32)[:, layout.A_TEMPERATURE] > 0) & finite
        chosen = torch.where(draws, _draw(logits, params, lengths, features), chosen)
    tokens.copy_(chosen.unsqueeze(1))


def _draw(logits: Tensor, params: Tensor, lengths: Tensor, features: int) -> Tensor:
    temperature = params.view(torch.float32)[:, layout.A_TEMPERATURE, None]
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    probabilities = _filter(scaled, params) if features & layout.F_FILTER else scaled.softmax(1)
    cumulative = probabilities.cumsum(1, dtype=torch.float64)
    u = uniform(params[:, layout.A_SEED_LOW], params[:, layout.A_SEED_HIGH], lengths)
    found = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return found.clamp_(max=logits.shape[1] - 1)  # only rows that are marked nonfinite need the clamp


def _filter(scaled: Tensor, params: Tensor) -> Tensor:
    """Probabilities [R,V], 0 where top_k, top_p or min_p drop a token; not normalised again."""
    values = params.view(torch.float32)
    top_p, min_p = values[:, layout.A_TOP_P, None], values[:, layout.A_MIN_P, None]
    top_k = params[:, layout.A_TOP_K, None].long()
    ordered = scaled.sort(dim=1, descending=True).values
    kth = ordered.gather(1, (top_k - 1).clamp(0, ordered.shape[1] - 1))
    scaled = torch.where((top_k > 0) & (scaled < kth), float("-inf"), scaled)
    probabilities = scaled.softmax(1)
    ordered = probabilities.sort(dim=1, descending=True).values
    before = ordered.cumsum(1, dtype=torch.float64)
    kept = before - ordered < top_p * before[:, -1:]
    smallest = torch.where(kept, ordered, float("inf")).amin(1, keepdim=True)
    nucleus = torch.where(top_p < 1, smallest, 0.0)
    threshold = torch.maximum(nucleus, min_p * ordered[:, :1])
    return torch.where(probabilities >= threshold, probabilities, 0.0)


def log_probabilities(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """log_softmax at ``tokens``, rank among all, and the k largest."""
    chosen = logits.gather(1, tokens[:, None])
    total = logits.logsumexp(1, keepdim=True)
    rank = (logits > chosen).sum(1, dtype=torch.int32) + 1
    top, top_ids = logits.topk(k, dim=1)
    return Logprobs((chosen - total)[:, 0], rank, top_ids.int(), top - total)
