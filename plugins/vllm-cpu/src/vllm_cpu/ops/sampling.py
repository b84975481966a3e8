"""`sample` on the host. Oracle: `vllm_core.ops.sampling`.

Greedy rows cost one pass of numpy's argmax; only rows that draw go further, each by itself, so that a row's token
does not depend on its neighbours.
"""

from __future__ import annotations

from math import isfinite

import numpy as np
import torch
from torch import Tensor

from vllm_core.api import BatchState
from vllm_core.api import batch as layout
from vllm_cpu.ops.decode import FEW
from vllm_cpu.ops.philox import uniform
from vllm_cpu.ops.state import Views, views
from vllm_cpu.recording import recorded

_FIRST_CANDIDATES = 256
_MORE = 16
"""Most likely tokens looked at for top_p, and the factor by which to look at more where they do not reach it."""


@recorded
def sample(
    tokens: Tensor, nonfinite: Tensor, logits: Tensor, state: BatchState, slots: Tensor, lengths: Tensor, features: int
) -> None:
    """Choose one token per row of float32 [R,V] into int32 [R,1]; mark rows that hold NaN or +inf, or nothing finite."""
    rows, flags, chosen = logits.numpy(), nonfinite.numpy(), tokens.numpy()[:, 0]
    if not len(rows):
        return
    best = rows.argmax(axis=1)  # the first of equal ones; NaN and +inf win, -inf only where nothing else is
    chosen[:] = best
    if len(best) <= FEW:
        for row, token in enumerate(best.tolist()):
            flags[row] = not isfinite(rows.item(row, token))
    else:
        np.logical_not(np.isfinite(rows[np.arange(len(best)), best]), out=flags)
    if features & layout.F_RANDOM:
        view, at = views(state), slots.numpy()
        drawn = ((view.floats[at, layout.A_TEMPERATURE] > 0) & ~flags).nonzero()[0]
        if len(drawn):
            at = at[drawn]
            words = view.params[at]
            low, high = (words[:, column].copy() for column in (layout.A_SEED_LOW, layout.A_SEED_HIGH))
            numbers = uniform(low, high, lengths.numpy()[drawn]).tolist()
            for row, slot, u in zip(drawn.tolist(), at.tolist(), numbers, strict=True):
                chosen[row] = _draw(logits[row], view, slot, u)


def _draw(row: Tensor, view: Views, slot: int, u: float) -> int:
    """The first token at which the cumulative probability exceeds u times its total."""
    params, floats = view.params[slot], view.floats[slot]
    scaled = row / float(floats[layout.A_TEMPERATURE])
    if params[layout.A_FEATURES] & layout.F_FILTER:
        probabilities = _filtered(scaled, int(params[layout.A_TOP_K]), floats[layout.A_TOP_P], floats[layout.A_MIN_P])
    else:
        probabilities = scaled.softmax(0)
    cumulative = probabilities.cumsum(0, dtype=torch.float64).numpy()
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def _filtered(scaled: Tensor, top_k: int, top_p: np.float32, min_p: np.float32) -> Tensor:
    """Probabilities with what top_k, top_p and min_p drop at 0; ties at a threshold stay."""
    if 0 < top_k < len(scaled):
        kth = scaled.topk(top_k).values[-1]
        scaled.masked_fill_(scaled < kth, float("-inf"))
    probabilities = scaled.softmax(0)
    threshold = min_p * np.float32(probabilities.max())
    if top_p < 1:
        threshold = max(threshold, _nucleus(probabilities, float(top_p)))
    return probabilities.masked_fill_(probabilities < float(threshold), 0.0)


def _nucleus(probabilities: Tensor, top_p: float) -> np.float32:
    """The smallest probability in the smallest set of most likely tokens that reaches ``top_p``."""
    total = float(probabilities.sum(dtype=torch.float64))
    count = min(_FIRST_CANDIDATES, len(probabilities))
    while True:
        ordered = probabilities.topk(count).values.numpy()
        before = ordered.cumsum(dtype=np.float64) - ordered
        kept = int(np.count_nonzero(before < top_p * total))
        if kept < count or count == len(probabilities):
            smallest: np.float32 = ordered[kept - 1]
            return smallest
        count = min(count * _MORE, len(probabilities))
