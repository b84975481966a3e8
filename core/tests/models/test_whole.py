"""`decode_layers` in a model: which steps and models it is asked for, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA = {**SMALL, "architectures": ["LlamaForCausalLM"]}
QWEN3 = {**SMALL, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "attention_bias": False}
OTHERS: dict[str, dict[str, Any]] = {
    "windows": {**QWEN3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "experts": {**SMALL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "sandwich norms": {**SMALL, "architectures": ["Gemma3ForCausalLM"], "head_dim": 32, "sliding_window": 8},
}
STEPS = [[(0, [5, 6, 7])], [(0, [8])], [(1, [9])], [(0, [10]), (1, [11])], [(0, [12, 13]), (1, [14])], [(1, [15]), (0, [16])]]
DECODES = (1, 2, 3, 5)


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_steps_of_one_token_a_row_are_one_call_and_all_logits_stay_the_same(build, config):
    plain, whole = build(config), build(config, whole=True)
    for index, rows in enumerate(STEPS):
        whole.ops.calls.clear()
        expected, found = plain.logits(rows), whole.logits(rows)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert whole.ops.calls.count("decode_layers") == int(index in DECODES)
        assert ("qk_norm_rope_attention" in whole.ops.calls) is (index not in DECODES)


def test_what_a_provider_leaves_is_run_layer_by_layer(build, monkeypatch):
    monkeypatch.setattr("vllm_core.ops.stack.decode_layers", lambda *_: False)
    plain, whole = build(LLAMA), build(LLAMA, whole=True)
    for rows in STEPS:
        expected, found = plain.logits(rows), whole.logits(rows)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert whole.ops.calls.count("decode_layers") == len(DECODES)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_do_not_ask_for_it(name, build):
    model = build(OTHERS[name], whole=True)
    assert not any(op == "decode_layers" for op, _ in model.ops.sites)
    assert not any(site.op == "decode_layers" for site in model.spec.call_sites("float32"))


def test_workers_that_share_a_model_do_not_ask_for_it(build):
    spec = build(LLAMA).spec
    assert spec.is_plain_stack
    assert not spec.shard(2).is_plain_stack
