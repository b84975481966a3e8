"""Models on the track `transformers`, end to end: transformers' tokens, alone and together, from captured steps or not."""

from __future__ import annotations

import pytest

from vllm_core import SamplingParams

PROMPTS = [[(17 * i + 5 * n) % 250 for i in range(9 + n)] for n in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
MODELS = {
    "LlamaForCausalLM": {},  # all of it is exchanged
    "CohereForCausalLM": {"logit_scale": 0.5},  # parallel sub-layers, neighbours rotated together, a head that scales
    "GPTNeoXForCausalLM": {"num_key_value_heads": 4, "head_dim": 8},  # products of heads side by side
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 1},
    # Sinks, a window in every other layer, clamped experts.
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6},
}


@pytest.mark.parametrize("architecture", MODELS)
def test_tokens_are_those_of_transformers_alone_and_together(make_model, tmp_path, engines, run, architecture):
    model = make_model(tmp_path, architecture, **MODELS[architecture])
    llm = engines(model, model_impl="transformers", max_model_len=64)
    assert llm.plan.track == "transformers"
    expected = [model.greedy(prompt, 10) for prompt in PROMPTS]
    assert run(llm, PROMPTS, GREEDY) == expected
    assert run(llm, PROMPTS[:1], GREEDY) == expected[:1]
    captured = llm._core.program.captured
    assert (captured is not None) == (llm.plan.graphs and llm._engine.device.supports_graphs)
    if captured is not None:
        assert captured.count
        assert captured.failure is None


def test_plan_says_what_was_exchanged(llama, engines):
    plan = engines(llama, model_impl="transformers", max_model_len=64).plan
    assert any("exchanged for core's ops: 2 layers of 2" in note for note in plan.notes)
    assert {"rms_norm", "add", "embedding"} <= {binding.op for binding in plan.bindings}
