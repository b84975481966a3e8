"""Registers of attention over blocks and heads of sizes that are alike: ``python alike_child.py ARCHITECTURE``.

Prints ``[kernel, head size, tokens of a block, vector registers]`` a kernel, a line of JSON each.
"""

from __future__ import annotations

import json
import sys

from triton.backends.compiler import GPUTarget

from vllm_rocm.backends.families import family_of
from vllm_rocm.chips import chip_of
from vllm_rocm.machine_code import resources_of
from vllm_triton import claimed, tuning
from vllm_triton.claimed import FEW, MASKS, Attention
from vllm_triton.offline import OfflineDriver, compiled

ALIKE = ((80, 64), (112, 64), (80, 256), (112, 256), (160, 64), (192, 128), (80, 1), (80, 8))
"""Head sizes and tokens of a block: of each kind two or more."""


def main(architecture: str) -> None:
    """Compile them one after the other."""
    family, seen = family_of(architecture), set()
    OfflineDriver(GPUTarget("hip", architecture, family.wave_size)).install()
    tuning.use(family.tuning, chip_of(architecture).units)
    shape = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "group": FEW, "masks": MASKS}
    for head_size, tokens in ALIKE:
        claimed.launch(Attention(head_size=head_size, tokens_per_block=tokens, **shape))
        for one in compiled():
            if one.metadata.hash not in seen:
                seen.add(one.metadata.hash)
                if one.kernel in ("extend", "decode"):
                    print(json.dumps([one.kernel, head_size, tokens, resources_of(one, family).vector_registers]))


if __name__ == "__main__":
    main(sys.argv[1])
