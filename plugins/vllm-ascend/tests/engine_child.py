"""Serve prompts with a model on a platform; prints tokens, or how errors were said, as JSON; lists for lists of options."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from vllm_core import LLM, SamplingParams
from vllm_core.errors import VLLMCoreError

PROMPTS = [[(7 * i + n) % 250 for i in range(length)] for n, length in enumerate((3, 150, 17))]


def served(model: str, platform: str, more: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens; one prompt is sampled with a seed."""
    count = more.pop("count", 9)
    sampled = SamplingParams(temperature=1.0, seed=5, top_k=9, max_tokens=count)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _ in range(2)] + [sampled]
    values = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 8 << 20}
    prompts: list[object] = PROMPTS
    if model == "demo":
        prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a land far away, there was a small"]
        params = params[:1] * 3
        values["kv_cache_memory_bytes"] = 64 << 20
    else:
        values["skip_tokenizer_init"] = True
    try:
        with LLM(model, platform=platform, **{**values, **more}) as llm:
            tokens = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        return {"tokens": tokens}
    except (VLLMCoreError, RuntimeError) as error:
        return {"error": type(error).__name__, "text": str(error)}


def main(model: str, platform: str, options: str) -> None:
    """An engine after the other."""
    torch.set_num_threads(1)
    given = json.loads(options)
    print(
        json.dumps(
            [served(model, platform, one) for one in given] if isinstance(given, list) else served(model, platform, given)
        )
    )


main(*sys.argv[1:])
