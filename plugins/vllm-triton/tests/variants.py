"""What launchers ask a compiler for, at shapes that vary from step to step: prints JSON, the variants of kernels by group.

Launches are noted by Triton's hook and run nothing. A process of its own: Triton's driver is one a process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import torch
from triton.backends.compiler import GPUTarget

from vllm_core.api import BatchState
from vllm_core.api import batch as layout
from vllm_triton import ahead
from vllm_triton.offers import HEAD_SIZES
from vllm_triton.offline import OfflineDriver
from vllm_triton.ops import cache, sampling
from vllm_triton.portable import TUNING
from vllm_triton.tuning import use

VOCABULARY = 1000


def heads() -> None:
    """Heads of every size, one to eight of them in a program."""
    for size in sorted(HEAD_SIZES):
        for count in (1, 2, 4, 8):
            q = torch.zeros(2, 2 * count, size, dtype=torch.bfloat16)
            k, positions = q[:, :count].contiguous(), torch.zeros(2, dtype=torch.int32)
            cache.rotary_embedding(q, k, positions, torch.zeros(8, 2, size // 2), False)


def masks() -> None:
    """Masks of one row and of several, which lie behind the numbers of the rows as the engine brings them."""
    width = -(-VOCABULARY // 32)
    for count in range(1, 6):
        packed = torch.zeros(count * (2 + width), dtype=torch.int32)
        words, rows = packed[2 * count :].view(count, width), packed[: 2 * count].view(torch.int64)
        sampling.grammar_mask(torch.zeros(8, VOCABULARY), words, rows)


def features() -> None:
    """Every combination of what changes logits in one kernel, of greedy and of random requests."""
    state = BatchState(
        num_slots=8,
        tokens=torch.zeros(9, 65, dtype=torch.int32),
        computed=torch.zeros(9, dtype=torch.int32),
        params=torch.zeros(9, layout.ADMIT_WORDS, dtype=torch.int32),
        bias_ids=torch.zeros(9, layout.MAX_BIAS, dtype=torch.int32),
        bias_values=torch.zeros(9, layout.MAX_BIAS),
        stop_ids=torch.zeros(9, layout.MAX_STOP, dtype=torch.int32),
        bad_words=torch.zeros(9, layout.MAX_BAD_WORDS, dtype=torch.int32),
        block_tables=(),
        tokens_per_block=(),
    )
    slots, lengths = torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int32)
    for asked in (layout.F_BIAS, layout.F_MIN_LEN, layout.F_BAD_WORDS, layout.F_BIAS | layout.F_MIN_LEN):
        for random in (0, layout.F_RANDOM):
            sampling.logit_adjust(torch.zeros(8, VOCABULARY), state, slots, lengths, asked | random)


def log_probabilities() -> None:
    """From none to as many beside the chosen token as kernels find."""
    for count in (0, 1, 2, 5, 16, 20, sampling.MOST_LARGEST):
        sampling.log_probabilities(torch.zeros(8, VOCABULARY), torch.zeros(8, dtype=torch.int64), count)


def variants(work: Callable[[], None]) -> Counter[str]:
    with ahead.rehearsal(jobs=0) as found:
        work()
    return Counter(one.name for one in found.asked)


if __name__ == "__main__":
    use(TUNING, 132)
    OfflineDriver(GPUTarget("cuda", 90, 32)).install()
    ahead.settle_keys()
    print(json.dumps({work.__name__: variants(work) for work in (heads, masks, features, log_probabilities)}))
