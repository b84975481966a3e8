from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch

from vllm_core.api import FORMATS, QuantTensor
from vllm_core.errors import ModelConfigError, WeightsError
from vllm_core.layers.experts import each_expert
from vllm_core.layers.shard import COLUMNS, ROWS, Cut
from vllm_core.loader.gguf_config import ARCHITECTURES, config_of, generation_config_of
from vllm_core.loader.gguf_header import GGML_TYPES, read_header
from vllm_core.loader.gguf_weights import decode, hf_name, iterate
from vllm_core.models import catalog
from vllm_core.ops import quant


def blocks_of(kind: gguf.GGMLQuantizationType, shape: tuple[int, int]) -> np.ndarray:
    """Random blocks whose float16 scales are finite."""
    values = np.random.default_rng(int(kind)).standard_normal(shape, dtype=np.float32)
    if kind.name.endswith("_K"):
        elements, size_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.random.default_rng(1).integers(0, 256, (shape[0], shape[1] // elements * size_bytes), dtype=np.uint8)
        # Scales lie at the start or the end of a block; small exponents everywhere keep them finite.
        return raw & np.uint8(0x3B)
    return gguf.quants.quantize(values, kind)


@pytest.mark.parametrize("number", sorted(GGML_TYPES))
def test_each_type_decodes_as_the_gguf_package_does(write_gguf, number):
    kind = gguf.GGMLQuantizationType(number)
    raw = blocks_of(kind, (16, 512))
    path = write_gguf("qwen2", tensors=[("blk.0.ffn_up.weight", raw, kind)])
    header = read_header(path)
    [(name, weight)] = list(iterate(header, config_of(header)))
    assert name == "model.layers.0.mlp.up_proj.weight"
    assert isinstance(weight, QuantTensor) == (kind.name.lower() in FORMATS)
    tensor = quant.decode(weight, torch.float32)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, (16, 512))
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind)))
    assert torch.isfinite(expected).all()
    assert torch.equal(tensor, expected)


def test_quantised_matrices_stay_as_they_are_in_the_file(write_gguf):
    q8 = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quants.quantize(np.random.default_rng(0).standard_normal((67, 64), dtype=np.float32), q8)
    header = read_header(write_gguf(tensors=[("token_embd.weight", raw, q8)]))
    [(_, weight)] = list(iterate(header, config_of(header)))
    assert (weight.format, weight.shape) == ("q8_0", (67, 64))
    assert np.array_equal(weight.data.numpy(), raw)


def test_llama_query_and_key_rows_go_back_to_halves(write_gguf):
    heads, kv_heads, head_dim = 4, 2, 16
    query = np.arange(heads * head_dim, dtype=np.float32)[:, None].repeat(64, 1)
    key = query[: kv_heads * head_dim]

    def paired(rows: np.ndarray, count: int) -> np.ndarray:
        # as llama.cpp's converter does it
        return rows.reshape(count, 2, rows.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(rows.shape).copy()

    path = write_gguf(
        tensors=[
            ("blk.0.attn_q.weight", paired(query, heads), None),
            ("blk.0.attn_k.weight", paired(key, kv_heads), None),
            ("blk.0.attn_v.weight", key, None),
        ]
    )
    header = read_header(path)
    got = dict(iterate(header, config_of(header)))
    assert np.array_equal(got["model.layers.0.self_attn.q_proj.weight"], query)
    assert np.array_equal(got["model.layers.0.self_attn.k_proj.weight"], key)
    assert np.array_equal(got["model.layers.0.self_attn.v_proj.weight"], key)


def cut_with(cut):
    return lambda name, shape: cut


@pytest.mark.parametrize("cut", [Cut(ROWS, 16, 32), Cut(ROWS, 48, 80), Cut(ROWS, 64, 70), Cut(COLUMNS, 16, 48)])
def test_a_cut_is_that_of_the_whole_tensor(write_gguf, cut):
    """Quantised rows, and rotary pairs of some heads alone; what lies behind the end is zeros."""
    q8 = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quants.quantize(np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32), q8)
    header = read_header(write_gguf(tensors=[("blk.0.attn_q.weight", raw, q8), ("blk.0.attn_output.weight", raw, q8)]))
    whole = dict(iterate(header, config_of(header)))
    parts = dict(iterate(header, config_of(header), cut_with(cut)))
    assert parts.keys() == whole.keys()
    for name, weight in whole.items():
        part = quant.decode(parts[name], torch.float32)
        # A cut that parts a block comes whole; the model takes its part of it.
        part = part if tuple(part.shape) == cut.shape(weight.shape) else cut.take(part)
        assert torch.equal(part, cut.take(quant.decode(weight, torch.float32)))


