"""KV groups: which layers share a block table, and what a provider answers about its private layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """Layers that keep the same tokens, and so share block tables.

    `full` keeps every token of a sequence, `window` the last `window` tokens; `mla` and `state` are reserved.
    """

    index: int
    kind: Literal["full", "window", "mla", "state"]
    layers: tuple[int, ...]
    num_kv_heads: int
    head_size: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """A provider's private layout of one layer's blocks. Core multiplies and allocates; it never looks inside.

    `block_bytes` is the size of one block of one layer, keys and values together.
    Raw exchange between engines needs equal `layout_id`, dtype and tokens per block, and blocks that are rows of the memory
    that `kv_bind` is given. A layout may be another, all keys before all values for one: core tries before it copies rows.
    """

    layout_id: str
    dtype: str
    tokens_per_block: int
    block_bytes: int
