"""Configs become specifications; what is wrong in them is named."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from vllm_core.errors import ModelConfigError
from vllm_core.models import catalog
from vllm_core.models.spec import ModelSpec

LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
GEMMA3_4 = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
QWEN2 = {**LLAMA31_8B, "architectures": ["Qwen2ForCausalLM"], "rope_scaling": None}
QWEN3 = {**LLAMA31_8B, "architectures": ["Qwen3ForCausalLM"], "rope_scaling": None}
MISTRAL = {**LLAMA31_8B, "architectures": ["MistralForCausalLM"], "rope_scaling": None}
BERT = {
    "architectures": ["BertModel"],
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


def describe(config, **options) -> ModelSpec:
    return catalog.describe(config, dtype="float32", **options)


def failing(config, **changes) -> ModelConfigError:
    changed = copy.deepcopy(config)
    changed.update(changes)
    with pytest.raises(ModelConfigError) as caught:
        describe(changed)
    return caught.value


def test_llama3_keeps_the_names_of_its_scaling():
    spec = describe(LLAMA31_8B)
    assert spec.head_size == 128
    assert spec.layers[0].rope.kind == "llama3"
    assert spec.layers[0].rope.scaling == {k: v for k, v in LLAMA31_8B["rope_scaling"].items() if k != "rope_type"}
    assert not spec.tied_embeddings
    assert spec.pooling is None
    assert [g.kind for g in spec.kv_groups()] == ["full"]


def test_both_forms_of_rope_parameters_mean_the_same():
    new = {k: v for k, v in LLAMA31_8B.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert describe(new) == describe(LLAMA31_8B)
    legacy = {**LLAMA31_8B, "rope_scaling": {**LLAMA31_8B["rope_scaling"], "type": "llama3"}}
    del legacy["rope_scaling"]["rope_type"]
    assert describe(legacy) == describe(LLAMA31_8B)


def test_both_forms_of_gemma3_rope_mean_the_same():
    new = {k: v for k, v in GEMMA3_4.items() if not k.startswith("rope")}
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert describe(new) == describe(GEMMA3_4)


def test_gemma3_without_rotary_bases_has_those_of_its_family():
    bare = {k: v for k, v in GEMMA3_4.items() if not k.startswith("rope")}
    layers = describe(bare).layers
    assert (layers[0].rope.theta, layers[5].rope.theta) == (10000.0, 1000000.0)


def test_gemma3_has_two_rotary_bases_and_two_kv_groups():
    spec = describe(GEMMA3_4)
    full, window = spec.kv_groups()
    assert full.layers == (5, 11, 17)
    assert window.window == 512
    assert len(window.layers) == 15
    assert spec.layers[0].rope.theta == 10000.0
    assert spec.layers[0].rope.kind == "default"
    assert spec.layers[5].rope.theta == 1000000.0
    assert spec.layers[5].rope.scaling == {"factor": 8.0}
    assert spec.embedding_scale == 640**0.5
    assert spec.scale == 1 / 16
    assert spec.tied_embeddings
    assert spec.norm_offset == 1.0


def test_mistral_has_a_window_unless_the_config_says_null():
    assert describe({**MISTRAL, "sliding_window": 4096}).kv_groups()[0].window == 4096
    assert describe({**MISTRAL, "sliding_window": None}).kv_groups()[0].kind == "full"


@pytest.mark.parametrize("config", [QWEN2, QWEN3])
def test_qwen_ignores_its_window_unless_told_to_use_it(config):
    ignored = {**config, "sliding_window": 64, "max_window_layers": 30, "use_sliding_window": False}
    assert [g.kind for g in describe(ignored).kv_groups()] == ["full"]
    full, window = describe({**ignored, "use_sliding_window": True}).kv_groups()
    assert len(full.layers) == 30
    assert window.layers == (30, 31)


def test_qwen_biases_and_norms():
    assert describe(QWEN2).qkv_bias
    assert not describe(QWEN2).out_bias
    assert describe(QWEN3).qk_norm
    assert not describe(QWEN3).qkv_bias


def test_a_base_model_pools_its_last_token_unless_told_otherwise():
    base = {**QWEN3, "architectures": ["Qwen3Model"]}
    assert describe(base).pooling == "last"
    assert describe(base, pooling="mean").pooling == "mean"


def test_bert_is_an_encoder_without_kv():
    spec = describe(BERT, pooling="mean")
    assert spec.kind == "encoder"
    assert spec.kv_groups() == ()
    assert spec.head_size == 32
    ops = {site.op for site in spec.call_sites("float32")}
    assert "encoder_attention" in ops
    assert "paged_attention" not in ops


def test_yarn_reaches_the_stretched_length_and_dynamic_only_on_demand():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    yarn = describe({**QWEN2, "max_position_embeddings": 32768, "rope_scaling": scaling})
    assert yarn.max_position == 131072
    assert yarn.extended_position is None
    dynamic = describe({**QWEN2, "max_position_embeddings": 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    assert dynamic.max_position == 4096
    assert dynamic.extended_position == 8192


def test_phi3_style_original_length_beside_the_scaling_has_priority():
    factors = [1.0] * 64
    scaling = {"type": "su", "short_factor": factors, "long_factor": factors}
    spec = describe({**LLAMA31_8B, "original_max_position_embeddings": 4096, "rope_scaling": scaling})
    assert spec.layers[0].rope.kind == "longrope"
    assert spec.layers[0].rope.scaling["original_max_position_embeddings"] == 4096
    assert spec.layers[0].rope.scaling["factor"] == 32.0


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"],
)
@pytest.mark.parametrize("config", [LLAMA31_8B, QWEN2, QWEN3, GEMMA3_4, MISTRAL, BERT], ids=lambda c: c["architectures"][0])
@pytest.mark.parametrize("value", [None, "8", 0, -1, 2.5, True, [8]])
def test_a_missing_or_wrong_size_is_named(config, key, value):
    error = failing(config, **{key: value})
    assert key in error.on
    assert error.found == ("missing" if value is None else repr(value))
    assert "integer" in error.expected
    assert key in error.fix


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 5),
        ("hidden_size", 4095),
        ("head_dim", 3),
        ("rms_norm_eps", "tiny"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
        ("hidden_act", "selu"),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("rope_scaling", "llama3"),
    ],
)
def test_a_wrong_value_of_llama_is_named(key, value):
    error = failing(LLAMA31_8B, **{key: value})
    assert key in error.on
    assert error.found == repr(value) or "rotated" in error.expected


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "lama3"}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 64}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 64}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [0.0] * 64}, "long_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
    ],
)
def test_a_wrong_rope_scaling_is_named(scaling, key):
    error = failing(LLAMA31_8B, rope_scaling=scaling)
    assert error.on.startswith(f"{key} in config.json, rope_scaling")


def test_a_misspelt_rope_kind_gets_the_nearest():
    assert "'llama3'" in failing(LLAMA31_8B, rope_scaling={"rope_type": "lama3"}).fix


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (GEMMA3_4, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3_4, {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA3_4, {"layer_types": ["chunked_attention"] * 18}, "layer_types"),
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (BERT, {"is_decoder": True}, "is_decoder"),
        (BERT, {"hidden_size": 385}, "hidden_size"),
    ],
)
def test_what_a_definition_does_not_cover_is_refused(config, changes, key):
    assert key in failing(config, **changes).on


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [None], {}])
def test_a_config_without_architectures_is_an_error(value):
    assert "architectures" in failing(LLAMA31_8B, architectures=value).on


def test_an_unknown_architecture_gets_the_nearest_and_the_other_track():
    error = failing(LLAMA31_8B, architectures=["LlamaForCasualLM"])
    assert error.on == "LlamaForCasualLM"
    assert "'LlamaForCausalLM'" in error.fix
    assert "--model-impl transformers" in error.fix


def test_describing_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from vllm_core.models import catalog\n"
        f"catalog.describe({LLAMA31_8B!r}, dtype='float32'); catalog.describe({GEMMA3_4!r}, dtype='float32')\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'pydantic', 'transformers', 'numpy'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_building_and_running_loads_no_transformers():
    code = "import sys; import vllm_core.models.build; print('transformers' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False True"
