"""Greedy tokens of a model on a platform, and who served its ops; a line of JSON. For comparing platforms.

python tools/tokens.py PLATFORM MODEL COUNT [OPTION=VALUE...]    options of the engine, values in JSON where they are that

Without a tokenizer (`skip_tokenizer_init=true`) the prompts are numbers. An error of the engine is printed in its four parts.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm_core import LLM, SamplingParams
from vllm_core.errors import VLLMCoreError

PROMPTS = ("The capital of France is", "Once upon a time there was a")
NUMBERS = ([7, 1, 2], [(7 * n) % 250 for n in range(33)])


def main(platform: str, model: str, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Tokens by prompt, and the kinds of provider by op."""
    with LLM(model, platform=platform, **options) as llm:
        parameters = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        prompts: list[Any] = list(NUMBERS if options.get("skip_tokenizer_init") else PROMPTS)
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        served = {binding.op: f"{binding.kind} {binding.provider}" for binding in llm.plan.bindings}
        demoted = [f"{one.op}: {one.cause}" for one in llm.plan.demotions]
    return {"tokens": [list(one.outputs[0].token_ids) for one in outputs], "served": served, "demoted": demoted}


def value(text: str) -> Any:
    """JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    platform, model, count, *rest = sys.argv[1:]
    options = {name: value(text) for name, _, text in (item.partition("=") for item in rest)}
    try:
        print(json.dumps(main(platform, model, int(count), options)))
    except VLLMCoreError as error:
        sys.exit(f"error: {error}")
