"""Quantised tensors on their way into a model: packed where the provider reads them, decoded where it does not."""

from __future__ import annotations

import torch

from vllm_core.api import QuantStack, QuantTensor
from vllm_core.layers.shard import COLUMNS, ROWS, Cut
from vllm_core.layers.weights import WeightLoader
from vllm_core.ops import quant


def loaded(weights, *, formats=(), cuts=None, rounded=(), dtype=torch.float32):
    """What a target of these named weights, stacked in their order, takes; given in the opposite order."""
    loader = WeightLoader("model", prefix="", ignored=())
    taken = []
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    loader.expect(shapes, dtype, taken.append, cuts=cuts, formats=frozenset(formats), rounded=rounded)
    loader.load(reversed(list(weights.items())))
    [whole] = taken
    return whole


def packed(n: int, name: str = "q8_0") -> QuantTensor:
    return quant.quantize(torch.randn(n, 64, generator=torch.Generator().manual_seed(n)), name)


def test_a_format_that_is_read_stays_packed_and_another_is_decoded_to_the_models_dtype() -> None:
    weight = packed(4)
    kept = loaded({"a": weight}, formats=("q8_0",))
    assert kept.format == "q8_0"
    assert kept.data is weight.data
    plain = loaded({"a": weight}, formats=("q4_0",), dtype=torch.bfloat16)
    assert torch.equal(plain, quant.dequantize(weight).bfloat16())


def test_parts_of_one_format_are_one_matrix_in_the_models_order() -> None:
    whole = loaded({"q": packed(4), "k": packed(2), "v": packed(1)}, formats=("q8_0",))
    assert whole.shape == (7, 64)
    assert torch.equal(quant.dequantize(whole)[4:6], quant.dequantize(packed(2)))


def test_a_mix_is_a_stack_for_who_takes_stacks_and_plain_for_others() -> None:
    parts = {"q": packed(4), "v": packed(2, "q4_1"), "w": torch.ones(1, 64)}
    stack = loaded(parts, formats=("q8_0", "q4_1", "stack"))
    assert isinstance(stack, QuantStack)
    plain = loaded(parts, formats=("q8_0", "q4_1"))
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(plain, quant.decode(stack, torch.float32))


def test_cuts_keep_whole_blocks_packed_and_decode_what_they_part() -> None:
    weight = packed(6)
    whole = quant.dequantize(weight)
    rows = loaded({"a": weight}, formats=("q8_0",), cuts={"a": Cut(ROWS, 4, 8)})
    assert rows.shape == (4, 64)
    assert torch.equal(quant.dequantize(rows)[:2], whole[4:])
    columns = loaded({"a": weight}, formats=("q8_0",), cuts={"a": Cut(COLUMNS, 32, 64)})
    assert isinstance(columns, QuantTensor)
    parted = loaded({"a": weight}, formats=("q8_0",), cuts={"a": Cut(COLUMNS, 16, 48)})
    assert torch.equal(parted, whole[:, 16:48])


def test_numbers_are_rounded_to_the_first_format_that_the_provider_reads() -> None:
    x = torch.randn(3, 64)
    assert loaded({"a": x}, formats=("int8_channel",), rounded=("q8_0", "int8_channel")).format == "int8_channel"
    assert torch.equal(loaded({"a": x}, formats=("q8_0",), rounded=()), x)
    already = loaded({"a": packed(3, "q4_1")}, formats=("q4_1", "q8_0"), rounded=("q8_0",))
    assert already.format == "q4_1"
