"""What quantisation costs: perplexity on a text, and greedy tokens that agree with the model's own float32.

    python bench/accuracy.py MODEL [--tokenizer PATH] [--tokens 1024] [--out FILE]

The text is the opening of Alice's Adventures in Wonderland (Lewis Carroll, 1865, public domain). Agreement is counted by
teacher forcing: at each place of the text, whether the likeliest token is the one that float32 has there. MODEL must have
weights that are not quantised yet for `--quantization` to change them; in a quantised file only activations differ.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from vllm_core import LLM, SamplingParams

TEXT = Path(__file__).with_name("texts") / "alice.txt"
MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8, activation int8": {"quantization": "int8", "activation": "int8"},
    "int4, activation int8": {"quantization": "int4", "activation": "int8"},
}
STEP = 4
"""Tokens of a step where inputs are rounded: only products of a few rows, as decoding has them, round."""


def measured(model: dict[str, Any], options: dict[str, Any], tokens: int) -> tuple[float, list[int], str]:
    """Perplexity, the likeliest token at each place, and the Plan's line on weights."""
    settings = {**model, **options, "dtype": "float32", "max_model_len": tokens + 16, "max_num_seqs": STEP}
    if options.get("activation") == "int8":
        settings["max_num_batched_tokens"] = STEP
    llm = LLM(**settings)
    ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))[:tokens]
    [whole] = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    loss, best = 0.0, []
    for place, found in enumerate(whole.prompt_logprobs or []):
        if found is not None:
            loss -= found[ids[place]].logprob
            best.append(max((one.logprob, token) for token, one in found.items())[1])
    return math.exp(loss / len(best)), best, llm.plan.reasons.get("weights", "as the checkpoint has them")


def main() -> None:
    """Measure every mode and write one line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokenizer", help="where it is, if not with the model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    exact: list[int] = []
    results = []
    model = {"model": arguments.model, "tokenizer": arguments.tokenizer}
    for name, options in MODES.items():
        perplexity, best, weights = measured(model, options, arguments.tokens)
        exact = exact or best
        same = sum(a == b for a, b in zip(exact, best, strict=True)) / len(best)
        results.append({"mode": name, "perplexity": round(perplexity, 4), "agreement": round(same, 4), "weights": weights})
        print(json.dumps(results[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
