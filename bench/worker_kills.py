"""How long an engine on two workers takes to report that one was killed, while it starts, captures its steps, and serves.

    python bench/worker_kills.py [--kills 1000] [--limit-s 3600] [--platform cpu] [--seed 0] [--log FILE ...] [--out FILE]

The model has one tiny layer: what is measured is the engine. A third of the kills comes at a random time of the start, a third
while the first request captures its steps, a third while requests are served. Each death must be reported with the worker's
rank and device and leave no process, and the next engine of this process must start; anything else ends the run with an error.
``--log`` keeps a line a death; a run goes on where its log ends, and further logs, of other runs, are only counted.
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
from collections import Counter
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
STAGES = ("start", "capture", "service")
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


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
    """Waits for a worker and for ``reached``, then for ``delay_s``, and kills the worker."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(daemon=True)
        self.delay_s, self.killed_at = delay_s, 0.0
        self.reached = threading.Event()

    def run(self) -> None:
        while not (found := workers()):
            time.sleep(0.05)
        self.reached.wait()
        time.sleep(self.delay_s)
        self.killed_at = time.perf_counter()
        os.kill(found[0], 9)


def spans(folder: str, options: dict[str, object]) -> dict[str, float]:
    """Seconds that each stage takes where nobody is killed."""
    begun = time.monotonic()
    with LLM(folder, **options) as llm:
        started = time.monotonic()
        llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        captured = time.monotonic()
    return {"start": started - begun, "capture": captured - started, "service": 0.5}


def one_death(folder: str, stage: str, delay_s: float, options: dict[str, object]) -> tuple[float, str]:
    """Seconds from the kill to the error, and the stage in which it came: a start may end before its kill."""
    killer = Killer(delay_s)
    killer.start()
    found = "start"
    if stage == found:
        killer.reached.set()
    try:
        with LLM(folder, **options) as llm:
            for found in ("capture", *["service"] * 1_000_000):
                if found == stage:
                    killer.reached.set()
                llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    except EngineDeadError as error:
        reported = time.perf_counter()
        killer.join()
        if "rank 1 of 2, device " not in error.on or "signal 9" not in error.found:
            raise AssertionError(f"reported as something else: {error}") from error
    left = workers()
    if left:
        raise AssertionError(f"processes left behind: {left}")
    return reported - killer.killed_at, found


def read(logs: list[Path], times: list[float], came: Counter[str], loads: list[float]) -> int:
    """Count the deaths that logs have; returns how many those are."""
    rows = [json.loads(line) for log in logs if log.exists() for line in log.read_text("utf-8").splitlines()]
    for seconds, stage, load in rows:
        times.append(seconds)
        came[stage] += 1
        loads.append(load)
    return len(rows)


def main() -> None:
    """Kill and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, nargs="+", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger("vllm_core").setLevel(logging.ERROR)
    chance, times, came, loads = random.Random(args.seed), list[float](), Counter[str](), list[float]()
    done = read(args.log[:1], times, came, loads)
    for _ in range(done):
        chance.random()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        options = {"platform": args.platform, "load_format": "dummy", "tensor_parallel_size": 2, "dtype": "float32"}
        options |= {"max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 20, "skip_tokenizer_init": True}
        usual = spans(folder, options)
        while len(times) < args.kills and time.monotonic() - begun < args.limit_s:
            stage = STAGES[len(times) % len(STAGES)]
            seconds, found = one_death(folder, stage, chance.random() * usual[stage], options)
            times.append(seconds)
            came[found] += 1
            loads.append(os.getloadavg()[0])
            if args.log:
                with args.log[0].open("a", encoding="utf-8") as log:
                    log.write(json.dumps([round(seconds, 4), found, round(loads[-1], 1)]) + "\n")
        LLM(folder, **options).shutdown()  # after the last death too
    read(args.log[1:], times, came, loads)
    times.sort()
    result = {
        "platform": args.platform,
        "machine": platform.machine(),
        "kills": len(times),
        "seed": args.seed,
        "load of the machine's cores": {
            "cores": os.cpu_count(),
            "median": round(statistics.median(loads), 1),
            "most": round(max(loads), 1),
        },
        "killed during": {stage: came[stage] for stage in STAGES},
        "seconds to the report": {
            "median": statistics.median(times),
            "p90": times[min(len(times) - 1, int(0.9 * len(times)))],
            "p99": times[min(len(times) - 1, int(0.99 * len(times)))],
            "largest": times[-1],
        },
        "reported with the worker's rank and device": len(times),
        "processes left behind": 0,
        "engines started after a death": len(times),
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
