"""A model of a few kilobytes with dummy weights, and one result on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_core.bench import measure
from vllm_core.bench.host import write_null_model
from vllm_core.bench.results import Result
from vllm_core.bench.workloads import WORKLOADS

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
OPTIONS = {"load_format": "dummy", "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 22, "block_size": 16}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The model: random weights, a byte tokenizer, a chat template."""
    made = write_null_model(tmp_path_factory.mktemp("model"))
    (made / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    return made


@pytest.fixture(scope="session")
def job(folder, platform) -> measure.Job:
    """Two small workloads, two counted runs."""
    small = [
        replace(WORKLOADS["throughput"], requests=3, prompt=(8, 16), output=(4, 8)),
        replace(WORKLOADS["prefix"], requests=2, prompt=(4, 4), output=(3, 3), shared=32),
    ]
    options = {**OPTIONS, "platform": platform}
    return measure.Job(kind="throughput", model=str(folder), options=options, workloads=small, runs=2)


@pytest.fixture(scope="session")
def result(job) -> Result:
    """Measured once."""
    return measure.measure(job)
