"""Every offered op against core's reference, over generated inputs and all dtypes."""

from __future__ import annotations

import pytest

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
