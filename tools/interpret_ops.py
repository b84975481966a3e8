"""A platform's Triton kernels in Triton's interpreter against core's references, with the block sizes of its architectures.

    python tools/interpret_ops.py vllm_rocm gfx942,gfx1100 float16 0 rms_norm,linear kv_write,kv_copy:gqa/plain,mixed

After package, architectures, dtypes and seeds come groups of ops, each with the shape classes that it is run on, or all of
an op's. Prints what differs, and last how many cases there were. A process of its own: the interpreter is chosen when Triton is
imported. bfloat16 is left out: the interpreter keeps it as integers and computes wrongly with it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from vllm_core.api import DeviceFacts, load_entry
from vllm_core.ops.check import Provider, mismatches
from vllm_core.ops.inputs import SHAPE_CLASSES
from vllm_triton import tuning
from vllm_triton.offers import kv_layout

SMALL = {"block_m": 32, "block_n": 16}
"""Tiles of prompts about as small as the inputs, with which the interpreter is quick."""


def provider_of(package: str, architecture: str, small: bool, multiprocessors: int) -> Provider:
    """The kernels that ``package`` offers for ``architecture`` in its own name, its tuning in use; the best offer of an op."""
    families: Any = import_module(f"{package}.backends.families")
    backend: Any = import_module(f"{package}.backends.offers")
    platform: Any = import_module(f"{package}.plugin").manifest()
    chosen = families.family_of(architecture).tuning
    if small:
        extend = replace(chosen.extend, **SMALL)
        chosen = replace(chosen, extend=extend, extend_wide=extend)
    # Dependent launch is a chip's.
    tuning.use(replace(chosen, pdl=False), multiprocessors)
    facts = DeviceFacts(
        id="0", name="", device_type=platform.device_type, architecture=architecture, memory_kind="discrete", memory_bytes=1
    )
    own = getattr(backend, "OWN", {backend.PROVIDER})
    mine = [one for one in reversed(backend.offers(facts)) if one.provider in own]
    return Provider({name: load_entry(entry) for one in mine for name, entry in one.ops.items()}, kv_layout)


def cases_of(groups: list[str]) -> Iterator[tuple[str, str]]:
    """Op and shape class of each case."""
    for group in groups:
        ops, _, shapes = group.partition(":")
        for op in ops.split(","):
            yield from product([op], shapes.split(",") if shapes else SHAPE_CLASSES[op])


def main(arguments: list[str]) -> int:
    """Returns the exit status: 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("package", "architectures", "dtypes", "seeds"):
        parser.add_argument(name)
    parser.add_argument("groups", nargs="+", metavar="OP,OP[:CLASS,CLASS]")
    parser.add_argument("--small-tiles", action="store_true", help="prompts in small tiles, for an interpreter that is quick")
    parser.add_argument("--multiprocessors", type=int, default=4, help="of the chip that work is spread over")
    given = parser.parse_args(arguments)
    count = wrong = 0
    for architecture in given.architectures.split(","):
        provider = provider_of(given.package, architecture, given.small_tiles, given.multiprocessors)
        for dtype, seed, (op, shape) in product(given.dtypes.split(","), given.seeds.split(","), [*cases_of(given.groups)]):
            found = mismatches(op, provider, dtype, int(seed), shape)
            for line in found:
                print(architecture, op, dtype, seed, shape, line)
            count, wrong = count + 1, wrong + bool(found)
    print(f"{count} cases, {wrong} differences")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
