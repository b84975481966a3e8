"""Mixtures of experts, on torch's products and on the library's: formats, and bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch

from vllm_core.api import QuantStack, QuantTensor
from vllm_core.ops import check, inputs, quant
from vllm_core.ops import experts as reference
from vllm_cpu import native
from vllm_cpu.ops import experts

COUNT, CHOSEN, HIDDEN, INNER = 8, 3, 64, 96
FORMATS = ("q4_0", "q4_1", "q5_0", "q8_0", "int8_channel", "int4_group")
needs_library = pytest.mark.skipif("linear" not in native.load().ops, reason=str(native.load()))


@pytest.fixture(params=["torch", pytest.param("library", marks=needs_library)])
def ops(request):
    """`moe_pack` and `moe` of one provider."""
    if request.param == "torch":
        return experts
    from vllm_cpu.ops import native_experts

    return native_experts


def numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * columns**-0.5


def run(module, x, chosen, weights, packed, kind="silu"):
    """``out`` of a step, over poisoned scratch."""
    pairs = chosen.numel()
    scratch = [torch.full((pairs, width), torch.nan, dtype=x.dtype) for width in (2 * INNER, INNER, HIDDEN)]
    index, out = torch.full((4 * (pairs + COUNT),), -1, dtype=torch.int32), torch.full_like(x, torch.nan)
    module.moe(out, *scratch, index, x, chosen, weights, packed, kind)
    return out


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, weights = torch.empty(tokens, CHOSEN, dtype=torch.int32), torch.empty(tokens, CHOSEN)
    experts.moe_route(chosen, weights, numbers(tokens, COUNT, 1) * 8, True)
    return chosen, weights


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_library_equals_the_reference(dtype) -> None:
    from vllm_cpu.ops import native_experts

    provider = check.Provider({"moe_pack": native_experts.moe_pack, "moe": native_experts.moe})
    for shape_class in (*inputs.SHAPE_CLASSES["moe"], "decode/e32/t8/h256", "mixed/h64"):
        for seed in range(3):
            assert check.mismatches("moe", provider, dtype, seed, shape_class) == [], (shape_class, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_batch(ops, dtype) -> None:
    if ops is experts and dtype is not torch.float32:
        pytest.skip("torch's products of narrow rows are claimed in float32 alone")
    both, down = numbers(COUNT * 2 * INNER, HIDDEN), numbers(COUNT * HIDDEN, INNER, 2)
    packed = ops.moe_pack(both.to(dtype), down.to(dtype), COUNT, ["a"])
    x, (chosen, weights) = numbers(70, HIDDEN, 3).mul(8).to(dtype), routed(70)
    every = run(ops, x, chosen, weights, packed)
    for begin, end in ((0, 1), (69, 70), (3, 5), (10, 27), (1, 70)):
        cut = slice(begin, end)
        assert torch.equal(run(ops, x[cut], chosen[cut], weights[cut], packed), every[cut]), cut


@needs_library
@pytest.mark.parametrize("name", [*FORMATS, "mixed"])
def test_experts_stay_packed_and_are_those_of_decoded_weights(name) -> None:
    from vllm_cpu.ops import native_experts

    def packed_form(rows: int, columns: int, seed: int) -> QuantTensor | QuantStack:
        values = numbers(COUNT * rows, columns, seed)
        if name != "mixed":
            return quant.quantize(values, name)
        halves = values.chunk(2 * COUNT)
        parts = [quant.quantize(half, "q8_0" if n % 2 else "q4_1") for n, half in enumerate(halves)]
        return QuantStack(tuple(parts))

    both, down = packed_form(2 * INNER, HIDDEN, 0), packed_form(HIDDEN, INNER, 2)
    x, (chosen, weights) = numbers(9, HIDDEN, 3) * 8, routed(9)
    expected = run(reference, x, chosen, weights, reference.moe_pack(both, down, COUNT, ["a"]))
    for count in (1, 9):
        out = run(native_experts, x[:count], chosen[:count], weights[:count], native_experts.moe_pack(both, down, COUNT, ["a"]))
        torch.testing.assert_close(out, expected[:count], atol=1e-5, rtol=1e-5)
    rounding = run(native_experts, x[:1], chosen[:1], weights[:1], native_experts.moe_pack_int8(both, down, COUNT, ["a"]))
    torch.testing.assert_close(rounding, expected[:1], atol=0.05, rtol=0.05)


def test_an_expert_named_twice_counts_twice(ops) -> None:
    packed = ops.moe_pack(numbers(COUNT * 2 * INNER, HIDDEN), numbers(COUNT * HIDDEN, INNER, 2), COUNT, ["a"])
    x, twice = numbers(4, HIDDEN, 3), torch.tensor([[5, 5, 0]] * 4, dtype=torch.int32)
    once = torch.tensor([[5, 0, 1]] * 4, dtype=torch.int32)
    got = run(ops, x, twice, torch.tensor([[0.25, 0.5, 0.25]] * 4), packed)
    torch.testing.assert_close(got, run(ops, x, once, torch.tensor([[0.75, 0.25, 0.0]] * 4), packed))


def test_rows_without_a_number_choose_existing_experts_and_spoil_no_other() -> None:
    logits = numbers(3, COUNT)
    chosen, weights = torch.empty(3, CHOSEN, dtype=torch.int32), torch.empty(3, CHOSEN)
    experts.moe_route(chosen, weights, logits, False)
    logits[1] = torch.nan
    spoilt, theirs = torch.empty_like(chosen), torch.empty_like(weights)
    experts.moe_route(spoilt, theirs, logits, False)
    assert ((spoilt >= 0) & (spoilt < COUNT)).all()
    assert torch.equal(spoilt[::2], chosen[::2])
    assert torch.equal(theirs[::2], weights[::2])
