"""Weights into a rewired model: names, ties, dummies, what is wrong with them, and what is bound."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from transformers.utils import logging as hf_logging

from vllm_core.errors import ModelConfigError, WeightsError
from vllm_core.models import transformers_track
from vllm_core.models.spec import LayerSpec
from vllm_core.models.transformers_track.exchange import GatedMLP
from vllm_core.models.transformers_track.findings import Findings
from vllm_core.models.transformers_track.rewire import Linear

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.fixture
def olmo2(track, tmp_path):
    model = track.eager_model(AutoConfig.for_model("olmo2", **SIZES, tie_word_embeddings=False))
    config = {**model.config.to_dict(), "architectures": ["Olmo2ForCausalLM"]}
    return SimpleNamespace(config=config, weights=track.checkpoint(model, tmp_path), model=model)


def logits(runner, tokens=(5, 6, 7, 8)):
    sequence = runner.sequence(tokens)
    runner.step([(sequence, len(tokens))])
    return sequence.logits[0]


def test_missing_weight_is_named(track, olmo2):
    del olmo2.weights[NORM]
    with pytest.raises(WeightsError, match=f"1 missing, such as {NORM}"):
        track.rewired(olmo2.config, olmo2.weights)


def test_weight_of_another_shape_is_named(track, olmo2):
    olmo2.weights[NORM] = torch.ones(31)
    with pytest.raises(WeightsError, match="1 of another shape") as caught:
        track.rewired(olmo2.config, olmo2.weights)
    assert NORM in str(caught.value)


def test_weights_that_the_model_lacks_are_no_error(track, olmo2):
    plain = logits(track.rewired(olmo2.config, dict(olmo2.weights)))
    olmo2.weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert torch.equal(logits(track.rewired(olmo2.config, olmo2.weights)), plain)


def test_loading_is_silent_and_leaves_transformers_own_logging_as_it_was(track, olmo2, capfd):
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    capfd.readouterr()
    track.rewired(olmo2.config, {**olmo2.weights, "model.layers.0.surplus": torch.ones(4)})
    assert capfd.readouterr() == ("", "")
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


def test_float16_checkpoints_are_taken_in_the_model_s_dtype(track, olmo2):
    halves = {name: tensor.half() for name, tensor in olmo2.weights.items()}
    got = logits(track.rewired(olmo2.config, halves))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, logits(track.rewired(olmo2.config, olmo2.weights)), atol=0.02, rtol=0)


def test_experts_of_a_checkpoint_are_fused_by_transformers_own_mapping(track, tmp_path):
    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=4, num_experts_per_tok=2)
    model = track.eager_model(config)
    weights = track.checkpoint(model, tmp_path)
    assert set(weights) - set(model.state_dict()), "the checkpoint's names must differ from the modules'"
    runner = track.rewired({**config.to_dict(), "architectures": ["MixtralForCausalLM"]}, weights)
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits[0]
    torch.testing.assert_close(logits(runner), expected, atol=1e-4, rtol=0)


def test_tied_head_is_packed_from_the_embedding_with_both_readers(track, tmp_path):
    model = track.eager_model(AutoConfig.for_model("olmo2", **SIZES, tie_word_embeddings=True))
    weights = track.checkpoint(model, tmp_path)
    assert "lm_head.weight" not in weights
    runner = track.rewired({**model.config.to_dict(), "architectures": ["Olmo2ForCausalLM"]}, weights)
    packed = runner.model._head.lm_head.packed
    assert set(packed.readers) == {"model.embed_tokens", "lm_head"}
    assert packed.weight.data_ptr() == runner.model._body.embed_tokens.weight.data_ptr()


def test_every_linear_layer_runs_on_the_op(track, olmo2):
    runner = track.rewired(olmo2.config, olmo2.weights)
    parts = [*runner.model._body.modules(), *runner.model._head.modules()]
    assert not [part for part in parts if isinstance(part, torch.nn.Linear)]
    packed = [part for part in parts if isinstance(part, Linear)]
    assert len(packed) == 2 * 4 + 1, "attention's, and the head; gate, up and down are one module"
    assert sum(isinstance(part, GatedMLP) for part in parts) == 2


def test_what_is_bound_is_what_was_planned(track, olmo2):
    runner = track.rewired(olmo2.config, olmo2.weights)
    planned = {(site.op, site.role) for site in runner.spec.call_sites("float32")}
    assert runner.ops.asked <= planned
    assert {("linear", "linear"), ("kv_write", "kv.0.full"), ("paged_attention", "kv.0.full")} <= runner.ops.asked


def test_dummy_weights_depend_on_the_seed_alone(track, olmo2):
    first, again, other = (logits(track.rewired(olmo2.config, None, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.isfinite().all()


def test_dummy_weights_leave_the_caller_s_random_state_alone(track, olmo2):
    before = torch.random.get_rng_state()
    track.rewired(olmo2.config, None)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_weight_lives_in_the_device_s_pool(track, olmo2):
    class Counting(track.host_device):
        def __init__(self):
            self.adopted = set()

        def adopt(self, pool, host):
            assert pool == "weights"
            copy = host.clone()
            self.adopted.add(copy.data_ptr())
            return copy

    spec = transformers_track.describe(olmo2.config, dtype="float32", path="here")
    source = SimpleNamespace(config=olmo2.config, name="here")
    device, ops = Counting(), track.reference_ops()
    model = transformers_track.build(spec, source, device, ops, max_tokens=8, max_model_len=64)
    model.load(olmo2.weights.items())
    tensors = [*model._body.parameters(), *model._body.buffers()]
    tensors += [part.packed.weight for part in model._body.modules() if isinstance(part, Linear)]
    assert {tensor.data_ptr() for tensor in tensors} <= device.adopted
    assert not any(parameter.requires_grad for parameter in model._body.parameters())


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("doge", {}, r"attention in layers \[\]"),
    ],
)
def test_attention_that_the_modules_show_to_be_foreign_is_refused_before_loading(track, kind, changes, why):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ModelConfigError, match=why):
        track.rewired({**SIZES, **rope, "model_type": kind, **changes}, None)


def test_sinks_that_no_trial_showed_are_refused_before_loading(track):
    """As where a class does not run at a small width: without them its attention would be another."""
    config = {**SIZES, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    with pytest.raises(ModelConfigError, match=r"attention sinks in layers \[0, 1\]: it does not run"):
        track.rewired(config, None, layers=(LayerSpec(),) * 2, findings=Findings(failure="it does not run"))


def test_config_that_the_model_s_own_code_rejects_is_an_error_with_its_cause(track):
    with pytest.raises(ModelConfigError, match="Phi3ForCausalLM") as caught:
        track.rewired({**SIZES, "model_type": "phi3", "hidden_act": "no_such_function"}, None)
    assert "no_such_function" in caught.value.found


@pytest.mark.parametrize(
    ("kind", "why"), [("diffllama", "4 calls of attention in 2 layers"), ("nemotron", "hand keyword arguments on")]
)
def test_attention_that_only_a_step_shows_to_be_foreign_is_refused_in_the_first(track, kind, why):
    runner = track.rewired({**SIZES, "model_type": kind}, None)
    with pytest.raises(ModelConfigError, match=why):
        logits(runner)


def test_attention_that_differs_from_the_plan_is_refused(track, olmo2):
    runner = track.rewired(olmo2.config, olmo2.weights, num_kv_heads=4)
    with pytest.raises(ModelConfigError, match="KV heads"):
        logits(runner)
