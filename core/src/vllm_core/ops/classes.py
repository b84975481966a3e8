"""Names of shape classes: which sequences are in a step, the sizes of heads and blocks, and which variant of an op.

A name is a pattern and options, separated by slashes: ``mixed``, ``block_edges/b32/d80``, ``decode/q8/k1/window/cap``.

    q8 k2           query and KV heads             d80        head size
    b32             tokens per block               h4096      hidden size
    v5000           vocabulary                     kv_float16 dtype of the KV cache
    window window7  sliding window: a third of the longest sequence, or as given
    cap             soft cap on attention scores   interleaved, partial   rotary embedding
    e128 t8         experts, and those of a token
    wide            linear: out is float32         rest       what no query may see is NaN
    fp8             linear: the weight is in fp8, and x may be rounded to it
    q8_0 int8_channel ...   linear: the weight is in this format (`vllm_core.api.FORMATS`), and x is not rounded
    sinks           a logit per query head         plain      none of these variants

Where a name has no variant the seed turns them, so that a few seeds show all. Imports no torch: planning a suite must
be cheap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_core.api.ops import FP8_ACTIVATION, OPS
from vllm_core.api.quant import FORMATS, PLAIN

Rows = tuple[tuple[int, int], ...]

# Per pattern: (tokens before the step, tokens of the step) of each row, query heads, KV heads, head size, block size.
_PATTERNS: dict[str, tuple[Rows, int, int, int, int]] = {
    "one_token": (((0, 1),), 4, 4, 64, 16),
    "one_sequence": (((0, 37),), 4, 4, 96, 16),
    "block_edges": ((), 4, 4, 64, 16),  # rows follow the block size
    "decode": (tuple(((7 * i * i + i) % 200, 1) for i in range(33)), 8, 2, 64, 16),
    "mixed": (((40, 1), (0, 23), (5, 9), (63, 1), (20, 1), (11, 30)), 8, 4, 128, 16),
    "gqa": (((9, 1), (0, 5), (33, 3)), 9, 3, 80, 8),
    "long": (((700, 1), (0, 300), (500, 40)), 4, 1, 256, 32),
    "thousands": (((4095, 1), (4096, 1), (2040, 33), (0, 1)), 4, 1, 64, 16),
    "single": (((299, 1),), 8, 2, 64, 16),
    "singles": (((299, 1), (0, 1), (63, 1)), 8, 4, 128, 16),
    "empty": ((), 4, 4, 64, 16),
}
PATTERNS = tuple(_PATTERNS)
CLASSES = ("one_token", "one_sequence", "block_edges", "mixed", "gqa", "long", "empty")
KV_CLASSES = tuple(name for name in CLASSES if name != "empty")
ENCODER_CLASSES = KV_CLASSES
SINGLE_CLASSES = tuple(f"{name}/plain" for name in ("one_token", "single", "singles"))
"""Of steps that have one token of each row, and few of them."""

_SIZES = {"q": "num_heads", "k": "num_kv_heads", "d": "head_size", "b": "tokens_per_block", "h": "width", "v": "vocab"}
_SIZES |= {"e": "experts", "t": "chosen"}
_OPTION = re.compile(
    rf"([qkdbhvet])(\d+)|kv_(\w+)|window(\d*)|({'|'.join(FORMATS)})|(cap|sinks|interleaved|partial|wide|fp8|rest|plain)"
)
THIRD = -1
"""Window of a third of the longest sequence."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What an op is asked for beside its sizes. `window` 0 is none; `kv_dtype` None is the model's; `weights` a format."""

    window: int = 0
    cap: bool = False
    sinks: bool = False
    kv_dtype: str | None = None
    interleaved: bool = False
    partial: bool = False
    wide: bool = False
    fp8: bool = False
    rest: bool = False
    weights: str = PLAIN

    def features(self, op: str) -> frozenset[str]:
        """Features of the op's specification that a call site of this variant asks for."""
        asked: dict[str, bool] = {}
        if op in ("paged_attention", "qk_norm_rope_attention"):
            asked |= {"sliding_window": self.window != 0, "soft_cap": self.cap, "sinks": self.sinks}
        if FP8_ACTIVATION in OPS[op].features:
            asked |= {FP8_ACTIVATION: self.fp8}
        if op in ("rotary_embedding", "qk_norm_rope_kv_write", "qk_norm_rope_attention"):
            asked |= {"interleaved": self.interleaved}
        return frozenset(name for name, wanted in asked.items() if wanted)


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """A parsed name. `width` is the hidden size where one was given, `experts` and `chosen` those of a layer and of a token;
    `variant` None leaves it to the seed.
    """

    rows: Rows
    num_heads: int
    num_kv_heads: int
    head_size: int
    tokens_per_block: int
    width: int | None = None
    vocab: int = 199
    variant: Variant | None = field(default=None)
    experts: int | None = None
    chosen: int | None = None

    def variant_of(self, seed: int, dtype: str) -> Variant:
        """Odd seeds have a window and half a rotation, 2 and 3 of four a cap and pairs, 4 to 7 of eight another KV dtype."""
        if self.variant is not None:
            return self.variant
        other = "bfloat16" if dtype == "float32" else "float32"
        odd, pairs = bool(seed % 2), seed % 4 >= 2
        kv_dtype = other if seed % 8 >= 4 else None
        return Variant(window=THIRD if odd else 0, cap=pairs, kv_dtype=kv_dtype, interleaved=pairs, partial=odd)


def parse(name: str) -> ShapeClass:
    """Read a name. Raises KeyError for an unknown pattern, ValueError for an unknown option."""
    pattern, *options = name.split("/")
    found = ShapeClass(*_PATTERNS[pattern])
    for option in options:
        found = _with(found, option, name)
    return replace(found, rows=_edges(found.tokens_per_block)) if pattern == "block_edges" else found


def _with(base: ShapeClass, option: str, name: str) -> ShapeClass:
    match = _OPTION.fullmatch(option)
    if match is None:
        raise ValueError(f"unknown option {option!r} in shape class {name!r}")
    size, number, kv_dtype, window, weights, flag = match.groups()
    changes: dict[str, Any] = {}
    if size is not None:
        changes[_SIZES[size]] = int(number)
        return replace(base, **changes)
    variant = base.variant or Variant()
    if kv_dtype is not None:
        variant = replace(variant, kv_dtype=kv_dtype)
    elif window is not None:
        variant = replace(variant, window=int(window) if window else THIRD)
    elif weights is not None:
        variant = replace(variant, weights=weights)
    elif flag != "plain":
        changes[flag] = True
        variant = replace(variant, **changes)
    return replace(base, variant=variant)


def _edges(size: int) -> Rows:
    """Sequences of 1, size - 1, size and size + 1 tokens: written at once, decoded into, and continued over an edge."""
    whole = [(0, 1), (0, size - 1), (0, size), (0, size + 1)]
    decode = [(size - 2, 1), (size - 1, 1), (size, 1)]
    over = [(2 * size - 1, 2), (size // 2, size - size // 2)]
    return tuple((before, count) for before, count in (*whole, *decode, *over) if before >= 0 and count > 0)
