"""Run the kernels in Triton's interpreter against core's references: ``interpreted.py OP,OP... DTYPE,DTYPE... [SEED,SEED...
[CLASS,CLASS...]]`` prints what differs. Classes are all of an op's, unless some are named.

A process of its own, since the interpreter is chosen when Triton is imported. bfloat16 is left out: the interpreter keeps
it as integers and computes wrongly with it.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from vllm_core.api import DeviceFacts, load_entry
from vllm_core.ops.check import Provider, mismatches
from vllm_core.ops.inputs import SHAPE_CLASSES
from vllm_cuda.backends import families
from vllm_cuda.backends.offers import OWN, offers
from vllm_triton import tuning
from vllm_triton.offers import kv_layout


def main(ops: list[str], dtypes: list[str], seeds: list[int], shapes: list[str]) -> None:
    # Dependent launch is the chip's; tiles as small as the inputs keep the interpreter quick.
    family = families.HOPPER.tuning
    extend = replace(family.extend, block_m=32, block_n=16)
    tuning.use(replace(family, pdl=False, extend=extend, extend_wide=extend), 4)
    facts = DeviceFacts(id="0", name="", device_type="cuda", architecture="sm_90", memory_kind="discrete", memory_bytes=1)
    # Products as on Hopper, which pass on what its own kernel does not take: here, all.
    mine = [one for one in reversed(offers(facts)) if one.provider in OWN]
    provider = Provider({name: load_entry(entry) for one in mine for name, entry in one.ops.items()}, kv_layout)
    cases = [
        (op, dtype, seed, shape) for op in ops for dtype in dtypes for seed in seeds for shape in shapes or SHAPE_CLASSES[op]
    ]
    wrong = [(case, line) for case in cases for line in mismatches(case[0], provider, case[1], case[2], case[3])]
    for case, line in wrong:
        print(*case, line)
    print(f"{len(cases)} cases, {len(wrong)} differences")


if __name__ == "__main__":
    given = [part.split(",") for part in sys.argv[1:]]
    ops, dtypes, seeds, shapes = (*given, *((["0"], [])[len(given) - 2 :]))
    main(ops, dtypes, [int(seed) for seed in seeds], shapes)
