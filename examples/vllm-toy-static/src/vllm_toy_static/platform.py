"""The fixed sizes, and the options that fit them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from vllm_core.api import ConfigPatch, KVGroupSpec, KVLayout, ProgramOffer, UnsupportedError

ROWS, TOKENS = (1, 4, 16), (1, 4, 16, 64)
"""Steps are compiled for these numbers of sequences and tokens, and for nothing else."""

MEMORY_BYTES = 2 << 30
LIMITS = {"max_num_seqs": ROWS[-1], "max_num_batched_tokens": TOKENS[-1]}


def size_for(rows: int, tokens: int) -> tuple[int, int]:
    """The smallest compiled size that holds a step. Raises UnsupportedError."""
    found = next(((r, t) for r, t in product(ROWS, TOKENS) if r >= rows and t >= tokens), None)
    if found is None:
        raise _too_large(f"a step of {rows} sequences and {tokens} tokens")
    return found


def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Keep steps within the largest compiled size. Raises UnsupportedError where the user asked for more."""
    for name, most in LIMITS.items():
        if name in explicit and config[name] > most:
            raise _too_large(f"{name} {config[name]}")
    changes = {name: most for name, most in LIMITS.items() if name not in explicit}
    return ConfigPatch(changes=changes, reasons={name: f"{most}: the largest compiled size" for name, most in changes.items()})


def _too_large(found: str) -> UnsupportedError:
    most = ", ".join(f"{name} {value}" for name, value in LIMITS.items())
    return UnsupportedError(
        "Step has no compiled size", on="toy-static", found=found, expected=f"at most {most}", fix="lower the option named here"
    )


def kv_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    """Keys and values of one layer's block in float32. Pure."""
    size = 2 * tokens_per_block * group.num_kv_heads * group.head_size * 4
    return KVLayout(layout_id="toy-static.thd", dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=size)


PROGRAM = ProgramOffer(
    name="toy-compiled",
    entry="vllm_toy_static.program:create",
    kind="program",
    architectures=frozenset({"LlamaForCausalLM"}),
    devices=frozenset({"static1"}),
    dtypes=frozenset({"float32"}),
    kv_dtypes=frozenset({"float32"}),
    block_sizes=(16,),
    kv_layout=kv_layout,
)
