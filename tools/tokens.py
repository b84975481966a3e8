"""Greedy tokens of a model on a platform, and who served its ops; a line of JSON. For comparing platforms.

python tools/tokens.py PLATFORM MODEL COUNT [OPTION=VALUE...]    options of the engine, values in JSON where they are that
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm_core import LLM, SamplingParams

PROMPTS = ("The capital of France is", "Once upon a time there was a")


def main(platform: str, model: str, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Tokens by prompt, and the kinds of provider by op."""
    with LLM(model, platform=platform, **options) as llm:
        parameters = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(list(PROMPTS), parameters, use_tqdm=False)
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
    print(json.dumps(main(platform, model, int(count), options)))