def test_packed_query_rows_go_back_to_halves_too(write_gguf):
    q8 = gguf.GGMLQuantizationType.Q8_0
    values = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    raw = gguf.quants.quantize(values, q8)
    header = read_header(write_gguf(tensors=[("blk.0.attn_q.weight", raw, q8)]))
    [(_, weight)] = list(iterate(header, config_of(header)))
    decoded = gguf.quants.dequantize(raw, q8)
    halves = decoded.reshape(4, 8, 2, 64).swapaxes(1, 2).reshape(64, 64)
    assert np.array_equal(quant.decode(weight, torch.float32).numpy(), halves)


def test_of_a_cut_by_rows_nothing_else_is_read(write_gguf):
    header = read_header(write_gguf(tensors=[("output_norm.weight", np.arange(64, dtype=np.float32), None)]))
    info = header.tensors["output_norm.weight"]
    with header.path.open("rb") as file:
        assert decode(file, info, slice(8, 12)).tolist() == [8, 9, 10, 11]
        assert file.tell() == info.offset + 4 * 12


def test_gemma_norms_lose_the_one_that_was_added(write_gguf):
    stored = np.linspace(0.5, 1.5, 64, dtype=np.float32)
    metadata = {"gemma3.attention.sliding_window": 32}
    tensors = [("blk.0.post_ffw_norm.weight", stored, None), ("blk.0.ffn_norm.weight", stored, None)]
    header = read_header(write_gguf("gemma3", metadata=metadata, tensors=tensors))
    got = dict(iterate(header, config_of(header)))
    assert set(got) == {
        "model.layers.0.post_feedforward_layernorm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
    }
    assert all(np.array_equal(values, stored - 1) for values in got.values())


def test_tensor_that_the_architecture_lacks_is_an_error(write_gguf):
    header = read_header(write_gguf(tensors=[("blk.0.ssm_a.weight", np.ones(4, np.float32), None)]))
    with pytest.raises(WeightsError, match="has no place"):
        list(iterate(header, config_of(header)))


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_names_agree_with_the_gguf_package(architecture):
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 3)
    experts = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    layer = ("attn_q", "attn_output", *(experts if architecture == "qwen3moe" else ("ffn_gate", "ffn_down")))
    for ours in (*(f"blk.2.{name}" for name in layer), "token_embd", "output_norm"):
        theirs = hf_name(architecture, ours + ".weight")
        assert theirs is not None
        assert names.get_name(theirs.removesuffix(".weight")) == ours


EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}


@pytest.mark.parametrize(("architecture", "name"), [("llama", "MixtralForCausalLM"), ("qwen3moe", "Qwen3MoeForCausalLM")])
def test_experts_are_stacked_packed_matrices_and_make_another_architecture(write_gguf, architecture, name):
    """Llama with experts is Mixtral: one name for both in these files."""
    rng = np.random.default_rng(1)
    inner = 96 if architecture == "llama" else 32
    sizes = {"up": (4, inner, 64), "down": (4, 64, inner)}
    values = {part: rng.standard_normal(size, np.float32) for part, size in sizes.items()}
    packed = {part: gguf.quants.quantize(one, gguf.GGMLQuantizationType.Q8_0) for part, one in values.items()}
    tensors = [(f"blk.0.ffn_{part}_exps.weight", one, gguf.GGMLQuantizationType.Q8_0) for part, one in packed.items()]
    tensors += [("blk.0.ffn_gate_exps.weight", values["up"], None), ("blk.0.ffn_gate_inp.weight", values["up"][:, 0], None)]
    metadata = {f"{architecture}.{key}": value for key, value in EXPERTS.items()}
    header = read_header(write_gguf(architecture, metadata=metadata, tensors=tensors))
    config = config_of(header)
    experts = catalog.describe({**config, "vocab_size": 9}, dtype="float32").experts
    assert config["architectures"] == [name]
    assert (experts.count, experts.chosen, experts.intermediate_size, experts.renormalize) == (4, 2, inner, True)
    found = dict(each_expert(iterate(header, config), 4))
    place = "model.layers.0.mlp"
    assert found[f"{place}.gate.weight"].shape == (4, 64)
    for expert in range(4):
        assert torch.equal(found[f"{place}.experts.{expert}.gate_proj.weight"], torch.from_numpy(values["up"][expert]))
        for part, one in values.items():
            theirs = found[f"{place}.experts.{expert}.{part}_proj.weight"]
            assert (theirs.format, theirs.shape) == ("q8_0", one.shape[1:])
            torch.testing.assert_close(quant.dequantize(theirs), torch.from_numpy(one[expert]), atol=0.03, rtol=0)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"])
