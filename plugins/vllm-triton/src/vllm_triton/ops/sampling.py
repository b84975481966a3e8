"""Sampling: greedy and by temperature on kernels of our own, filters by the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_core.api import OPS, BatchState
from vllm_core.api import batch as layout
from vllm_triton.kernels import sample as kernels
from vllm_triton.ops.launch import power_of_2
from vllm_triton.tuning import active

_CHUNK = 4096


def sample(
    tokens: Tensor, nonfinite: Tensor, logits: Tensor, state: BatchState, slots: Tensor, lengths: Tensor, features: int
) -> None:
    """Choose one token per row of float32 [R,V]."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    if features & layout.F_FILTER:
        OPS["sample"].load_reference()(tokens, nonfinite, logits, state, slots, lengths, features)
        return
    chunks = -(-vocabulary // _CHUNK)
    dependent = active().dependent
    floats = torch.empty(rows * (chunks + 1), dtype=torch.float32, device=logits.device)
    largest, highest = floats[: rows * chunks], floats[rows * chunks :]
    where = torch.empty(rows * chunks, dtype=torch.int32, device=logits.device)
    block = power_of_2(chunks)
    kernels.measure[(rows, chunks)](largest, where, logits, vocabulary, chunks, BLOCK=_CHUNK, num_warps=8, **dependent)
    kernels.pick[(rows,)](tokens, nonfinite, highest, largest, where, chunks, BLOCK_C=block, num_warps=1, **dependent)
    if not features & layout.F_RANDOM:
        return
    sums = torch.empty(rows * chunks, dtype=torch.float64, device=logits.device)
    record = {"WORDS": layout.ADMIT_WORDS, "TEMPERATURE": layout.A_TEMPERATURE}
    kernels.weigh[(rows, chunks)](
        sums,
        logits,
        highest,
        state.params,
        slots,
        vocabulary,
        chunks,
        BLOCK=_CHUNK,
        num_warps=8,
        **dependent,
        **record,
    )
    kernels.draw[(rows,)](
        tokens,
        sums,
        logits,
        highest,
        state.params,
        slots,
        lengths,
        vocabulary,
        chunks,
        SEED_LOW=layout.A_SEED_LOW,
        SEED_HIGH=layout.A_SEED_HIGH,
        BLOCK=_CHUNK,
        BLOCK_C=block,
        num_warps=8,
        **dependent,
        **record,
    )
