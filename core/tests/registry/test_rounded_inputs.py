"""``--activation fp8``: planned where it is offered and weights are in fp8, else refused with its cause."""

from __future__ import annotations

import json

import pytest

from vllm_core import launch
from vllm_core.api import CallSite, Unsupported
from vllm_core.api.ops import FP8_ACTIVATION, INT8_ACTIVATION
from vllm_core.config import EngineConfig
from vllm_core.errors import ConfigError, PlanError
from vllm_core.registry.select import plan

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKED = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


@pytest.fixture
def asked(tmp_path):
    """Needs of a small model whose config has these settings, with these options."""

    def make(options, **settings):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **settings}))
        return launch.needs_of(EngineConfig.from_options({"model": str(tmp_path), **options}))

    return make


@pytest.fixture
def rounding(needs):
    """Needs whose products may round their inputs."""
    sites = [CallSite(op=op, role="linear", dtype="float32", features=frozenset({FP8_ACTIVATION})) for op in LINEAR]
    return needs(sites=tuple(sites), kv_groups=(), weight_formats={"fp8_block128": 10, "q8_0": 10})


LINEAR = ("linear_pack", "linear")


def test_every_product_of_a_model_in_fp8_is_asked_to_round(asked):
    needs = asked({"activation": "fp8"}, quantization_config=FP8)
    assert "quantization.fp8_activation" in needs.capabilities
    found = {site.op: FP8_ACTIVATION in site.features for site in needs.sites}
    assert {op for op, rounds in found.items() if rounds} == {
        *LINEAR,
        *("linear_add", "rms_norm_linear", "rms_norm_gated_linear"),
    }


def test_experts_are_not_asked(asked):
    sparse = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    needs = asked({"activation": "fp8", "quantization": "fp8"}, **sparse, moe_intermediate_size=128, head_dim=32)
    assert {site.op for site in needs.sites if site.features and site.role == "moe"} == set()
    assert any(FP8_ACTIVATION in site.features for site in needs.sites if site.op == "linear")


def test_eight_bits_are_asked_of_products_and_experts(asked):
    needs = asked({"activation": "int8", "quantization": "int8"})
    assert {site.op for site in needs.sites if INT8_ACTIVATION in site.features} >= set(LINEAR)
    assert "quantization.fp8_activation" not in needs.capabilities


def test_weights_rounded_while_loading_are_in_fp8_too(asked):
    assert asked({"activation": "fp8", "quantization": "fp8"}).rounded_formats == ("fp8_channel",)


@pytest.mark.parametrize(
    ("options", "settings", "found"),
    [
        ({}, {}, "the dtype of the model"),
        ({}, {"quantization_config": PACKED}, "int4_group"),
        ({"quantization": "int8"}, {}, "int8_channel"),
        ({"load_format": "dummy"}, {"quantization_config": FP8}, "the dtype of the model"),
    ],
)
def test_a_model_without_weights_in_fp8_is_refused_and_told_what_it_has(asked, options, settings, found):
    with pytest.raises(ConfigError, match=found) as raised:
        asked({"activation": "fp8", **options}, **settings)
    assert "--quantization fp8" in raised.value.fix


def test_a_provider_that_rounds_is_chosen_and_the_plan_says_what_stays_exact(rounding, offer, candidate):
    formats = frozenset({"plain", "fp8_block128", "q8_0"})
    fast = offer("fast", LINEAR, formats=formats, features=frozenset())
    rounds = offer("rounds", LINEAR, formats=formats, priority=-10, features=frozenset({FP8_ACTIVATION}), note="of many rows")
    chosen = plan(rounding, [candidate(offers=(fast, rounds))], [])
    assert {one.provider for one in chosen.bindings} == {"rounds"}
    said = chosen.reasons["inputs"]
    assert said == "rounded to fp8 for weights in fp8_block128, of many rows; products with others, and experts, are exact"


def test_without_one_that_rounds_the_plan_is_refused_and_no_reference_steps_in(rounding, offer, candidate):
    fast = offer("fast", LINEAR, features=frozenset())
    with pytest.raises(PlanError, match=r"fast \(linear_pack: feature: wanted fp8_activation, supported none\)") as raised:
        plan(rounding, [candidate(offers=(fast,))], [])
    assert "reference (linear_pack: feature: wanted fp8_activation" in raised.value.found


def test_a_platform_that_declares_it_absent_is_refused_by_its_claim(asked, candidate):
    needs = asked({"activation": "fp8", "quantization": "fp8"})
    lacking = candidate(api_version="0.2", claims={"quantization.fp8_activation": Unsupported("no unit for it")})
    with pytest.raises(PlanError, match="no unit for it"):
        plan(needs, [lacking], [])


def test_a_plan_of_exact_products_says_nothing_of_inputs(needs, candidate):
    assert "inputs" not in plan(needs(), [candidate()], []).reasons


def test_a_plugin_older_than_the_capability_is_refused_as_one_that_lacks_it(asked, candidate):
    needs = asked({"activation": "fp8", "quantization": "fp8"})
    with pytest.raises(PlanError, match=r"newer than the plugin's API version 0\.1"):
        plan(needs, [candidate()], [])
