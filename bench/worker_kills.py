"""How long an engine on two workers takes to report that one was killed, at random times of its start and service.

    python bench/worker_kills.py [--kills 1000] [--limit-s 3600] [--platform cpu] [--seed 0] [--out FILE]

The model has one tiny layer: what is measured is the engine.
Each death must be reported with the worker's rank and leave no process; anything else ends the run with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

from vllm_core import LLM, SamplingParams
from vllm_core.errors import EngineDeadError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SERVICE_S = 1.0
"""How long past the usual end of the start a kill may come."""


def workers() -> list[int]:
    """Processes that this one has started as workers and that still run."""
    found = []
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                is_worker = "worker_main" in Path(f"/proc/{child}/cmdline").read_text()
                if is_worker and Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(child))
    return found


class Killer(threading.Thread):
    """Waits for a worker, then for ``delay_s``, and kills it."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(daemon=True)
        self.delay_s, self.killed_at = delay_s, 0.0

    def run(self) -> None:
        while not (found := workers()):
            time.sleep(0.005)
        time.sleep(self.delay_s)
        self.killed_at = time.perf_counter()
        os.kill(found[0], 9)


def one_death(folder: str, delay_s: float, options: dict[str, object]) -> tuple[float, str]:
    """Seconds from the kill to the error, and the stage in which it came."""
    killer = Killer(delay_s)
    killer.start()
    stage = "start"
    try:
        with LLM(folder, **options) as llm:
            stage = "service"
            params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
            while True:
                llm.generate([[1, 2, 3]], params, use_tqdm=False)
    except EngineDeadError as error:
        reported = time.perf_counter()
        killer.join()
        if "rank 1 of 2" not in error.on or "signal 9" not in error.found:
            raise AssertionError(f"reported as something else: {error}") from error
    left = workers()
    if left:
        raise AssertionError(f"processes left behind: {left}")
    return reported - killer.killed_at, stage


def main() -> None:
    """Kill and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger("vllm_core").setLevel(logging.ERROR)
    chance, done = random.Random(args.seed), 0
    times: dict[str, list[float]] = {"start": [], "service": []}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        options = {"platform": args.platform, "load_format": "dummy", "tensor_parallel_size": 2, "dtype": "float32"}
        options |= {"max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 20, "skip_tokenizer_init": True}
        started = time.monotonic()
        LLM(folder, **options).shutdown()
        span = time.monotonic() - started + SERVICE_S
        while done < args.kills and time.monotonic() - begun < args.limit_s:
            seconds, stage = one_death(folder, chance.random() * span, options)
            times[stage].append(seconds)
            done += 1
    every = sorted([*times["start"], *times["service"]])
    result = {
        "platform": args.platform,
        "machine": platform.machine(),
        "kills": done,
        "seed": args.seed,
        "killed during": {stage: len(found) for stage, found in times.items()},
        "seconds to the report": {
            "median": statistics.median(every),
            "p99": every[min(len(every) - 1, int(0.99 * len(every)))],
            "largest": every[-1],
        },
        "reported with the worker's rank": done,
        "processes left behind": 0,
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
