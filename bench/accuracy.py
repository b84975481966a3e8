"""What quantisation costs: perplexity on a text, and greedy tokens that agree with the model's own float32.

    python bench/accuracy.py MODEL [--file NAME=FILE.gguf ...] [--tokenizer PATH] [--tokens 1024] [--out FILE]

The text is the opening of Alice's Adventures in Wonderland (Lewis Carroll, 1865, public domain). Agreement is counted by
teacher forcing: at each place of the text, whether the likeliest token is the one that float32 has there. MODEL must have
weights that were never rounded (see unround.py); each --file has the same weights in a format of its own, and is measured with
exact and with rounded inputs.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from vllm_core import LLM, SamplingParams

TEXT = Path(__file__).with_name("texts") / "alice.txt"
ROUNDED: dict[str, Any] = {"activation": "int8"}
MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "--quantization int8": {"quantization": "int8"},
    "--quantization int8 --activation int8": {"quantization": "int8", **ROUNDED},
    "--quantization int4": {"quantization": "int4"},
    "--quantization int4 --activation int8": {"quantization": "int4", **ROUNDED},
    "--dtype bfloat16": {"dtype": "bfloat16"},
    "--kv-cache-dtype bfloat16": {"kv_cache_dtype": "bfloat16"},
    "--kv-cache-dtype float16": {"kv_cache_dtype": "float16"},
    "--kv-cache-dtype int8": {"kv_cache_dtype": "int8"},
    "--kv-cache-dtype fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "--kv-cache-dtype fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
}


def measured(options: dict[str, Any], tokens: int) -> tuple[float, list[int], str]:
    """Perplexity, the likeliest token at each place, and the Plan's line on weights."""
    llm = LLM(**{"dtype": "float32", "max_model_len": tokens + 16, "max_num_seqs": 4, **options})
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
    parser.add_argument("--file", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--only", default="", help="beside float32 only modes whose names have this in them")
    parser.add_argument("--tokenizer", help="where it is, if not with the model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = {"model": arguments.model, "tokenizer": arguments.tokenizer}
    cases = [(name, {**model, **options}) for name, options in MODES.items() if name == "float32" or arguments.only in name]
    for name, file in (one.split("=", 1) for one in arguments.file):
        cases += [(name, {"model": file}), (f"{name} --activation int8", {"model": file, **ROUNDED})]
    exact: list[int] = []
    results = []
    for name, options in cases:
        perplexity, best, weights = measured(options, arguments.tokens)
        exact = exact or best
        same = sum(a == b for a, b in zip(exact, best, strict=True)) / len(best)
        results.append({"mode": name, "perplexity": round(perplexity, 4), "agreement": round(same, 4), "weights": weights})
        print(json.dumps(results[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
