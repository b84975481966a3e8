"""Rehearse two kernels for a chip that is not here, twice, then launch them: ``compiled_ahead.py [LAUNCHER]`` prints JSON.

A process of its own: Triton's driver is one a process. The cache is where TRITON_CACHE_DIR says.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

from vllm_triton import ahead
from vllm_triton.offline import OfflineDriver
from vllm_triton.ops import elementwise, norm
from vllm_triton.portable import few_rows, grouped, one_row
from vllm_triton.tuning import Decode, Extend, Quantised, Tuning, use

TUNING = Tuning(
    family="any",
    extend=Extend(64, 32, 4, 2),
    extend_wide=Extend(64, 32, 4, 2),
    decode=Decode(64, 4, 2, 4),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
    pdl=False,
    quantised=Quantised(64, 3),
)


def work() -> None:
    x = torch.zeros(16, 256, dtype=torch.bfloat16)
    norm.rms_norm(x, x, torch.ones(256), 1e-6)
    elementwise.gather_rows(x, x, torch.zeros(16, dtype=torch.int64))


def main(launcher: str = "") -> None:
    use(TUNING, 132)
    driver = OfflineDriver(GPUTarget("cuda", 80, 32)).install()
    ahead.settle_keys()
    turns = []
    for _ in range(2):
        with ahead.rehearsal(launcher, jobs=2) as found:
            work()
            work()
        turns.append({"asked": len(found.asked), "compiled": len(found.compiled), "failures": found.failures})
    launched = len(driver.launches)
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    work()
    with ahead.rehearsal(jobs=0) as again:
        work()
    hook = triton.knobs.runtime.jit_cache_hook
    answer = {"turns": turns, "launched": launched, "hits": hits, "after": len(driver.launches), "again": len(again.asked)}
    print(json.dumps({**answer, "hook": hook is not None}))


if __name__ == "__main__":
    main(*sys.argv[1:])
