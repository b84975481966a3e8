"""One model in two forms: a GGUF file, and a Hugging Face folder written from it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_core import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

EXPORT = Path(__file__).parents[3] / "tools" / "export_hf.py"
MESSAGES = [{"role": "user", "content": "Name three colours."}]


def test_a_folder_written_from_a_gguf_gives_its_tokens(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    gguf = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    subprocess.run([sys.executable, str(EXPORT), str(gguf), str(tmp_path)], check=True, timeout=240)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1, "the weights are sharded"
    params = SamplingParams(temperature=0.0, max_tokens=24)
    options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}
    results = []
    for model in (gguf, tmp_path):
        with LLM(str(model), **options) as llm:
            text = llm.generate(["The capital of France is", "def f(x):"], params, use_tqdm=False)
            chat = llm.chat(MESSAGES, params, use_tqdm=False)
            results.append([(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].text) for o in text + chat])
    assert results[0] == results[1]
