"""Quantised safetensors checkpoints, packed here by the formats' public definitions, against the numbers they stand for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from vllm_core.api import QuantTensor
from vllm_core.config import ModelConfig
from vllm_core.errors import ModelConfigError, WeightsError
from vllm_core.loader.source import open_model
from vllm_core.ops.quant import dequantize

NAME = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS, GROUP = 24, 64, 16


@pytest.fixture
def read(tmp_path):
    """Write a checkpoint of these tensors and settings, and read its weights."""

    def write(tensors, settings, *, size=None):
        config = {"architectures": ["LlamaForCausalLM"], "quantization_config": settings}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        source = open_model(ModelConfig(model=str(tmp_path)))
        return source, dict(source.packed_weights())

    return write


@pytest.fixture
def grouped():
    """Codes and zeros of four bits [N, K], [N, G], scales [N, G], and what they stand for."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=g)
    zeros = torch.randint(1, 16, (ROWS, COLUMNS // GROUP), generator=g)
    scales = torch.rand(ROWS, COLUMNS // GROUP, generator=g).half() + 0.5
    spread = zeros.repeat_interleave(GROUP, 1), scales.float().repeat_interleave(GROUP, 1)
    return codes, zeros, scales, (codes - spread[0]) * spread[1]


def packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [..., n / 8]: bits 4 i .. 4 i + 3 of a word hold its number order[i]."""
    words = values.long().unflatten(-1, (-1, 8))
    total = sum(words[..., number] << (4 * place) for place, number in enumerate(order))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def awq(grouped):
    codes, zeros, scales, _ = grouped
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{NAME}.qweight": packed(codes.t(), order),
        f"{NAME}.qzeros": packed(zeros.t(), order),
        f"{NAME}.scales": scales.t(),
    }


def gptq(grouped, *, offset):
    codes, zeros, scales, _ = grouped
    return {
        f"{NAME}.qweight": packed(codes).t(),
        f"{NAME}.qzeros": packed((zeros - offset).t()),
        f"{NAME}.scales": scales.t(),
        f"{NAME}.g_idx": (torch.arange(COLUMNS) // GROUP).int(),
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}


def test_awq_is_read_as_groups_of_four_bits(read, grouped):
    source, weights = read({**awq(grouped), "model.norm.weight": torch.ones(4)}, AWQ)
    found = weights[f"{NAME}.weight"]
    assert (found.format, found.shape) == ("int4_group", (ROWS, COLUMNS))
    torch.testing.assert_close(dequantize(found), grouped[3])
    assert torch.equal(weights["model.norm.weight"], torch.ones(4))
    assert set(source.weight_formats()) == {"int4_group"}


@pytest.mark.parametrize(("convention", "offset"), [("gptq", 1), ("gptq_v2", 0), (None, 1)])
def test_gptq_of_both_conventions_gives_the_same_zero_points(read, grouped, convention, offset):
    _, weights = read(gptq(grouped, offset=offset), {**GPTQ, "checkpoint_format": convention})
    torch.testing.assert_close(dequantize(weights[f"{NAME}.weight"]), grouped[3])


def test_a_bias_of_zeros_that_gptq_exporters_add_is_dropped_and_a_real_one_kept(read, grouped):
    tensors = gptq(grouped, offset=1)
    _, weights = read({**tensors, f"{NAME}.bias": torch.zeros(ROWS)}, GPTQ)
    assert set(weights) == {f"{NAME}.weight"}
    _, weights = read({**tensors, f"{NAME}.bias": torch.ones(ROWS)}, GPTQ)
    assert set(weights) == {f"{NAME}.weight", f"{NAME}.bias"}


def test_reordered_inputs_are_refused_by_the_weight_that_has_them(read, grouped):
    tensors = gptq(grouped, offset=1)
    tensors[f"{NAME}.g_idx"] = tensors[f"{NAME}.g_idx"].flip(0)
    with pytest.raises(WeightsError, match="desc_act"):
        read(tensors, GPTQ)


def compressed(kind, bits, strategy, form, **more):
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_groups_of_compressed_tensors(read, grouped, symmetric):
    codes, zeros, scales, expected = grouped
    tensors = {f"{NAME}.weight_packed": packed(codes), f"{NAME}.weight_scale": scales}
    tensors[f"{NAME}.weight_shape"] = torch.tensor([ROWS, COLUMNS])
    if symmetric:
        expected = (codes - 8) * scales.float().repeat_interleave(GROUP, 1)
    else:
        tensors[f"{NAME}.weight_zero_point"] = packed(zeros.t()).t()
    settings = compressed("int", 4, "group", "pack-quantized", group_size=GROUP, symmetric=symmetric)
    _, weights = read(tensors, settings)
    torch.testing.assert_close(dequantize(weights[f"{NAME}.weight"]), expected)


@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized"])
def test_eight_bits_by_channel_packed_and_not(read, form):
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scale = torch.rand(ROWS, 1)
    stored = {f"{NAME}.weight": codes}
    if form == "pack-quantized":
        stored = {f"{NAME}.weight_packed": (codes.int() + 128).to(torch.uint8).view(torch.int32)}
    _, weights = read({**stored, f"{NAME}.weight_scale": scale}, compressed("int", 8, "channel", form))
    found = weights[f"{NAME}.weight"]
    assert found.format == "int8_channel"
    torch.testing.assert_close(dequantize(found), codes.float() * scale)


@pytest.mark.parametrize(
    ("name", "shape", "settings", "expected"),
    [
        ("weight_scale", (), {"quant_method": "fp8", "activation_scheme": "static"}, "fp8_tensor"),
        ("weight_scale", (ROWS, 1), compressed("float", 8, "channel", "float-quantized"), "fp8_channel"),
        ("weight_scale_inv", (1, 1), {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_tensor"),
    ],
)
def test_fp8_with_one_scale_or_one_a_channel(read, name, shape, settings, expected):
    data = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    scale = torch.rand(shape) + 0.5
    tensors = {f"{NAME}.weight": data, f"{NAME}.{name}": scale, f"{NAME}.input_scale": torch.ones(())}
    _, weights = read(tensors, settings)
    found = weights[f"{NAME}.weight"]
    assert found.format == expected
    torch.testing.assert_close(dequantize(found), data.float() * scale.reshape(-1, 1))


def test_fp8_with_a_scale_a_square(read):
    data, scale = torch.randn(130, 200).to(torch.float8_e4m3fn), torch.rand(2, 2)
    tensors = {f"{NAME}.weight": data, f"{NAME}.weight_scale_inv": scale, "lm_head.weight": torch.ones(4, 4)}
    _, weights = read(tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    found = weights[f"{NAME}.weight"]
    assert found.format == "fp8_block128"
    spread = scale.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
    torch.testing.assert_close(dequantize(found), data.float() * spread)
    assert not isinstance(weights["lm_head.weight"], QuantTensor)


def test_plain_weights_of_a_quantised_source_are_decoded_on_request(read, grouped):
    source, _ = read(awq(grouped), AWQ)
    torch.testing.assert_close(dict(source.weights())[f"{NAME}.weight"], grouped[3])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({**AWQ, "bits": 8}, "bits"),
        ({**AWQ, "version": "gemv"}, "version"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({**AWQ, "group_size": 0}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        (compressed("int", 4, "group", "marlin-24", group_size=GROUP), "config_groups"),
        (compressed("int", 4, "group", "pack-quantized", group_size=GROUP, actorder="group"), "actorder"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ("awq", "quantization_config"),
    ],
)
def test_another_way_of_quantising_is_refused_by_the_setting_that_says_so(read, grouped, settings, named):
    with pytest.raises(ModelConfigError, match=named):
        read(awq(grouped), settings)


def test_a_missing_part_is_named(read, grouped):
    tensors = awq(grouped)
    del tensors[f"{NAME}.qzeros"]
    with pytest.raises(WeightsError, match="qzeros"):
        read(tensors, AWQ)


def test_parts_that_do_not_fit_are_refused(read, grouped):
    with pytest.raises(WeightsError, match="groups of 32"):
        read(awq(grouped), {**AWQ, "group_size": 32})
