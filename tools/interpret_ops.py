"""A platform's Triton kernels in Triton's interpreter against core's references, with the block sizes of one architecture.

python tools/interpret_ops.py vllm_rocm gfx942 rms_norm,linear float16 [SEED,SEED...]

Prints what differs, and last how many cases there were. A process of its own, since the interpreter is chosen when Triton is
imported. bfloat16 is left out: the interpreter keeps it as integers and computes wrongly with it.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from vllm_core.api import DeviceFacts, load_entry
from vllm_core.ops.check import Provider, mismatches
from vllm_core.ops.inputs import SHAPE_CLASSES
from vllm_triton import tuning
from vllm_triton.offers import kv_layout


def provider_of(package: str, architecture: str) -> Provider:
    """The kernels that ``package`` offers for ``architecture`` in its own name, its tuning in use."""
    families: Any = import_module(f"{package}.backends.families")
    backend: Any = import_module(f"{package}.backends.offers")
    platform: Any = import_module(f"{package}.plugin").manifest()
    family = families.family_of(architecture)
    tuning.use(family.tuning, 4)
    facts = DeviceFacts(
        id="0", name="", device_type=platform.device_type, architecture=architecture, memory_kind="discrete", memory_bytes=1
    )
    mine = [one for one in backend.offers(facts) if one.provider == backend.PROVIDER]
    return Provider({name: load_entry(entry) for one in mine for name, entry in one.ops.items()}, kv_layout)


def main(package: str, architecture: str, ops: list[str], dtypes: list[str], seeds: list[int]) -> int:
    """Returns the exit status: 1 where something differs."""
    provider = provider_of(package, architecture)
    cases = [(op, dtype, seed, shape) for op in ops for dtype in dtypes for seed in seeds for shape in SHAPE_CLASSES[op]]
    wrong = [(case, line) for case in cases for line in mismatches(case[0], provider, case[1], case[2], case[3])]
    for case, line in wrong:
        print(*case, line)
    print(f"{len(cases)} cases, {len(wrong)} differences")
    return int(bool(wrong))


if __name__ == "__main__":
    package, architecture, names, kinds, seeds = (*sys.argv[1:], "0")[:5]
    sys.exit(main(package, architecture, names.split(","), kinds.split(","), [int(seed) for seed in seeds.split(",")]))
