"""What a config says of a model, and which models are refused while planning."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from vllm_core.errors import ModelConfigError
from vllm_core.models import transformers_track
from vllm_core.models.transformers_track.description import normalise

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}


def describe(kind, architecture=None, **changes):
    config = {**SIZES, "model_type": kind, **changes}
    if architecture is not None:
        config["architectures"] = [architecture]
    return transformers_track.describe(config, dtype="float32", path="models/here")


def test_sizes_come_from_the_config():
    spec = describe("olmo2", "Olmo2ForCausalLM")
    assert (spec.kind, spec.architecture, spec.classname) == ("decoder", "Olmo2ForCausalLM", "Olmo2ForCausalLM")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.vocab_size) == (4, 2, 8, 99)
    assert (spec.hidden_size, spec.intermediate_size, spec.max_position, len(spec.layers)) == (32, 48, 64, 4)
    assert spec.pooling is None


def test_names_of_older_configs_are_understood():
    config = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 99}
    spec = transformers_track.describe(config, dtype="float32", path="here")
    assert (spec.hidden_size, spec.num_kv_heads, len(spec.layers), spec.max_position) == (32, 4, 2, 128)
    assert spec.architecture == "GPT2LMHeadModel"


def test_missing_architecture_means_the_causal_model():
    assert describe("olmo2").classname == "Olmo2ForCausalLM"


def test_layer_types_make_kv_groups():
    groups = describe("gemma2", sliding_window=16, head_dim=8).kv_groups()
    assert [(g.kind, g.window, g.layers) for g in groups] == [("full", None, (1, 3)), ("window", 16, (0, 2))]


def test_window_without_layer_types_holds_for_every_layer():
    assert [layer.window for layer in describe("starcoder2", sliding_window=16).layers] == [16] * 4


def test_window_that_is_turned_off_is_none():
    spec = describe("qwen2_moe", sliding_window=16, use_sliding_window=False)
    assert [layer.window for layer in spec.layers] == [None] * 4


def test_soft_cap_becomes_a_feature_of_the_call_site():
    sites = describe("gemma2", sliding_window=16, head_dim=8, attn_logit_softcapping=20.0).call_sites("float32")
    features = {site.role: site.features for site in sites if site.op == "paged_attention"}
    assert features == {"kv.0.full": {"soft_cap"}, "kv.1.window": {"soft_cap", "sliding_window"}}


def test_call_sites_are_only_those_that_the_track_uses():
    ops = {site.op for site in describe("starcoder2").call_sites("float32")}
    assert {"linear", "linear_pack", "paged_attention", "kv_write", "sample", "advance"} <= ops
    assert not ops & {"add_rms_norm", "gated_activation", "embedding", "add", "pool"}


def test_masked_language_models_are_encoders_and_pool():
    spec = describe("bert", "BertForMaskedLM")
    assert (spec.kind, spec.pooling, spec.classname, spec.kv_groups()) == ("encoder", "mean", "BertModel", ())
    assert {"encoder_attention", "pool"} <= {site.op for site in spec.call_sites("float32")}


def test_decoder_without_a_head_pools_its_last_token():
    spec = describe("mistral", "MistralModel")
    assert (spec.kind, spec.pooling, spec.classname) == ("decoder", "last", "MistralModel")


def test_positions_behind_the_padding_id_shorten_the_context():
    spec = describe("roberta", "RobertaModel")
    assert (spec.position_offset, spec.max_position) == (2, 62)


def test_longrope_keeps_to_the_context_in_which_its_factors_never_switch():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    spec = describe("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    assert spec.max_position == 32


def test_keys_that_would_choose_code_or_kernels_are_dropped():
    config = {
        **SIZES,
        "model_type": "olmo2",
        "auto_map": {"AutoConfig": "evil.Config"},
        "_attn_implementation": "somebody/kernel",
        "attn_implementation": "somebody/kernel",
        "fusion_config": {"patch_embeddings": True},
    }
    normal = normalise(config, "here")
    assert normal._attn_implementation != "somebody/kernel"
    assert not hasattr(normal, "auto_map")
    assert getattr(normal, "fusion_config", None) is None


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("bloom", {"architecture": "BloomForCausalLM"}, "AttentionInterface"),
        ("mamba", {"architecture": "MambaForCausalLM"}, "AttentionInterface"),
        ("deepseek_v3", {}, "multi-head latent attention"),
        ("llama4_text", {}, "chunked attention"),
        ("minimax", {}, "linear_attention"),
        ("gemma4_text", {"head_dim": 8, "global_head_dim": 16}, "differ from layer to layer"),
        ("t5", {"architecture": "T5ForConditionalGeneration"}, "encoder-decoder"),
        ("llava", {"architecture": "LlavaForConditionalGeneration"}, "beside its text model"),
        ("olmo2", {"architecture": "Olmo2ForTokenClassification", "quantization_config": {"bits": 4}}, "quantised"),
        ("gpt_oss", {"head_dim": 8, "quantization_config": {"quant_method": "mxfp4"}}, "quantised checkpoint, mxfp4"),
    ],
)
def test_models_that_cannot_be_rewired_are_refused_with_the_reason(kind, changes, why):
    with pytest.raises(ModelConfigError, match=why) as caught:
        describe(kind, **changes)
    assert caught.value.fix


def test_unknown_model_type_names_the_nearest():
    with pytest.raises(ModelConfigError, match="olmo2"):
        describe("olmo2x")


def test_code_in_the_repository_is_named_as_the_reason():
    with pytest.raises(ModelConfigError, match="never run"):
        describe("my_own_model", auto_map={"AutoModelForCausalLM": "modeling.Mine"})


def test_missing_model_type_is_an_error():
    with pytest.raises(ModelConfigError, match="None"):
        transformers_track.describe(dict(SIZES), dtype="float32", path="here")


@pytest.mark.parametrize("changes", [{"hidden_size": "wide"}, {"num_hidden_layers": 0}, {"vocab_size": None}])
def test_broken_sizes_are_errors_that_name_the_model(changes):
    with pytest.raises(ModelConfigError, match="models/here"):
        describe("olmo2", **changes)


def test_description_agrees_with_transformers_defaults():
    config = AutoConfig.for_model("granite")
    spec = transformers_track.describe(config.to_dict(), dtype="bfloat16", path="here")
    assert (spec.num_heads, spec.vocab_size, spec.dtype) == (config.num_attention_heads, config.vocab_size, "bfloat16")
