"""Inputs of products rounded to fp8: what the reference does, and what the judge takes from those that do it another way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_core.api import OPS, QuantTensor
from vllm_core.api.ops import FP8_ACTIVATION
from vllm_core.api.quant import FP8_FORMATS
from vllm_core.ops import check, linear, quant
from vllm_core.ops.classes import parse

PRODUCTS = ("linear", "linear_add", "rms_norm_linear", "gated_linear", "rms_norm_gated_linear")


def values(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("group", [0, 128])
def test_numbers_are_rounded_to_three_bits_behind_the_first_and_the_largest_stays(group):
    x = values(5, 300) * torch.tensor([1e-3, 1.0, 50.0, 1.0, 1.0])[:, None]
    found = quant.rounded_to_fp8(x, group)
    assert found.shape == x.shape
    large = x.abs() > x.abs().amax() * 0 + x.abs().amax(1, keepdim=True) * 2**-14
    assert ((found - x).abs() <= x.abs() * 2**-4 * 1.001)[large].all()
    largest = x.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(found.gather(1, largest), x.gather(1, largest), rtol=1e-6, atol=0)
    assert not torch.equal(found, x)


def test_a_row_and_each_128_inputs_of_one_have_scales_of_their_own():
    x = torch.ones(2, 300)
    x[0, 5], x[1, 140] = 448e4, 448e4
    whole, grouped = quant.rounded_to_fp8(x, 0), quant.rounded_to_fp8(x, 128)
    assert whole[0, 6] == 0
    assert whole[1, 0] == 0
    assert grouped[0, 6] == grouped[1, 139] == 0
    torch.testing.assert_close(grouped[0, 128:], x[0, 128:])
    torch.testing.assert_close(grouped[1, :128], x[1, :128])
    assert torch.equal(quant.rounded_to_fp8(x[1:], 0), whole[1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_zeros_stay_zeros(value):
    x = torch.zeros(2, 64)
    x[1, 3] = value
    found = quant.rounded_to_fp8(x, 0)
    assert found[0].count_nonzero() == 0
    assert not found[1, 3].isfinite()
    assert quant.rounded_to_fp8(x[:0], 128).shape == (0, 64)


def fp8(name: str, rows: int = 48, columns: int = 256) -> QuantTensor:
    sizes = {"fp8_tensor": (1,), "fp8_channel": (rows,), "fp8_block128": (1, columns // 128)}
    data = (values(rows, columns) * 40).to(torch.float8_e4m3fn)
    return QuantTensor(name, (rows, columns), data, torch.rand(sizes[name]) + 0.5)


@pytest.mark.parametrize("name", sorted(FP8_FORMATS))
def test_the_reference_multiplies_rounded_inputs_with_weights_in_fp8(name):
    weight, x = fp8(name), values(3, 256)
    out = torch.empty(3, 48)
    linear.linear(out, x, linear.linear_pack_fp8(weight, None, ()))
    rounded = quant.rounded_to_fp8(x, 128 if name == "fp8_block128" else 0)
    torch.testing.assert_close(out, rounded @ quant.dequantize(weight).T)


@pytest.mark.parametrize("weight", [values(48, 256), quant.quantize(values(48, 256), "int8_channel")])
def test_the_reference_leaves_products_with_other_weights_as_they_are(weight):
    x, out, exact = values(3, 256), torch.empty(3, 48), torch.empty(3, 48)
    linear.linear(out, x, linear.linear_pack_fp8(weight, None, ()))
    linear.linear(exact, x, linear.linear_pack(weight, None, ()))
    assert torch.equal(out, exact)


def test_products_and_no_others_can_be_asked_to_round():
    assert {name for name, spec in OPS.items() if FP8_ACTIVATION in spec.features} == {"linear_pack", *PRODUCTS}
    variant = parse("mixed/h512/fp8").variant
    assert variant is not None
    assert variant.features("gated_linear") == {FP8_ACTIVATION}
    assert variant.features("rms_norm") == variant.features("moe") == frozenset()


def packing(pack) -> check.Provider:
    return check.Provider({**check.reference().ops, "linear_pack": pack}, None)


def scaled(weight, bias, readers):
    """A scale that is wrong by half."""
    packed = linear.linear_pack_fp8(weight, bias, readers)
    return replace(packed, weight=packed.weight * 1.5)


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_products_are_right_with_inputs_rounded_or_not_and_wrong_with_a_wrong_scale(op, seed):
    for pack in (linear.linear_pack, linear.linear_pack_fp8):
        assert check.mismatches(op, packing(pack), "float16", seed, "mixed/h512/fp8") == []
    assert check.mismatches(op, packing(scaled), "float16", seed, "mixed/h512/fp8")
