"""Logits of rewired models against transformers' own eager attention, in float32, whatever the steps look like."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from vllm_core.config import ModelConfig
from vllm_core.loader.source import open_model

MINILM = Path.home() / ".cache/vllm-core/models/all-minilm-l6-v2"
TOLERANCE = 1e-4
LENGTHS = (23, 17, 9)

COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}

ARCHITECTURES = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {**GROUPED, "sliding_window": 6},
    "gemma3_text": {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "helium": {**GROUPED, "head_dim": 8},  # neighbours rotated together
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0, 1]},  # a layer without rotary embedding
    "phi": {**GROUPED, "partial_rotary_factor": 0.5},  # parallel sub-layers, biases in the head
    "phi3": {**GROUPED, "sliding_window": 6},  # fused qkv and gate_up
    "gpt_neox": {**COMMON, "rotary_pct": 0.25},  # parallel residual, partial rotary
    "olmo2": GROUPED,  # norms on q and k over all heads, norms after the sub-layers
    "starcoder2": {**GROUPED, "sliding_window": 6},  # layer norms and biases
    "granite": {**GROUPED, "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "gemma2": {
        **GROUPED,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
    },
    "mixtral": {**GROUPED, **EXPERTS, "sliding_window": 6},
    "qwen3_moe": {**GROUPED, **EXPERTS, "head_dim": 8},
    "cohere2": {**GROUPED, "num_hidden_layers": 4, "sliding_window": 6, "logit_scale": 0.5},  # a last layer without rotary
    "glm": {**GROUPED, "head_dim": 8},
    "gpt2": GPT2,  # learned positions, Conv1D, tied embeddings
    "gpt_bigcode": GPT2,  # one KV head
    "gpt_oss": {**GROUPED, **EXPERTS, "head_dim": 8, "sliding_window": 6},  # sinks, cosines of half a head, clamped experts
    "granite_swa": {**GROUPED, "num_hidden_layers": 5, "sliding_window": 6},  # sinks in layers that run as a whole
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32},  # a decoder inside its body
}


def whole(tokens_left):
    """Every prompt in one step of its own."""
    return [[(index, count)] for index, count in enumerate(tokens_left)]


def chunked(tokens_left):
    """Every prompt alone, in chunks of 7 and then token by token."""
    steps = []
    for index, count in enumerate(tokens_left):
        steps += [[(index, 7)]] * ((count - 3) // 7)
        steps += [[(index, 1)]] * (count - 7 * ((count - 3) // 7))
    return steps


def mixed(tokens_left):
    """Prefill chunks beside decodes, in changing order and company."""
    order, left, steps = random.Random(3), list(tokens_left), []
    while any(left):
        rows = order.sample([index for index, count in enumerate(left) if count], k=min(2, sum(map(bool, left))))
        step = [(index, min(left[index], order.choice((1, 1, 5, 8)))) for index in rows]
        for index, count in step:
            left[index] -= count
        steps.append(step)
    return steps


@functools.cache
def prompts():
    order = random.Random(1)
    return [[order.randrange(3, 99) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def references():
    """Config, checkpoint and expected logits by model type, made once."""
    return {}


@pytest.fixture
def reference(references, track, tmp_path):
    def make(kind):
        if kind not in references:
            model = track.eager_model(AutoConfig.for_model(kind, **ARCHITECTURES[kind]))
            config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
            with torch.no_grad():
                expected = [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in prompts()]
            references[kind] = config, track.checkpoint(model, tmp_path), expected
        return references[kind]

    return make


@pytest.mark.parametrize("schedule", [whole, chunked, mixed])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_equal_those_of_transformers_in_any_schedule(reference, track, kind, schedule):
    config, weights, expected = reference(kind)
    runner = track.rewired(config, weights)
    sequences = [runner.sequence(tokens) for tokens in prompts()]
    for step in schedule(LENGTHS):
        runner.step([(sequences[index], count) for index, count in step])
    for sequence, want in zip(sequences, expected, strict=True):
        assert want.std() > 0.05, "logits must differ for the comparison to mean anything"
        torch.testing.assert_close(torch.cat(sequence.logits), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_hidden_states_of_encoders_equal_those_of_transformers(track, tmp_path, kind):
    config = AutoConfig.for_model(kind, **{**COMMON, "type_vocab_size": 2})
    model = track.eager_model(config, headless=True)
    runner = track.rewired({**config.to_dict(), "architectures": [type(model).__name__]}, track.checkpoint(model, tmp_path))
    hidden = runner.step([(runner.sequence(tokens), len(tokens)) for tokens in prompts()])
    with torch.no_grad():
        expected = [model(torch.tensor([tokens])).last_hidden_state[0] for tokens in prompts()]
    torch.testing.assert_close(hidden, torch.cat(expected), atol=TOLERANCE, rtol=0)


def test_causal_checkpoint_that_pools_gives_the_body_s_hidden_states(reference, track):
    config, weights, _ = reference("olmo2")
    runner = track.rewired(config, weights, pooling="last")
    hidden = runner.step([(runner.sequence(prompts()[0]), LENGTHS[0])])
    body = track.eager_model(AutoConfig.for_model("olmo2", **ARCHITECTURES["olmo2"])).model
    with torch.no_grad():
        expected = body(torch.tensor([prompts()[0]]), use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=0)
    assert not hasattr(runner.model, "_head")


def test_results_carry_no_autograd_graph(reference, track):
    config, weights, _ = reference("mixtral")
    runner = track.rewired(config, weights)
    assert not runner.step([(runner.sequence([5, 6, 7]), 3)]).requires_grad


def test_bfloat16_models_answer_in_bfloat16_and_close_to_float32(reference, track):
    config, weights, expected = reference("gemma2")
    runner = track.rewired(config, {name: tensor.bfloat16() for name, tensor in weights.items()}, dtype="bfloat16")
    sequence = runner.sequence(prompts()[0])
    hidden = runner.step([(sequence, LENGTHS[0])])
    assert hidden.dtype == torch.bfloat16
    # 8 bits of mantissa over three layers; logits are capped to 4.
    torch.testing.assert_close(sequence.logits[0], expected[0], atol=0.1, rtol=0)


@pytest.mark.model
@pytest.mark.skipif(not MINILM.is_dir(), reason=f"no model at {MINILM}")
def test_a_real_encoder_s_hidden_states_equal_those_of_transformers(track):
    source = open_model(ModelConfig(model=str(MINILM)))
    runner = track.rewired(source.config, dict(source.weights()))
    tokens = [101, 2023, 2003, 1037, 3231, 102]
    hidden = runner.step([(runner.sequence(tokens), len(tokens))])
    with torch.no_grad():
        expected = AutoModel.from_pretrained(MINILM, attn_implementation="eager")(torch.tensor([tokens])).last_hidden_state[0]
    torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=0)
