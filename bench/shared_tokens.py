"""Tokens of an engine on several workers, judged by one worker (teacher forcing).

    python bench/shared_tokens.py MODEL [--workers 2] [--dtype bfloat16] [--judge float32] [--layers N] [--out FILE] [options]

Each greedy token of the workers must be the likeliest one of the judge in the same context, or no more than a tolerance behind
it: that of the coarser dtype (`vllm_core.bench.judge`), and twice that where both compute in it, since either may be as far
from the truth. MODEL is a folder, a GGUF file, or a shape (`vllm-core bench throughput --help`) with normal dummy weights, of
which many tokens are near-ties, so that there the tolerance alone decides. Exit status 1: a token is outside.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from vllm_core import LLM, SamplingParams
from vllm_core.bench.judge import MOST_TIES, TOLERANCE
from vllm_core.bench.workloads import SHAPES, engine_options

TEXTS = (
    "The three laws of thermodynamics are",
    "In the beginning the Universe was created.",
    "def fibonacci(n):",
    "To bake bread you need flour, water, salt and",
    "Dear Sir or Madam, I am writing to",
    "The capital of France is Paris, and the capital of Italy is",
)


def prompts(model: str, llm: LLM) -> list[list[int]]:
    """Texts for a real model; for a shape random tokens of several lengths, some of them longer than a tile."""
    if model not in SHAPES:
        return [llm.get_tokenizer().encode(text, add_special_tokens=False, max_tokens=512) for text in TEXTS]
    draw = random.Random(1)
    return [[draw.randrange(10000) for _ in range(draw.randrange(5, 200))] for _ in range(12)]


def judged(one: LLM, asked: list[list[int]], answers: list[list[int]]) -> list[float]:
    """How far each token's log-probability is behind the likeliest one's."""
    whole = [{"prompt_token_ids": prompt + tokens} for prompt, tokens in zip(asked, answers, strict=True)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0.0)
    gaps = []
    for prompt, tokens, output in zip(asked, answers, one.generate(whole, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None, "they were asked for"
        for at, token in enumerate(tokens, len(prompt)):
            row = output.prompt_logprobs[at]
            assert row is not None, "only the first token has none"
            gaps.append(max(value.logprob for value in row.values()) - row[token].logprob)
    return gaps


def main() -> int:
    """Generate, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--platform")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--judge", choices=("bfloat16", "float16", "float32"), help="the judge's dtype (default: the same)")
    parser.add_argument("--layers", type=int, help="fewer layers of a shape")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--deny-provider", action="append", default=[], help="as of the engine, for the workers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    judge = args.judge or args.dtype
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 16, "device_memory_utilization": 0.3}
    if args.platform:
        options["platform"] = args.platform
    if args.model in SHAPES:
        options["dummy_bound"] = None  # logits that differ, where those of the measured shapes are nearly the same
    if args.layers:
        options["hf_overrides"] = {"num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as folder:

        def made(changes: dict[str, Any]) -> dict[str, Any]:
            return engine_options(args.model, {**options, **changes}, Path(folder))

        shared = {"dtype": args.dtype, "tensor_parallel_size": args.workers, "deny_provider": args.deny_provider}
        with LLM(**made(shared)) as several:
            asked = prompts(args.model, several)
            params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
            outputs = several.generate([{"prompt_token_ids": one} for one in asked], params, use_tqdm=False)
            answers = [list(output.outputs[0].token_ids) for output in outputs]
            providers = sorted({one.provider for one in several.plan.bindings})
        del several
        gc.collect()
        with LLM(**made({"dtype": judge})) as one:
            gaps = judged(one, asked, answers)
    tolerance = max(TOLERANCE[args.dtype], TOLERANCE[judge]) * (2 if args.dtype == judge else 1)
    behind = [gap for gap in gaps if gap > 0]
    outside = [gap for gap in behind if gap > tolerance]
    most = 1.0 if args.model in SHAPES else MOST_TIES[args.dtype]
    result = {
        "model": Path(args.model).name,
        "layers": args.layers,
        "workers": args.workers,
        "dtype": args.dtype,
        "judge": judge,
        "tokens": len(gaps),
        "likeliest": len(gaps) - len(behind),
        "tolerance": tolerance,
        "within": len(behind) - len(outside),
        "outside": len(outside),
        "largest gap": max(gaps),
        "providers": providers,
    }
    print(json.dumps(result), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(bool(outside) or len(behind) > max(1, most * len(gaps)))


if __name__ == "__main__":
    raise SystemExit(main())
