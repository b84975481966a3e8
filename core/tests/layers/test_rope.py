"""Rotary tables against transformers, bit for bit: at long positions one rounding more is a different angle."""

from __future__ import annotations

import pytest
import torch

from vllm_core.layers.rope import cos_sin, inverse_frequencies
from vllm_core.models.fields import Fields
from vllm_core.models.rotary import rope_of
from vllm_core.models.spec import RopeSpec

HALF = 12
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.25,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 20 for i in range(HALF)],
        "long_factor": [1.0 + i for i in range(HALF)],
        "original_max_position_embeddings": 512,
    },
    "longrope-attention-factor": {
        "rope_type": "longrope",
        "short_factor": [1.0] * HALF,
        "long_factor": [2.0] * HALF,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.19,
    },
}


@pytest.fixture(scope="module")
def llama():
    return pytest.importorskip("transformers").models.llama


def config_of(llama, scaling):
    parameters = {**scaling, "rope_theta": 50000.0}
    return llama.LlamaConfig(hidden_size=96, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=parameters)


def spec_of(config) -> RopeSpec:
    return rope_of(Fields(config.to_dict()), config.head_dim)


def wanted_frequencies(llama, config, longest):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        rotary = llama.modeling_llama.LlamaRotaryEmbedding(config)
        return rotary.inv_freq, rotary.attention_scaling
    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=longest)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("longest", [256, 512, 513, 2048, 5000])
def test_frequencies_equal_transformers(llama, name, longest):
    config = config_of(llama, SCALINGS[name])
    wanted, factor = wanted_frequencies(llama, config, longest)
    got, got_factor = inverse_frequencies(spec_of(config), longest)
    assert torch.equal(got, wanted)
    assert got_factor == factor


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers_at_long_positions(llama, name):
    config = config_of(llama, SCALINGS[name])
    rotary = llama.modeling_llama.LlamaRotaryEmbedding(config)
    length = 2048 if name == "dynamic" else 6000
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    table = cos_sin(spec_of(config), length, length)
    assert table.shape == (length, 2, HALF)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, 0], cos[0, :, :HALF], atol=1e-6, rtol=0)
    torch.testing.assert_close(table[:, 1], sin[0, :, :HALF], atol=1e-6, rtol=0)


def test_dynamic_scaling_does_nothing_up_to_the_trained_length(llama):
    spec = spec_of(config_of(llama, SCALINGS["dynamic"]))
    plain = spec_of(config_of(llama, SCALINGS["default"]))
    assert torch.equal(cos_sin(spec, 2048, 100), cos_sin(plain, 2048, 100))
    assert not torch.equal(cos_sin(spec, 2049, 100), cos_sin(plain, 2049, 100))


def test_longrope_takes_the_long_factors_only_beyond_the_original_length(llama):
    spec = spec_of(config_of(llama, SCALINGS["longrope"]))
    short, _ = inverse_frequencies(spec, 512)
    long, _ = inverse_frequencies(spec, 513)
    torch.testing.assert_close(short / long, torch.tensor([(1.0 + i) / (1.0 + i / 20) for i in range(HALF)]))


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_factors_up_to_one_do_not_scale_attention(factor):
    scaling = {"factor": factor, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    assert inverse_frequencies(RopeSpec(theta=1e4, rotary_dim=8, kind="yarn", scaling=scaling), 64)[1] == 1.0
    scaling = {**scaling, "short_factor": (1.0,) * 4, "long_factor": (1.0,) * 4}
    assert inverse_frequencies(RopeSpec(theta=1e4, rotary_dim=8, kind="longrope", scaling=scaling), 64)[1] == 1.0


def test_a_partial_rotary_embedding_has_a_narrower_table():
    spec = rope_of(Fields({"partial_rotary_factor": 0.5, "rope_theta": 100.0}), 16)
    assert spec.rotary_dim == 8
    assert cos_sin(spec, 10, 10).shape == (10, 2, 4)
