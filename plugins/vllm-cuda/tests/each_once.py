"""Run every op that vllm-cuda offers once, at a small size, on a GPU: for `compute-sanitizer --tool memcheck`.

    python each_once.py [OP...]

Kernels should be compiled before: run it once without the checker. Caching of torch's allocator hides accesses that are out
of bounds; PYTORCH_NO_CUDA_MEMORY_CACHING=1 turns it off. Prints a line per op, and the number of those that differ from
their references. Exit status 1 where one does.
"""

from __future__ import annotations

import sys

from vllm_conformance.cases.op_classes import ANY_DTYPE
from vllm_conformance.cases.ops import PRIVATE
from vllm_conformance.cases.runs.ops import provider_of, site_of
from vllm_core.api import OPS, Accepted
from vllm_core.ops.check import Where, judge
from vllm_cuda import platform, probe
from vllm_cuda.backends.offers import offers
from vllm_cuda.device import CudaDevice

SEED = 1
CLASSES = {
    "paged_attention": ("mixed/plain", "decode/plain", "mixed/kv_int8", "decode/kv_fp8", "decode/window/rest", "mixed/sinks"),
    "qk_norm_rope_kv_write": ("mixed/plain", "mixed/partial"),
    "qk_norm_rope_attention": ("decode/plain", "decode/partial", "decode/window/cap", "decode/sinks"),
    "sample": ("mixed", "ties"),
    **dict.fromkeys(("kv_write", "kv_copy", "kv_export", "kv_import", "rotary_embedding"), ("mixed/plain",)),
}


def main(only: list[str]) -> int:
    facts = probe.probe().devices[0]
    platform.start(facts)
    device, mine = CudaDevice(facts), offers(facts)
    wrong = count = 0
    for op, spec in OPS.items():
        if op in PRIVATE or spec.family == "comm" or (only and op not in only):
            continue
        dtype = "float32" if op in ANY_DTYPE else "bfloat16"
        for shape in CLASSES.get(op, ("mixed",)):
            site = site_of(op, dtype, SEED, shape)
            for offer in mine:
                if op in offer.ops and isinstance(offer.judge(site, facts.architecture), Accepted):
                    problems = judge(op, provider_of(offer), dtype, SEED, shape, Where(device)).problems
                    count, wrong = count + 1, wrong + bool(problems)
                    print(op, offer.provider, shape, *problems[:1], flush=True)
    print(f"{count} calls, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
