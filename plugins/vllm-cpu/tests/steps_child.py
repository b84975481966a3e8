"""Engines of random weights, eager and with recorded steps: a child of the tests, for each has one native library.

The last line on stdout is JSON: tokens and log-probabilities of both; of each recording, by rows and features, the runs of a
replay, how many of its calls are the library's, and how many it has; and what differs in two recordings of one step.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_core import LLM, SamplingParams
from vllm_cpu.recording import NativeCall

FIRST_ADDRESS, LAST_ADDRESS = 1 << 40, 1 << 48
"""Where a process has its memory; no count or stride is as large."""

SAMPLING = (
    {"temperature": 0.0, "max_tokens": 9},
    {"temperature": 0.9, "seed": 5, "max_tokens": 7},
    {"temperature": 0.8, "seed": 6, "top_k": 9, "top_p": 0.9, "max_tokens": 8},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {7: 0.05}, "min_tokens": 3, "max_tokens": 9},
    {"temperature": 0.0, "logprobs": 3, "max_tokens": 6},
)


def outputs(llm: LLM) -> list[Any]:
    """What every kind of sampling gives alone and beside others, as requests come and go."""
    found = []
    for number, given in enumerate(SAMPLING):
        params = SamplingParams(ignore_eos=True, **given)
        prompts = [{"prompt_token_ids": [(17 * row + 5 * n + number) % 200 for n in range(3 + 11 * row)]} for row in range(3)]
        for made in llm.generate(prompts, params, use_tqdm=False):
            one = made.outputs[0]
            likely = [sorted((token, item.logprob) for token, item in step.items()) for step in one.logprobs or ()]
            found.append([list(one.token_ids), likely])
    mixed = [SamplingParams(ignore_eos=True, **given) for given in SAMPLING]
    prompts = [{"prompt_token_ids": [3 + n, 9, 2 * n]} for n in range(len(mixed))]
    found += [list(one.outputs[0].token_ids) for one in llm.generate(prompts, mixed, use_tqdm=False)]
    return found


def numbers(graph: Any) -> list[tuple[str, list[int]]]:
    """What each call of the library is given, in words of eight bytes; addresses, which may differ, as 0."""
    found = []
    for call in graph.calls:
        packed = call.packed if isinstance(call, NativeCall) else b""
        words = struct.unpack(f"{len(packed) // 8}Q", packed)
        found.append((call.op, [0 if FIRST_ADDRESS <= word < LAST_ADDRESS else word for word in words]))
    return found


def changed(steps: Any, between: Callable[[], object]) -> list[str]:
    """Ops of a step of two rows that are given other numbers when it is recorded again, after other sequences than before."""
    first = steps._capture(2, 0)[0]
    between()
    second = steps._capture(2, 0)[0]
    return [op for (op, one), (_, other) in zip(numbers(first), numbers(second), strict=True) if one != other]


def main(model: str, options: dict[str, Any]) -> None:
    """Run both and print."""
    common = {"load_format": "dummy", "max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22, "seed": 1}
    eager = outputs(LLM(model, platform="cpu", skip_tokenizer_init=True, enforce_eager=True, **common, **options))
    llm = LLM(model, platform="cpu", skip_tokenizer_init=True, **common, **options)
    recorded = outputs(llm)
    steps = llm._core.program.captured
    graphs = {
        f"{size}/{features}": [graph.runs, sum(isinstance(call, NativeCall) for call in graph.calls), len(graph.calls)]
        for (size, features), (graph, *_) in steps._graphs.items()
    }
    again = changed(steps, lambda: outputs(llm)) if graphs else []
    print(json.dumps({"changed": again, "eager": eager, "recorded": recorded, "graphs": graphs, "failure": steps.failure}))


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), json.loads(sys.argv[2]))
