"""A direct call with what no kernel does raises UnsupportedError, and says what would do."""

from __future__ import annotations

import pytest
import torch

from vllm_core.api import OPS, KVGroupSpec, QuantStack, QuantTensor, UnsupportedError
from vllm_core.api.ops import WHOLES
from vllm_triton.offers import block_bytes_of, kv_layout, offers

GROUP = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=2, head_size=64)


def test_a_kv_dtype_without_a_layout_is_refused_with_those_that_have_one():
    with pytest.raises(UnsupportedError, match="fp8_e5m2"):
        kv_layout(GROUP, "int4", 16)


@pytest.mark.parametrize(("size", "dtype", "tokens", "named"), [(48, "float16", 16, "48"), (64, "float16", 4, "Block size")])
def test_a_cache_that_no_kernel_reads_is_refused_when_it_is_bound(size, dtype, tokens, named):
    from vllm_triton.ops.cache import kv_bind

    memory = torch.zeros(1, 2 * 2 * size * tokens * 2, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match=named):
        kv_bind(memory, 2, size, dtype, tokens)
    with pytest.raises(UnsupportedError, match="KV dtype"):
        kv_bind(memory, 2, 64, "int4", 16)


def test_memory_of_another_layout_is_refused_with_both_sizes():
    from vllm_triton.ops.cache import kv_bind

    size = block_bytes_of(2, 64, "int8", 16)
    with pytest.raises(UnsupportedError, match=str(size)):
        kv_bind(torch.zeros(1, size - 4, dtype=torch.uint8), 2, 64, "int8", 16)


def test_heads_whose_queries_leave_no_room_for_keys_are_refused():
    from vllm_triton.ops.attention import paged_attention
    from vllm_triton.ops.cache import kv_bind

    kv = kv_bind(torch.zeros(1, block_bytes_of(1, 256, "float32", 16), dtype=torch.uint8), 1, 256, "float32", 16)
    q, lengths = torch.zeros(1, 71, 256), torch.ones(1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="71 heads of 256"):
        paged_attention(q, q, kv, torch.tensor([0, 1], dtype=torch.int32), lengths, lengths[None], 1, 1, 0.1, 0, 0.0)


def test_unknown_kinds_are_refused():
    from vllm_triton.ops.elementwise import activation, gated_activation
    from vllm_triton.ops.encoder import pool

    x = torch.zeros(1, 4)
    with pytest.raises(UnsupportedError, match="swish"):
        activation(x, x, "swish")
    with pytest.raises(UnsupportedError, match="swish"):
        gated_activation(x[:, :2], x, "swish")
    with pytest.raises(UnsupportedError, match="max"):
        pool(x, x, torch.tensor([0, 1], dtype=torch.int32), "max", False)


def test_a_weight_without_a_kernel_is_refused_in_the_name_of_the_op_that_got_it():
    from vllm_triton.ops.experts import moe_pack
    from vllm_triton.ops.linear import linear_pack

    part = QuantTensor("q8_0", (4, 32), torch.zeros(4, 34, dtype=torch.uint8))
    strange = QuantTensor("q4_1", (4, 32), torch.zeros(4, 20, dtype=torch.uint8))
    for weight in (QuantStack((part, strange)), strange):
        with pytest.raises(UnsupportedError, match="has no kernel") as refused:
            linear_pack(weight, None, ())
        assert refused.value.on == "linear_pack"
        with pytest.raises(UnsupportedError, match="has no kernel") as refused:
            moe_pack(weight, weight, 1, ())
        assert refused.value.on == "moe_pack"


def test_heads_too_wide_for_the_encoders_tile_are_refused():
    from vllm_triton.ops.encoder import encoder_attention

    q = torch.zeros(1, 1, 512)
    with pytest.raises(UnsupportedError, match="512"):
        encoder_attention(q, q, q, q, torch.tensor([0, 1], dtype=torch.int32), 1, 1.0)


def test_every_op_but_collectives_and_wholes_has_a_kernel():
    offered = {op for offer in offers("someone", ("chip",), fresh=True) for op in offer.ops}
    assert {op for op, spec in OPS.items() if spec.family != "comm"} - WHOLES <= offered


def test_a_layout_with_scales_has_a_name_of_its_own():
    assert kv_layout(GROUP, "int8", 16).layout_id != kv_layout(GROUP, "fp8", 16).layout_id
    assert kv_layout(GROUP, "int8", 16).block_bytes == 2 * 16 * 2 * (64 + 4)
