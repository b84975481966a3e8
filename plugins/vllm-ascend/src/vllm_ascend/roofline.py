"""A step's time as the chip's data sheet allows it: what memory or products take at least. Predicted, never measured.

Williams, Waterman, Patterson: "Roofline" (2009). Rates are those of `backends.families`, from public data sheets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_ascend.backends.families import Family

LAUNCH_S = 10e-6
"""Host time of one launch through torch_npu: an assumption of this model, not a measurement."""
LAUNCHES_PER_LAYER = 14
"""Launches of one layer of a decoder as this package composes it: products, norms, rotation, write, attention and copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes of a decoder without experts."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    item_bytes: int = 2

    @property
    def weights(self) -> int:
        """Numbers in all matrices that a step reads; the embedding's rows do not count."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of keys and values of so many tokens."""
        return tokens * self.layers * 2 * self.kv_heads * self.head_size * self.item_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one step: the bound of memory, of products, of launches; `seconds` is the largest."""

    memory_s: float
    products_s: float
    launches_s: float

    @property
    def seconds(self) -> float:
        """No step can be faster; a real one is slower."""
        return max(self.memory_s, self.products_s, self.launches_s)

    @property
    def bound(self) -> str:
        """Which of the three it is."""
        named = {"memory": self.memory_s, "products": self.products_s, "launches": self.launches_s}
        return max(named, key=named.__getitem__)


def step(family: Family, model: Decoder, *, tokens: int, rows: int, context: int, block: int = 128) -> Prediction:
    """A step of ``tokens`` tokens in ``rows`` sequences that are ``context`` tokens long; KV is read in whole blocks."""
    read = model.weights * model.item_bytes + model.kv_bytes(rows * math.ceil(context / block) * block)
    products = 2 * tokens * (model.weights - model.hidden * model.vocabulary) + 2 * rows * model.hidden * model.vocabulary
    scores = 4 * tokens * context * model.layers * model.heads * model.head_size
    return Prediction(
        memory_s=read / family.bytes_per_s,
        products_s=(products + scores) / family.flops_per_s,
        launches_s=model.layers * LAUNCHES_PER_LAYER * LAUNCH_S,
    )
