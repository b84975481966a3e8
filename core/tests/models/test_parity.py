"""Every architecture against transformers in float32, on random weights: prefill, chunks, decode, mixed batches."""

from __future__ import annotations

import random

import pytest
import torch

QWEN3_MOE = {"moe_intermediate_size": 37, "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 24}
CASES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-head-size": ("LlamaForCausalLM", {"head_dim": 20}),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 9}),
    "mistral-full": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-late-window": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24}),
    "qwen3-tied": ("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 9}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-shares": ("Qwen3MoeForCausalLM", {**QWEN3_MOE, "norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen3-moe-every-other": ("Qwen3MoeForCausalLM", {**QWEN3_MOE, "decoder_sparse_step": 2}),
    "qwen3-moe-dense-layer": ("Qwen3MoeForCausalLM", {**QWEN3_MOE, "mlp_only_layers": [1], "attention_bias": True}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 3}),
    "gemma3-scalar": ("Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 40}),
    "gemma3-caps": ("Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 64, "final_logit_softcapping": 3.0}),
    "gemma3-layer-types": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def tokens_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 67), k=length)


@pytest.fixture(scope="module", params=CASES)
def case(request, reference):
    architecture, changes = CASES[request.param]
    return reference(architecture, **changes)


@pytest.mark.parametrize("chunk", [1, 7, 41])
def test_logits_equal_transformers_whatever_the_chunks(case, build, chunk):
    tokens = tokens_of(41, 1)
    sequences = build(case.config, case.weights())
    got = [sequences.logits([(0, tokens[i : i + chunk])])[0] for i in range(0, len(tokens), chunk)]
    torch.testing.assert_close(torch.cat(got), case.logits(tokens), **TOLERANCE)


def test_mixed_batches_of_prefill_and_decode_equal_transformers_alone(case, build):
    """Three sequences that start in different steps, in chunks of 5, then decode one token a step in one batch."""
    prompts = {0: tokens_of(23, 2), 1: tokens_of(6, 3), 2: tokens_of(14, 4)}
    sequences = build(case.config, case.weights())
    got = {s: [] for s in prompts}
    pending = {s: list(p) for s, p in prompts.items()}
    for step in range(30):
        rows = []
        for s in (2, 0, 1):
            size = 1 if len(pending[s]) <= 4 else 5
            if step >= s and pending[s]:
                rows.append((s, pending[s][:size]))
                del pending[s][:size]
        if not rows:
            break
        for (s, _), logits in zip(rows, sequences.logits(rows), strict=True):
            got[s].append(logits)
    for s, prompt in prompts.items():
        torch.testing.assert_close(torch.cat(got[s]), case.logits(prompt), **TOLERANCE)


def test_greedy_tokens_equal_transformers(case, build):
    tokens = tokens_of(9, 5)
    sequences = build(case.config, case.weights())
    new = list(tokens)
    for _ in range(12):
        logits = sequences.logits([(0, new)])[0]
        new = [int(logits[-1].argmax())]
        assert new[0] == int(case.logits(tokens)[-1].argmax())
        tokens.extend(new)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_bfloat16_stays_close_to_float32(architecture, reference, build):
    case = reference(architecture, head_dim=16)
    tokens = tokens_of(20, 6)
    got = build(case.config, case.weights(), dtype="bfloat16").logits([(0, tokens)])[0]
    wanted = case.logits(tokens)
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, wanted).min() > 0.995


def test_the_embedding_scale_is_rounded_to_the_models_dtype(reference, build):
    case = reference("Gemma3ForCausalLM", head_dim=16, num_hidden_layers=1)
    sequences = build(case.config, case.weights(), dtype="bfloat16")
    hidden = torch.empty(1, 48, dtype=torch.bfloat16)
    model = case.model.bfloat16()
    token = torch.tensor([5])
    sequences.model._embedding.run(hidden, token.int(), sequences.model._embedding_scale)
    assert torch.equal(hidden, model.model.embed_tokens(token))


def test_qwen3_embedding_pools_hidden_states_of_a_base_model(reference, build):
    """Qwen3-Embedding is saved without the prefix, under the name of the causal model."""
    case = reference("Qwen3Model", head_dim=24)
    config = {**case.config, "architectures": ["Qwen3ForCausalLM"]}
    sequences = build(config, case.weights(), pooling="last")
    first, second = tokens_of(11, 7), tokens_of(4, 8)
    got = sequences.step([(0, first), (1, second)])
    torch.testing.assert_close(got[0], case.hidden(first), **TOLERANCE)
    torch.testing.assert_close(got[1], case.hidden(second), **TOLERANCE)


def test_bert_rows_equal_transformers_alone(reference, build):
    case = reference("BertModel", num_key_value_heads=4)
    sequences = build(case.config, case.weights())
    rows = [(i, tokens_of(n, i)) for i, n in enumerate((13, 1, 29))]
    for got, (_, tokens) in zip(sequences.step(rows), rows, strict=True):
        torch.testing.assert_close(got, case.hidden(tokens), **TOLERANCE)


def test_bert_with_relu_and_one_token_type(reference, build):
    case = reference("BertModel", hidden_act="relu", type_vocab_size=1)
    tokens = tokens_of(17, 9)
    got = build(case.config, case.weights()).step([(0, tokens)])[0]
    torch.testing.assert_close(got, case.hidden(tokens), **TOLERANCE)
