"""Serving workloads through `LLM.generate`, on dummy weights of a dense shape: tokens per second, seconds, start-up.

    python bench/offline.py qwen3-0.6b [--workloads latency,decode64] [--runs 3] [--out FILE] [--option NAME=JSON]

Prompts are token ids drawn from a seeded generator; run r takes seed r. Greedy, but for `throughput`, which samples at
temperature 0.6. The first run of each workload is listed as `first` and left out of the median: it captures steps and
compiles what the kernel cache does not hold. The file has the Plan, so that like is compared with like.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}
COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
VOCABULARY = 10000
"""Prompts use the first token ids alone."""

Request = tuple[list[int], int]


def throughput(draw: random.Random) -> list[Request]:
    """256 requests of 100 to 1,024 tokens each way."""
    return [(_tokens(draw, draw.randint(100, 1024)), draw.randint(100, 1024)) for _ in range(256)]


def latency(draw: random.Random) -> list[Request]:
    """One request, 128 in, 256 out."""
    return [(_tokens(draw, 128), 256)]


def decode64(draw: random.Random) -> list[Request]:
    """64 requests, 128 in, 256 out."""
    return [(_tokens(draw, 128), 256) for _ in range(64)]


def prefill(draw: random.Random) -> list[Request]:
    """64 prompts of 2,048 tokens, one token out."""
    return [(_tokens(draw, 2048), 1) for _ in range(64)]


def prefix(draw: random.Random) -> list[Request]:
    """64 requests that share 2,048 tokens."""
    shared = _tokens(draw, 2048)
    return [(shared + _tokens(draw, 64), 32) for _ in range(64)]


WORKLOADS: dict[str, Callable[[random.Random], list[Request]]] = {
    one.__name__: one for one in (throughput, latency, decode64, prefill, prefix)
}


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def run(llm: Any, name: str, seed: int) -> dict[str, float]:
    """One run: seconds, and tokens per second each way."""
    from vllm_core import SamplingParams

    requests = WORKLOADS[name](random.Random(seed))
    temperature = 0.6 if name == "throughput" else 0.0
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count) for _, count in requests]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = sum(len(one.outputs[0].token_ids) for one in outputs)
    assert made == sum(count for _, count in requests), "every request has all its tokens"
    return {"seconds": seconds, "out_per_s": made / seconds, "in_per_s": sum(len(prompt) for prompt, _ in requests) / seconds}


def main() -> None:
    """Run the workloads and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--platform")
    parser.add_argument("--option", action="append", default=[], help="an engine option, NAME=JSON")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from vllm_core import LLM
    from vllm_core.registry import explain

    options = {name: json.loads(value) for name, _, value in (one.partition("=") for one in arguments.option)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(COMMON | SHAPES[arguments.shape]))
        fixed = {"load_format": "dummy", "dummy_bound": 1e-3, "skip_tokenizer_init": True, "dtype": "bfloat16"}
        limits = {"max_model_len": 4096, "device_memory_utilization": 0.85}
        llm = LLM(folder, platform=arguments.platform, **{**fixed, **limits, **options})
    start = time.perf_counter() - STARTED
    print(f"import to ready {start:.2f} s { ({name: round(value, 2) for name, value in llm.timings.items()}) }", flush=True)
    rows = []
    for name in arguments.workloads.split(","):
        first, *rest = [run(llm, name, seed) for seed in range(arguments.runs + 1)]
        median = {key: statistics.median(one[key] for one in rest) for key in first}
        spread = {key: (min(one[key] for one in rest), max(one[key] for one in rest)) for key in first}
        rows.append({"workload": name, "first": first, "median": median, "range": spread})
        low, high = spread["out_per_s"]
        print(
            f"{name}: {median['seconds']:.4f} s, {median['out_per_s']:.0f} out/s ({low:.0f} to {high:.0f}), "
            f"{median['in_per_s']:.0f} in/s; first {first['seconds']:.2f} s",
            flush=True,
        )
    if arguments.out is not None:
        plan = json.loads(explain.to_json(llm.plan))
        result = {"shape": arguments.shape, "start_s": start, "timings": dict(llm.timings), "rows": rows, "plan": plan}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
