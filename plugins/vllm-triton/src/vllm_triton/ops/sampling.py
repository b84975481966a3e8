"""The tail: logits adjusted and masked, one token a row, log-probabilities. Nothing sorts, nothing waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_core.api import BatchState, Logprobs
from vllm_core.api import batch as layout
from vllm_triton.kernels import adjust, filter, logprobs
from vllm_triton.kernels import sample as kernels
from vllm_triton.ops.launch import Scratch, filled, power_of_2
from vllm_triton.tuning import active

CHUNK = 4096
"""Tokens of one program."""

CAPACITY = 1 << 14
"""Longest list of candidates of a filtered row."""

MOST_LARGEST = 32
"""Log-probabilities a row up to which taking the largest again and again beats a selection by digits (torch's)."""

_ALL_FILTERED = layout.F_RANDOM | layout.F_FILTER
_COUNTS = Scratch(64 << 20, zero=True)


def sample(
    tokens: Tensor, nonfinite: Tensor, logits: Tensor, state: BatchState, slots: Tensor, lengths: Tensor, features: int
) -> None:
    """Choose one token per row of float32 [R,V]."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    chunks = -(-vocabulary // CHUNK)
    dependent = active().dependent
    cells = filled(rows * chunks)
    floats = torch.empty(cells + rows, dtype=torch.float32, device=logits.device)
    largest, highest = floats[:cells], floats[cells:]
    where = torch.empty(rows * chunks, dtype=torch.int32, device=logits.device)
    is_random = bool(features & layout.F_RANDOM)
    sums = torch.empty(rows * chunks, dtype=torch.float64, device=logits.device) if is_random else floats
    block = power_of_2(chunks)
    kernels.measure[(rows, chunks)](
        largest,
        where,
        sums,
        logits,
        state.params,
        slots,
        vocabulary,
        chunks,
        BLOCK=CHUNK,
        WEIGH=is_random,
        num_warps=8,
        **dependent,
    )
    kernels.pick[(rows,)](tokens, nonfinite, highest, largest, where, chunks, BLOCK_C=block, num_warps=1, **dependent)
    if not is_random:
        return
    filtered = features & _ALL_FILTERED == _ALL_FILTERED
    if filtered:
        _filter(tokens, sums, logits, highest, state, slots, lengths)
    kernels.draw[(rows,)](
        tokens,
        sums,
        logits,
        largest,
        highest,
        state.params,
        slots,
        lengths,
        vocabulary,
        chunks,
        FILTERS=filtered,
        BLOCK=CHUNK,
        BLOCK_C=block,
        num_warps=8,
        **dependent,
    )


def _filter(
    tokens: Tensor, sums: Tensor, logits: Tensor, highest: Tensor, state: BatchState, slots: Tensor, lengths: Tensor
) -> None:
    """The chunks' sums and the tokens of the rows that filter."""
    rows, vocabulary = logits.shape
    chunks = -(-vocabulary // CHUNK)
    capacity = min(CAPACITY, vocabulary)
    dependent = active().dependent
    cells = torch.empty(rows * chunks * filter.CUTS.value, dtype=torch.int64, device=logits.device)
    lists = torch.empty(rows * capacity, dtype=torch.int32, device=logits.device)
    counts = torch.empty(rows, dtype=torch.int32, device=logits.device)
    cuts = torch.empty(rows, dtype=torch.float32, device=logits.device)
    sizes = (vocabulary, chunks)
    grid, block = (rows, chunks), power_of_2(chunks)
    filter.tally[grid](sums, cells, logits, highest, state.params, slots, *sizes, BLOCK=CHUNK, num_warps=8, **dependent)
    filter.gather[grid](
        lists,
        counts,
        cuts,
        cells,
        sums,
        logits,
        highest,
        state.params,
        slots,
        *sizes,
        CAPACITY=capacity,
        BLOCK=CHUNK,
        BLOCK_C=block,
        num_warps=8,
        **dependent,
    )
    filter.settle[(rows,)](
        tokens,
        lists,
        counts,
        cuts,
        sums,
        logits,
        highest,
        state.params,
        slots,
        lengths,
        *sizes,
        CAPACITY=capacity,
        TILE=1024,
        BLOCK_C=block,
        num_warps=8,
        **dependent,
    )


def logit_adjust(logits: Tensor, state: BatchState, slots: Tensor, lengths: Tensor, features: int) -> None:
    """Penalties, bias, suppressed stop tokens and bad words, in float32 [R,V]."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    dependent = active().dependent
    width = state.tokens.shape[1]
    if features & layout.F_PENALTIES:
        counts = _COUNTS.get(logits.device).view(torch.int32)
        most = counts.numel() // vocabulary
        for first in range(0, rows, most):
            grid = (min(most, rows - first), -(-width // 1024))
            where = (counts, state.tokens, state.params, slots, lengths, first, vocabulary, width)
            adjust.count_tokens[grid](*where, BLOCK=1024, num_warps=4, **dependent)
            adjust.penalise[grid](logits, *where, BLOCK=1024, num_warps=4, **dependent)
    if features & (layout.F_BIAS | layout.F_MIN_LEN | layout.F_BAD_WORDS):
        adjust.adjust[(rows,)](
            logits,
            state.tokens,
            state.params,
            state.bias_ids,
            state.bias_values,
            state.stop_ids,
            state.bad_words,
            slots,
            lengths,
            vocabulary,
            width,
            features,
            BLOCK=layout.MAX_BAD_WORDS,
            num_warps=4,
            **dependent,
        )


def grammar_mask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """-inf where the bit of a row of ``mask``, int32 [M,words], is 0."""
    count, vocabulary = mask.shape[0], logits.shape[1]
    if not count:
        return
    dependent = active().dependent
    grid = (count, -(-vocabulary // CHUNK))
    adjust.grammar_mask[grid](logits, mask, rows, vocabulary, mask.shape[1], BLOCK=CHUNK, num_warps=8, **dependent)


def soft_cap(logits: Tensor, cap: float) -> None:
    """``logits = cap * tanh(logits / cap)`` in place, float32."""
    count = logits.numel()
    if count:
        adjust.soft_cap[(-(-count // 2048),)](logits, float(cap), count, BLOCK=2048, num_warps=8, **active().dependent)


def log_probabilities(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """log_softmax of float32 [R,V] at int64 tokens [R], their rank, and the k largest."""
    rows, vocabulary = logits.shape
    device = logits.device
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    rank = torch.empty(rows, dtype=torch.int32, device=device)
    taken = k if k <= MOST_LARGEST else 0
    top_ids = torch.empty((rows, taken), dtype=torch.int32, device=device)
    top = torch.empty((rows, taken), dtype=torch.float32, device=device)
    if rows:
        chunks = -(-vocabulary // CHUNK)
        dependent = active().dependent
        floats = torch.empty((2, filled(rows * chunks)), dtype=torch.float32, device=device)
        above = torch.empty(rows * chunks, dtype=torch.int32, device=device)
        best = torch.empty(max(1, rows * chunks * taken), dtype=torch.int64, device=device)
        found = (floats[0], floats[1], above, best, logits, tokens, vocabulary, chunks, taken)
        logprobs.survey[(rows, chunks)](*found, BLOCK=CHUNK, num_warps=8, **dependent)
        logprobs.conclude[(rows,)](
            chosen,
            rank,
            top_ids,
            top,
            *found,
            BLOCK_C=power_of_2(chunks),
            # The same for any k: none waits for a compiler.
            BLOCK_K=power_of_2(chunks * MOST_LARGEST),
            num_warps=4,
            **dependent,
        )
    if k > taken:
        values, ids = logits.topk(k, dim=1)
        own = logits.gather(1, tokens[:, None])
        return Logprobs(chosen, rank, ids.int(), values - own + chosen[:, None])
    return Logprobs(chosen, rank, top_ids, top)
