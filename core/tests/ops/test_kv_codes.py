"""The reference's KV cache in codes of one byte, judged against the one in float32."""

from __future__ import annotations

import pytest
import torch

from vllm_core.ops import attention, check, layouts


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("op", ["kv_write", "kv_copy", "kv_export", "kv_import", "paged_attention", "qk_norm_rope_kv_write"])
def test_ops_on_a_cache_of_codes_are_those_on_floats_rounded(op, dtype):
    assert check.mismatches(op, check.reference(), "float32", 2, f"gqa/kv_{dtype}") == []


def test_int8_has_a_scale_for_each_token_and_head():
    kv = bound("int8", heads=2)
    k = torch.tensor([[[1.0, -2.0], [100.0, 50.0]]])
    attention.kv_write(kv, k, -k, torch.tensor([9]))
    out = torch.empty(1, 2, 8, 2, 2)
    attention.kv_export(out, kv, torch.tensor([1]))
    torch.testing.assert_close(out[0, :, 1], torch.stack((k[0], -k[0])), atol=0.4, rtol=0)
    torch.testing.assert_close(out[0, 0, 1, 0], k[0, 0], atol=0.008, rtol=0)
    assert not out[0, :, 0].any()


def test_fp8_saturates_and_never_gives_nan():
    kv = bound("fp8", heads=1)
    k = torch.tensor([[[1e6, -1e6]]])
    attention.kv_write(kv, k, k, torch.tensor([8]))
    out = torch.empty(1, 2, 8, 1, 2)
    attention.kv_export(out, kv, torch.tensor([1]))
    assert out[0, 0, 0, 0].tolist() == [448.0, -448.0]


def bound(dtype: str, *, heads: int) -> attention.KV:
    from vllm_core.api import KVGroupSpec

    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=heads, head_size=2)
    size = layouts.kv_layout(group, dtype, 8).block_bytes
    return attention.kv_bind(torch.zeros(2, size, dtype=torch.uint8), heads, 2, dtype, 8)
