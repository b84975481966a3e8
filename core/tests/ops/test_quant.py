"""Quantised weights: what formats stand for, and cutting, stacking and rounding that touch no other row."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from vllm_core.api import FORMATS, QuantStack, QuantTensor
from vllm_core.ops import embedding, linear, quant

WRITTEN = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "int8_channel", "fp8_channel", "int4_group")


def values(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def test_int4_group_has_the_first_input_in_the_low_bits() -> None:
    data = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    weight = QuantTensor("int4_group", (1, 4), data, torch.tensor([[1.0, 10.0]]), torch.tensor([[1, 0]], dtype=torch.uint8))
    assert quant.dequantize(weight).tolist() == [[0, 1, 30, 40]]


def test_fp8_formats_scale_the_whole_rows_or_squares() -> None:
    data = torch.ones(130, 200).to(torch.float8_e4m3fn)
    squares = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    whole = quant.dequantize(QuantTensor("fp8_block128", (130, 200), data, squares))
    assert [whole[0, 127], whole[0, 128], whole[128, 0], whole[129, 199]] == [1, 2, 3, 4]
    assert quant.dequantize(QuantTensor("fp8_tensor", (130, 200), data, torch.tensor([2.0]))).unique().tolist() == [2]
    rows = quant.dequantize(QuantTensor("fp8_channel", (130, 200), data, torch.arange(130.0)))
    assert torch.equal(rows[:, 7], torch.arange(130.0))


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.block_bytes])
def test_gguf_formats_are_those_of_the_gguf_package(name) -> None:
    elements, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert (FORMATS[name].block, FORMATS[name].block_bytes) == (elements, size_bytes)
    raw = np.random.default_rng(0).integers(0, 256, (3, 512 // elements * size_bytes), dtype=np.uint8) & np.uint8(0x3B)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(quant.dequantize(QuantTensor(name, (3, 512), torch.from_numpy(raw))).numpy(), expected)


@pytest.mark.parametrize("name", WRITTEN)
def test_rounding_is_within_half_a_step_and_row_by_row(name) -> None:
    x = values(5, 64)
    weight = quant.quantize(x, name)
    steps = {"q8_0": 254, "int8_channel": 254, "q5_0": 31, "q5_1": 31}.get(name, 15)
    # A scale in sixteen bits, and formats whose greatest number has no positive place, cost up to one more step.
    assert ((quant.dequantize(weight) - x).abs().max() <= 2 * x.abs().max() / steps * 1.01).item()
    alone = quant.quantize(x[2:3], name)
    assert torch.equal(quant.dequantize(alone), quant.dequantize(quant.take_rows(weight, 2, 3)))


@pytest.mark.parametrize("name", WRITTEN)
def test_zeros_stay_zeros(name) -> None:
    assert quant.dequantize(quant.quantize(torch.zeros(2, 64), name)).count_nonzero() == 0


def test_a_matrix_that_has_no_whole_blocks_takes_the_next_format_or_stays() -> None:
    assert quant.rounded(values(2, 48), ("q8_0", "int8_channel")).format == "int8_channel"
    assert isinstance(quant.rounded(values(2, 48), ("q4_1", "int4_group")), torch.Tensor)
    assert isinstance(quant.rounded(torch.ones(64), ("q8_0",)), torch.Tensor)


@pytest.mark.parametrize("name", WRITTEN)
def test_rows_and_columns_are_those_of_the_decoded_matrix(name) -> None:
    weight = quant.quantize(values(6, 128), name)
    whole = quant.dequantize(weight)
    assert torch.equal(quant.dequantize(quant.take_rows(weight, 2, 5)), whole[2:5])
    columns = quant.take_columns(weight, 32, 96)
    assert columns is not None
    assert torch.equal(quant.dequantize(columns), whole[:, 32:96])
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(quant.select_rows(weight, ids), whole[ids])
    padded = quant.dequantize(quant.pad_rows(weight, 9))
    assert torch.equal(padded[:6], whole)
    assert padded[6:].count_nonzero() == 0
    if not name.endswith("_channel"):
        assert quant.take_columns(weight, 16, 96) is None


@pytest.mark.parametrize("name", WRITTEN)
def test_parts_of_one_format_are_stacked_into_one(name) -> None:
    parts = [quant.quantize(values(n, 64, n), name) for n in (3, 1, 2)]
    whole = quant.stack(parts)
    assert (whole.format, whole.shape) == (name, (6, 64))
    assert torch.equal(quant.dequantize(whole), torch.cat([quant.dequantize(part) for part in parts]))


def test_parts_of_several_formats_stay_apart_and_name_what_they_need() -> None:
    parts = (quant.quantize(values(3, 64), "q4_1"), quant.quantize(values(2, 64), "q8_0"), values(1, 64))
    whole = quant.stack(parts)
    assert isinstance(whole, QuantStack)
    assert whole.shape == (6, 64)
    assert quant.formats_in(whole) == {"stack", "q4_1", "q8_0", "plain"}
    assert torch.equal(quant.decode(whole, torch.float32)[5:], values(1, 64))


def test_fp8_parts_with_a_scale_each_become_rows_with_a_scale_each() -> None:
    parts = [QuantTensor("fp8_tensor", (2, 4), torch.ones(2, 4).to(torch.float8_e4m3fn), torch.tensor([s])) for s in (1.0, 3.0)]
    whole = quant.stack(parts)
    assert whole.format == "fp8_channel"
    assert quant.dequantize(whole)[:, 0].tolist() == [1, 1, 3, 3]


def test_references_read_quantised_weights() -> None:
    weight, x, out = quant.quantize(values(6, 64), "q8_0"), values(2, 64, 1), torch.empty(2, 6)
    linear.linear(out, x, linear.linear_pack(weight, None, ["a"]))
    assert torch.equal(out, x @ quant.dequantize(weight).t())
    rows = torch.empty(3, 64)
    embedding.embedding(rows, torch.tensor([1, 5, 1]), weight, 2.0)
    assert torch.equal(rows, quant.dequantize(weight)[[1, 5, 1]] * 2)
    embedding.embedding_shard(rows, torch.tensor([1, 5, 1]), weight, 2, 1.0)
    assert rows[[0, 2]].count_nonzero() == 0
    assert torch.equal(rows[1], quant.dequantize(weight)[3])
