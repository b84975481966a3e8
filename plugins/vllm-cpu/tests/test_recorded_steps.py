"""Engines whose decode steps are recorded give the bits of eager ones, on any mixture of kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_cpu import native

CHILD = Path(__file__).with_name("steps_child.py")
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 255,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0, **SIZES}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def run(tmp_path):
    """Both engines of a model; the library at ``path``, else the one that this process uses."""

    def both(config, path="", **options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        environ = {**os.environ, **({native.VARIABLE: path} if path else {})}
        command = [sys.executable, str(CHILD), str(tmp_path), json.dumps(options)]
        done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return both


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_decode_step_is_one_call_of_the_library(run, library, dtype) -> None:
    found = run(LLAMA, dtype=dtype)
    assert found["recorded"] == found["eager"]
    assert found["failure"] is None
    assert {key.split("/")[0] for key in found["graphs"]} >= {"1", "3", "4"}
    assert all(runs == 1 and own == calls > 15 for runs, own, calls in found["graphs"].values()), found["graphs"]
    assert found["changed"] == [], "a number that differs from step to step was recorded"


def test_experts_are_called_from_python_between_calls_of_the_library(run, library) -> None:
    """Which of them a token takes is read from its values, in each replay anew."""
    found = run(MIXTRAL, dtype="float32")
    assert found["recorded"] == found["eager"]
    assert found["failure"] is None
    assert all(1 < runs < calls and 0 < own < calls for runs, own, calls in found["graphs"].values()), found["graphs"]


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL])
def test_without_the_library_steps_are_recorded_all_the_same(run, config) -> None:
    found = run(config, dtype="float32", deny_provider=["vllm-cpu-native", "vllm-cpu-native-int8"])
    assert found["recorded"] == found["eager"]
    assert found["failure"] is None
    assert all(own == 0 for _, own, _ in found["graphs"].values()), found["graphs"]


def test_on_references_alone_steps_run_eagerly_and_say_why(run) -> None:
    """`build_step` returns what it built: a replay could not."""
    denied = ["vllm-cpu-native", "vllm-cpu-native-int8", "vllm-cpu", "vllm-cpu-unpadded"]
    found = run(LLAMA, dtype="float32", deny_provider=denied)
    assert found["recorded"] == found["eager"]
    assert found["graphs"] == {}
    assert "build_step returned a value" in found["failure"]


def test_a_library_of_others_is_recorded_beside_what_it_lacks(run, build, source) -> None:
    """The documentation's has one op, and no replay of its own."""
    found = run(LLAMA, build(source), dtype="float32")
    assert found["recorded"] == found["eager"]
    assert found["failure"] is None
    norms = 1 + 2 * LLAMA["num_hidden_layers"]
    assert {own for _, own, _ in found["graphs"].values()} == {norms}