@pytest.mark.filterwarnings("ignore")
def test_real_weights_equal_those_that_transformers_loads(model_file, name):
    transformers = pytest.importorskip("transformers")
    path = model_file(name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=name, quantization_config=transformers.GgufConfig(dequantize=True), dtype=torch.float32
    ).state_dict()
    header = read_header(path)
    ours = set()
    for key, tensor in quant.decoded(iterate(header, config_of(header))):
        assert torch.equal(tensor, reference[key]), key
        ours.add(key)
    assert set(reference) - ours == {"lm_head.weight"}


def test_config_has_the_keys_of_a_hugging_face_config(write_gguf):
    tensors = [("token_embd.weight", np.zeros((10, 64), np.float32), None)]
    header = read_header(write_gguf("qwen3", metadata={"qwen3.attention.key_length": 32}, tensors=tensors))
    config = config_of(header)
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["head_dim"], config["vocab_size"], config["tie_word_embeddings"]) == (32, 10, True)
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}


def test_gemma_layers_alternate_windows(write_gguf):
    metadata = {"gemma3.block_count": 12, "gemma3.attention.sliding_window": 512, "gemma3.rope.freq_base": 1e6}
    config = config_of(read_header(write_gguf("gemma3", metadata=metadata)))
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11]
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1e6


def test_llama3_scaling_is_recovered_from_its_divisors(write_gguf):
    theta, half, factor = 500000.0, 32, 8.0
    divisors = []
    for index in range(half):
        wavelength = 2 * math.pi * theta ** (index / half)
        smooth = (8192 / wavelength - 1) / 3
        divisors.append(1.0 if smooth > 1 else factor if smooth < 0 else 1 / ((1 - smooth) / factor + smooth))
    tensors = [("rope_freqs.weight", np.array(divisors, np.float32), None)]
    header = read_header(write_gguf(metadata={"llama.rope.freq_base": theta}, tensors=tensors))
    config = config_of(header)
    scaling = config["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 8.0)
    assert scaling["original_max_position_embeddings"] == 8192
    assert list(iterate(header, config)) == []


def test_divisors_of_another_rule_are_refused(write_gguf):
    tensors = [("rope_freqs.weight", np.linspace(1, 3, 32, dtype=np.float32), None)]
    with pytest.raises(ModelConfigError, match="rope_freqs"):
        config_of(read_header(write_gguf(tensors=tensors)))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_read(write_gguf, kind):
    metadata = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    scaling = config_of(read_header(write_gguf(metadata=metadata)))["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == (kind, 4.0)
    assert scaling.get("original_max_position_embeddings") == (64 if kind == "yarn" else None)


def test_end_of_turn_ends_a_sequence_too(write_gguf):
    metadata = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 5}
    assert generation_config_of(read_header(write_gguf(metadata=metadata)))["eos_token_id"] == [1, 5]


@pytest.mark.parametrize(
    ("architecture", "metadata", "text"),
    [
        ("mamba", {}, "llama, qwen2, qwen3, qwen3moe, gemma3"),
        ("gemma3", {"gemma3.expert_count": 8}, "with experts"),
        ("llama", {"llama.expert_count": 8}, "expert_used_count"),
        ("llama", {"llama.embedding_length": None}, "embedding_length"),
        ("llama", {"llama.block_count": "two"}, "block_count"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "linear or yarn"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(write_gguf, four_parts, architecture, metadata, text):
    with pytest.raises(ModelConfigError, match=text) as caught:
        config_of(read_header(write_gguf(architecture, metadata=metadata)))
    four_parts(caught.value)
