"""Tokens that rounding decides: a softmax in another order of summation may move a boundary by its last bits.

The specification of `sample` is exact, and so are two implementations of it but for draws, and thresholds of top_p and
min_p, that fall onto a boundary. `is_tie` says whether a token that differs is one of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_core.api import batch as layout
from vllm_core.ops.random import uniform

WIDTH = 1e-5
"""Share of the total probability within which float32 sums of a large vocabulary differ."""


def is_tie(logits: Tensor, params: Tensor, length: int, token: int) -> bool:
    """Whether ``token`` is what `sample` chooses from float32 [V], with a draw or a threshold moved by `WIDTH`."""
    values = params.view(torch.float32)
    temperature = float(values[layout.A_TEMPERATURE])
    if temperature <= 0 or not 0 <= token < len(logits):
        return False
    number = torch.tensor([length])
    u = float(uniform(params[None, layout.A_SEED_LOW], params[None, layout.A_SEED_HIGH], number))
    scaled = logits.double() / temperature
    filtered = bool(params[layout.A_FEATURES] & layout.F_FILTER)
    for slack in (0.0, WIDTH, -WIDTH) if filtered else (0.0,):
        kept = _filtered(scaled, params, values, slack) if filtered else scaled.softmax(0)
        ends = kept.cumsum(0)
        total, end = float(ends[-1]), float(ends[token])
        begin = end - float(kept[token])
        if kept[token] > 0 and begin - WIDTH * total <= u * total <= end + WIDTH * total:
            return True
    return False


def _filtered(scaled: Tensor, params: Tensor, values: Tensor, slack: float) -> Tensor:
    """Probabilities that top_k, top_p and min_p leave, thresholds moved by ``slack``."""
    top_k = int(params[layout.A_TOP_K])
    if 0 < top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], float("-inf"))
    probabilities = scaled.softmax(0)
    threshold = float(values[layout.A_MIN_P]) * float(probabilities.max())
    top_p = float(values[layout.A_TOP_P])
    if top_p < 1:
        ordered = probabilities.sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        threshold = max(threshold, float(ordered[before < top_p + slack].min()))
    return torch.where(probabilities >= threshold * (1 - slack), probabilities, 0.0)
