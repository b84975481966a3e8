"""Compile sums and gathers for sm_90 and print how wide their accesses of mailboxes are.

A process of its own: it takes the place of Triton's driver.
"""

from __future__ import annotations

import re

import torch
from triton.backends.compiler import GPUTarget

from vllm_triton import portable, tuning
from vllm_triton.offline import OfflineDriver, compiled
from vllm_triton.ops import reduce


def main() -> None:
    OfflineDriver(GPUTarget("cuda", 90, 32)).install()
    tuning.use(portable.TUNING, 132)
    boxes = reduce.Mailboxes(
        rank=0, world_size=2, bases=torch.zeros(2, dtype=torch.int64), stop=torch.zeros(1, dtype=torch.int32)
    )
    x, residual, out = (torch.zeros(4, 1024, dtype=torch.bfloat16) for _ in range(3))
    reduce.all_reduce_add_rms_norm(out, residual, x, torch.ones(1024), 1e-6, boxes)
    reduce.all_gather(torch.zeros(4, 2048), torch.zeros(4, 1024), boxes)
    for one in compiled():
        # Mailboxes are what is read as volatile, but for `stop`, which is not masked.
        reads = re.findall(r"^\s*@%p\d+ ld\.volatile\.global(\.v4)?", one.asm["ptx"], re.MULTILINE)
        # What is between two rows of a lane: no store may come later than the next row.
        fences = re.findall(r"atom\.global\.sys\.acq_rel\.", one.asm["ptx"])
        print(one.kernel, sorted(set(reads)), len(fences), len(one.asm["cubin"]) > 0)


if __name__ == "__main__":
    main()
