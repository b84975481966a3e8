"""The platform without eager ops, from planning to tokens."""

from __future__ import annotations

import json
import os
import signal
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from vllm_core import LLM, SamplingParams
from vllm_core.api import CAPABILITIES, PLATFORM_HOOKS, UnsupportedError, is_available
from vllm_core.errors import PlanError
from vllm_toy_static import platform

SIZES = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    **SIZES,
}
PROMPTS = [[(7 * i + n) % 250 for i in range(length)] for n, length in enumerate((3, 90, 17, 40, 1))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(temperature=0.0, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=5, top_k=9, top_p=0.8, max_tokens=9),
    SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.4, logit_bias={7: 3.0}, min_tokens=3),
    SamplingParams(temperature=0.7, seed=1, max_tokens=9, bad_words=[]),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that both platforms load."""
    from safetensors.torch import save_file

    folder, generator = tmp_path_factory.mktemp("llama"), torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens": (257, 32), "lm_head": (257, 32), "model.norm": (32,)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{one}_proj": (rows, 32) for one, rows in (("q", 64), ("k", 32), ("v", 32))}
        shapes |= {f"{name}.self_attn.o_proj": (32, 64), f"{name}.mlp.gate_proj": (48, 32), f"{name}.mlp.up_proj": (48, 32)}
        shapes |= {f"{name}.mlp.down_proj": (32, 48)}
        shapes |= {f"{name}.input_layernorm": (32,), f"{name}.post_attention_layernorm": (32,)}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def engine(model, on="toy-static", **options):
    values = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22, "skip_tokenizer_init": True}
    return LLM(str(model), platform=on, **{**values, **options})


def outputs(llm):
    return [one.outputs[0] for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_the_plan_has_the_platforms_program_and_says_why(model):
    with engine(model) as llm:
        plan = llm.plan
        assert (plan.program, plan.program_entry) == ("toy-compiled", "vllm_toy_static.program:create")
        assert plan.bindings == ()
        assert "core's own cannot run here" in plan.reasons["program"]
        assert llm._engine.blueprint.config.scheduler.max_num_batched_tokens == platform.TOKENS[-1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_request_gets_the_tokens_of_the_host(model, asynchronous):
    """Chunked prompts beside decodes, seeded sampling, penalties, log-probabilities of prompt and tokens."""
    with engine(model, "cpu", max_num_seqs=16, max_num_batched_tokens=64) as host:
        expected = outputs(host)
    with engine(model, async_scheduling=asynchronous) as remote:
        found = outputs(remote)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for here, there in zip(found[1].logprobs, expected[1].logprobs, strict=True):
        assert {t: e.logprob for t, e in here.items()} == pytest.approx({t: e.logprob for t, e in there.items()}, abs=1e-4)


def test_the_devices_process_ends_with_the_engine(model):
    llm = engine(model)
    process = llm._engine.core.program._process
    llm.shutdown()
    assert process.poll() is not None


def test_a_device_that_dies_is_an_error_of_the_step(model):
    llm = engine(model)
    process = llm._engine.core.program._process
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with code -9"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_sizes_are_those_of_the_list():
    assert platform.size_for(1, 1) == (1, 1)
    assert platform.size_for(2, 17) == (4, 64)
    with pytest.raises(UnsupportedError, match="max_num_batched_tokens 64"):
        platform.size_for(1, 65)


def test_options_beyond_the_largest_size_are_refused(model):
    with pytest.raises(UnsupportedError, match="max_num_seqs 17"):
        engine(model, max_num_seqs=17)


def test_cores_own_program_and_other_dtypes_are_refused_while_planning(model):
    with pytest.raises(PlanError, match="reference"):
        engine(model, program="core")
    with pytest.raises(PlanError, match="bfloat16"):
        engine(model, dtype="bfloat16")
    with pytest.raises(PlanError, match="did you mean"):
        engine(model, program="toy-complied")


def test_the_entry_point_has_the_name_of_the_platform_and_all_hooks():
    (found,) = entry_points(group="vllm.platforms", name="toy-static")
    plugin = found.load()
    assert plugin.manifest().name == "toy-static"
    assert all(callable(getattr(plugin, hook)) for hook in PLATFORM_HOOKS)
    assert all(is_available(plugin.CLAIMS[name]) for name, row in CAPABILITIES.items() if row.required)
