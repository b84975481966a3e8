"""Thousands of random requests, some of them cancelled, through one engine: nothing may be left. Then graphs against eager.

    python bench/random_requests.py --model qwen3-0.6b [--platform cuda] [--requests 10000] [--option NAME=JSON]

Prompts of 1 to 700 tokens, a fifth of which share a beginning, 1 to 40 tokens out, greedy, drawn, filtered, with penalties,
biases and log-probabilities; a step in four cancels up to 12 requests, waiting or running. At the end no request may be there
and every KV block must be free. Then 102 requests are generated with captured steps and without, where the device captures
any, and their greedy tokens compared. Exit status 1 where something is left.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_core import launch
from vllm_core.bench.workloads import SHAPES, engine_options
from vllm_core.engine.messages import EngineRequest
from vllm_core.sampling_params import SamplingParams

WAITING = 600
"""Requests that are there at a time: more than run at once."""

WORDS = 9000
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.9, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.5, "logit_bias": {5: 2.0}},
    {"temperature": 0.0, "logprobs": 2, "min_tokens": 1},
)


def request(name: str, prompt: list[int], count: int, seed: int, **params: Any) -> EngineRequest:
    """A request for ``count`` tokens."""
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        arrival_time=time.time(),
        params=SamplingParams(**params),
        seed=seed,
        max_tokens=count,
    )


def tokens(draw: random.Random, count: int) -> list[int]:
    """Random ones."""
    return [draw.randrange(WORDS) for _ in range(count)]


def run(core: Any, total: int, seed: int) -> dict[str, Any]:
    """Run ``total`` random requests to their end; what became of them, and what the engine still holds."""
    draw, started = random.Random(seed), time.perf_counter()
    shared = [tokens(draw, count) for count in (64, 200, 500)]
    alive: dict[str, None] = {}
    made = cancelled = steps = 0
    ended: dict[str, int] = {}
    while made < total or core.has_work:
        while made < total and len(alive) < WAITING:
            prompt = tokens(draw, draw.choice((draw.randint(1, 40), draw.randint(1, 300), draw.randint(1, 700))))
            if draw.random() < 0.2:
                prompt = draw.choice(shared) + prompt[:200]
            count = draw.choice((1, draw.randint(1, 8), draw.randint(1, 40)))
            core.add(request(str(made), prompt, count, made, **draw.choice(PARAMS)))
            alive[str(made)] = None
            made += 1
        if draw.random() < 0.25 and alive:
            gone = draw.sample(list(alive), min(len(alive), draw.randint(1, 12)))
            core.abort(gone)
            cancelled += len(gone)
            for name in gone:
                del alive[name]
        for update in core.step():
            if update.finish_reason is not None:
                ended[update.finish_reason] = ended.get(update.finish_reason, 0) + 1
                alive.pop(update.request_id, None)
        steps += 1
    stats = core.stats()
    left = {"alive": len(alive), "running": stats.running, "waiting": stats.waiting, "kv_usage": stats.kv_usage}
    left["blocks held by no request"] = int(not core.reset_prefix_cache())
    seconds = round(time.perf_counter() - started, 1)
    numbers = {"requests": made, "cancelled": cancelled, "ended": ended, "steps": steps, "preemptions": stats.preemptions}
    return {**numbers, "prefix_hits": stats.prefix_hits, "seconds": seconds, "left": left}


def greedy(core: Any, counts: tuple[int, ...], seed: int) -> list[list[int]]:
    """Tokens of that many requests at once, one number after the other."""
    draw = random.Random(seed)
    prompts = [tokens(draw, draw.randint(5, 200)) for _ in range(max(counts))]
    found: list[list[int]] = []
    for count in counts:
        made: dict[str, list[int]] = {str(i): [] for i in range(count)}
        for i in range(count):
            core.add(request(str(i), prompts[i], 24, 0, temperature=0.0))
        while core.has_work:
            for update in core.step():
                made[update.request_id] += update.token_ids
        found += made.values()
    return found


def main() -> int:
    """Run, print a line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help=f"folder, GGUF file, 'demo', or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--platform")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--option", action="append", default=[], help="an engine option, NAME=JSON")
    arguments = parser.parse_args()
    given = {name: json.loads(value) for name, _, value in (one.partition("=") for one in arguments.option)}
    with tempfile.TemporaryDirectory() as folder:
        base = {"max_model_len": 1024, "kv_cache_memory_bytes": 3 << 30, "platform": arguments.platform, **given}
        options = engine_options(arguments.model, base, Path(folder))
        engine = launch.assemble(launch.blueprint(options))
        found = run(engine.core, arguments.requests, arguments.seed)
        print(json.dumps(found), flush=True)
        captures = engine.device.supports_graphs and engine.blueprint.plan.graphs
        engine.close()
        if captures:
            both = []
            for eager in (False, True):
                bound = {"dummy_bound": 0.05} if arguments.model in SHAPES else {}
                engine = launch.assemble(launch.blueprint({**options, **bound, "enforce_eager": eager}))
                both.append(greedy(engine.core, (64, 37, 1), arguments.seed))
                engine.close()
            equal = sum(a == b for a, b in zip(*both, strict=True))
            print(json.dumps({"captured and eager": len(both[0]), "equal tokens": equal}), flush=True)
    return int(any(found["left"].values()))


if __name__ == "__main__":
    sys.exit(main())
