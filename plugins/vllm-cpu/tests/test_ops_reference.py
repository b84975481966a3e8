"""Every offered op against core's reference, over generated inputs and all dtypes."""

from __future__ import annotations

import pytest

from vllm_core.api import load_entry
from vllm_core.ops import check, inputs
from vllm_cpu.backends import generic

OPS = sorted({name for offer in generic.offers() for name in offer.ops})
SEEDS = {"batch_update": 10, "build_step": 10, "advance": 10, "sample": 10, "logit_adjust": 10, "paged_attention": 8}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", OPS)
def test_op_equals_its_reference(op, dtype, provider) -> None:
    for shape_class in inputs.SHAPE_CLASSES[op]:
        seeds = SEEDS.get(op, 2) if dtype == "float32" and shape_class != "long" else 2
        for seed in range(seeds):
            assert check.mismatches(op, provider, dtype, seed, shape_class) == [], (shape_class, seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_attention_with_sinks_equals_its_reference(dtype, provider) -> None:
    for shape_class in ("one_token", "block_edges", "decode/q16/k4", "mixed/window", "gqa/cap", "long/kv_bfloat16"):
        assert check.mismatches("paged_attention", provider, dtype, 1, f"{shape_class}/sinks") == [], shape_class


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_unpadded_linear_equals_the_reference_too(dtype, own_ops) -> None:
    (offer,) = (offer for offer in generic.offers() if offer.provider == generic.UNPADDED)
    unpadded = {name: load_entry(entry) for name, entry in offer.ops.items()}
    provider = check.Provider({**own_ops, **unpadded}, generic.kv_layout)
    for shape_class in inputs.SHAPE_CLASSES["linear"]:
        for seed in range(2):
            assert check.mismatches("linear", provider, dtype, seed, shape_class) == [], (shape_class, seed)


def test_the_padded_linear_is_the_default() -> None:
    best = max((offer for offer in generic.offers() if "linear" in offer.ops), key=lambda offer: offer.priority)
    assert best.provider == generic.PROVIDER
