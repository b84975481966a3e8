"""Greedy tokens of a model on a platform, and who served its ops; a line of JSON. For comparing platforms.

    python tools/tokens.py PLATFORM MODEL COUNT [OPTION=VALUE...] [-- OPTION=VALUE...]...

Options are the engine's, values in JSON where they are that. Each `--` begins those of another engine in the same process, and
another line. Without a tokenizer (`skip_tokenizer_init=true`) the prompts are numbers. Where an engine refuses, its line
has the error in four parts, and the exit status is 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPTS = ("The capital of France is", "Once upon a time there was a")
NUMBERS = ([7, 1, 2], [(7 * n) % 250 for n in range(33)])
SIZES = ("max_model_len=256", "max_num_seqs=4", "dtype=float32")
SMALL = (*SIZES, "skip_tokenizer_init=true", "kv_cache_memory_bytes=8388608", "max_num_batched_tokens=64")
"""For a model of a few layers without a tokenizer."""
LIMIT_S = 280


def tokens(platform: str, model: str, count: int, options: Sequence[str]) -> dict[str, Any]:
    """Tokens by prompt, the kinds of provider by op, and what was demoted. Raises VLLMCoreError."""
    from vllm_core import LLM, SamplingParams

    given = {name: value(text) for name, _, text in (item.partition("=") for item in options)}
    with LLM(model, platform=platform, **given) as llm:
        parameters = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        prompts: list[Any] = list(NUMBERS if given.get("skip_tokenizer_init") else PROMPTS)
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


def in_child(environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """This script with these arguments, or with ``-c`` and code, in a process of its own on another machine."""
    # The probe imports torch there, which takes long where much else runs.
    more = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "VLLM_CORE_PROBE_TIMEOUT_S": "120"}
    command = [sys.executable, *(arguments if arguments[0] == "-c" else (str(Path(__file__).resolve()), *arguments))]
    return subprocess.run(command, env={**environ, **more}, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def found_in_child(environ: Mapping[str, str], *arguments: str) -> Any:
    """What `in_child` printed last, as JSON. Raises AssertionError where it failed."""
    done = in_child(environ, *arguments)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(platform: str, model: str, count: str, *options: str) -> int:
    """Print a line for each engine; returns the exit status."""
    from vllm_core.errors import VLLMCoreError

    status, engines = 0, [list[str]()]
    for option in options:
        if option == "--":
            engines.append([])
        else:
            engines[-1].append(option)
    for engine in engines:
        try:
            print(json.dumps(tokens(platform, model, int(count), engine)), flush=True)
        except VLLMCoreError as error:
            status = 1
            print(json.dumps({"error": str(error)}), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
