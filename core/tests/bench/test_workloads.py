"""Workloads are what they have always been, token by token: figures of other engines were measured on them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from vllm_core.bench.workloads import SHAPES, VOCABULARY, WORKLOADS, engine_options
from vllm_core.errors import ConfigError
from vllm_core.launch import blueprint

DIGESTS = {
    "throughput": ("e17fd04843c8ad77", "f12a0e0c7d47d709"),
    "latency": ("07bf0511555cbe33", "3432ea00b5a682f5"),
    "decode64": ("2a748b7ba519e8a4", "475733c09200c359"),
    "prefill": ("03a5aaa41d993ae7", "afd9a60e7d3e2c2d"),
    "prefix": ("bcd7d4a0e51fbd5e", "47b6b0f4cb61a742"),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_of_a_seed_never_change(name) -> None:
    drawn = [json.dumps(WORKLOADS[name].draw(seed)) for seed in (0, 1)]
    assert tuple(hashlib.sha256(text.encode()).hexdigest()[:16] for text in drawn) == DIGESTS[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_have_the_lengths_that_the_workload_says(name) -> None:
    workload = WORKLOADS[name]
    requests = workload.draw(3)
    assert len(requests) == workload.requests
    for prompt, count in requests:
        assert workload.prompt[0] <= len(prompt) - workload.shared <= workload.prompt[1]
        assert workload.output[0] <= count <= workload.output[1]
        assert max(prompt) < VOCABULARY
    assert max(len(prompt) + count for prompt, count in requests) <= workload.longest


def test_prompts_share_their_beginning_and_nothing_more() -> None:
    workload = replace(WORKLOADS["prefix"], requests=3)
    prompts = [prompt for prompt, _ in workload.draw(0)]
    assert len({tuple(prompt[: workload.shared]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3


@pytest.mark.parametrize(("name", "billions"), [("qwen3-0.6b", 0.6), ("qwen3-8b", 8.2)])
def test_a_shape_is_a_model_of_the_size_in_its_name_with_dummy_weights(name, billions, tmp_path, platform) -> None:
    options = engine_options(name, {"max_model_len": 512}, tmp_path)
    assert (options["load_format"], options["dummy_bound"], options["max_model_len"]) == ("dummy", 1e-3, 512)
    spec = blueprint({**options, "platform": platform}).spec
    layer = spec.hidden_size * (2 * (spec.num_heads + spec.num_kv_heads) * spec.head_size + 3 * spec.intermediate_size)
    vocabulary = spec.vocab_size * spec.hidden_size * (1 if SHAPES[name]["tie_word_embeddings"] else 2)
    assert (len(spec.layers) * layer + vocabulary) / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_shape_has_no_weights_to_load(tmp_path) -> None:
    with pytest.raises(ConfigError, match="Shape has no weights"):
        engine_options("qwen3-0.6b", {"load_format": "safetensors"}, tmp_path)


def test_a_model_that_is_no_shape_is_taken_as_it_is(tmp_path) -> None:
    assert engine_options("demo", {"dtype": "float32"}, tmp_path) == {"dtype": "float32", "model": "demo"}
