"""What serving costs over the offline engine: the same requests through `LLM.generate` and as streams over HTTP.

    python bench/server_overhead.py [--model demo] [--requests 32] [--output-len 64] [--rounds 8] [--starts 3] [--out FILE]
    python bench/server_overhead.py --control

Both engines have the same options, processes of their own, and stay up for some rounds; then both are started anew, since where
a process happens to lie in memory makes it a little faster or slower for as long as it lives. A round runs the same requests on
both, one right after the other, and the next round the other way round, so that whatever else the machine does falls on both.
The figure is the median ratio of their times in a round, with the interval that holds the median with 95 % (resampled rounds).
``--control`` measures a second offline engine in the server's place: what it shows beside 1 is the noise of the machine.

The client is a plain socket reader in a process of its own: what it costs counts against the server. Beside the times stand the
steps that either engine took, and the seconds of processor time of the offline process, of the server's engine and of its HTTP
process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

Prompt = list[int]
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 200_000_000}
"""Of both engines."""


def prompts(count: int, length: int, seed: int) -> list[Prompt]:
    """Prompts of token ids that every vocabulary has; other ones in each round, so that no prefix is cached."""
    draw = random.Random(seed)
    return [[draw.randrange(250) for _ in range(length)] for _ in range(count)]


async def stream(port: int, prompt: Prompt, tokens: int) -> None:
    """One request over HTTP, read to its end. Raises RuntimeError where it is not answered whole."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    last = b""
    while part := await reader.read(1 << 16):
        last = (last + part)[-64:]
    writer.close()
    if b"data: [DONE]" not in last:
        raise RuntimeError(f"a stream ended with {last!r}")


async def serve_all(port: int, todo: list[Prompt], tokens: int) -> float:
    """Seconds for all requests at once over HTTP."""
    started = time.perf_counter()
    await asyncio.gather(*(stream(port, prompt, tokens) for prompt in todo))
    return time.perf_counter() - started


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(pid: int) -> int:
    """The engine's process: the server's only child."""
    (child,) = (pid for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split())
    return int(child)


class Served:
    """A server on a free port, and its engine."""

    steps = 0

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "vllm_core.cli.main", "serve", model, "--port", "0", "--disable-uvicorn-access-log"]
        flags = [text for name, value in OPTIONS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        self._process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert self._process.stderr is not None, "the pipe was asked for"
        lines = iter(self._process.stderr)
        self._port = next((int(found[1]) for line in lines if (found := re.search(r"listening on \S+:(\d+)", line))), None)
        if self._port is None:
            raise RuntimeError("the server did not start")
        threading.Thread(target=lambda: list(lines), daemon=True).start()  # a pipe that is full would stop the server
        self.pids = {"engine": engine_of(self._process.pid), "http": self._process.pid, "client": os.getpid()}

    def run(self, todo: list[Prompt], tokens: int) -> tuple[float, int]:
        """Seconds for all requests at once, and the engine's steps since its start."""
        assert self._port is not None, "it listens"
        seconds = asyncio.run(serve_all(self._port, todo, tokens))
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as answer:
            found = re.search(rb"^vllm:engine_steps_total\S* (\S+)", answer.read(), re.M)
        assert found is not None, "the engine counts its steps"
        return seconds, int(float(found[1]))

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


class Offline:
    """An offline engine in a process of its own, which `serve_offline` is."""

    steps = 0

    def __init__(self, model: str) -> None:
        command = [sys.executable, __file__, "--model", model, "--offline"]
        # Linux shares time between sessions: the server's engine has one of its own, and so has this.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.plan = self._answer()
        self.pids = {"offline": self._process.pid}

    def run(self, todo: list[Prompt], tokens: int) -> tuple[float, int]:
        """Seconds for all requests, and the engine's steps since its start."""
        assert self._process.stdin is not None, "the pipe was asked for"
        self._process.stdin.write(json.dumps([todo, tokens]) + "\n")
        self._process.stdin.flush()
        seconds, steps = self._answer()
        return seconds, steps

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "the pipe was asked for"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the offline engine ended")
        return json.loads(line)

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None, "the pipe was asked for"
        self._process.stdin.close()
        self._process.wait()


def serve_offline(model: str) -> None:
    """Write the Plan, then for each line of prompts and tokens the seconds that `LLM.generate` takes, and the steps so far."""
    from vllm_core import LLM, SamplingParams
    from vllm_core.registry import explain

    with LLM(model, **OPTIONS) as llm:
        print(json.dumps(json.loads(explain.to_json(llm.plan))), flush=True)
        for line in sys.stdin:
            todo, tokens = json.loads(line)
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            started = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in todo], params, use_tqdm=False)
            seconds = time.perf_counter() - started
            assert all(len(one.outputs[0].token_ids) == tokens for one in outputs), "every request has all its tokens"
            print(json.dumps([seconds, llm.get_metrics().steps]), flush=True)


def run_round(
    offline: Offline, served: Served | Offline, todo: list[Prompt], tokens: int, *, served_first: bool
) -> dict[str, Any]:
    """The same requests on both."""
    seconds, steps, cpu = {}, {}, {}
    for name in ("served", "offline") if served_first else ("offline", "served"):
        one = served if name == "served" else offline
        before = {process: cpu_s(pid) for process, pid in one.pids.items()}
        seconds[name], total = one.run(todo, tokens)
        steps[name], one.steps = total - one.steps, total
        cpu[name] = {process: cpu_s(pid) - before[process] for process, pid in one.pids.items()}
    of_server = sum(value for process, value in cpu["served"].items() if process != "client")
    return {
        "offline_s": seconds["offline"],
        "served_s": seconds["served"],
        "ratio": seconds["served"] / seconds["offline"],
        "steps": steps,
        "cpu_s": {"offline": cpu["offline"]["offline"], **({} if isinstance(served, Offline) else cpu["served"])},
        "cpu_ratio": of_server / cpu["offline"]["offline"],
    }


def shown(name: str, row: dict[str, Any]) -> str:
    """A round as a line."""
    cpu = ", ".join(f"{process} {seconds:.2f}" for process, seconds in row["cpu_s"].items())
    times = f"offline {row['offline_s']:.3f} s, served {row['served_s']:.3f} s, {row['ratio']:.3f}"
    steps = f"steps {row['steps']['offline']}, {row['steps']['served']}"
    return f"{name}: {times}; {steps}; processor seconds: {cpu}, {row['cpu_ratio']:.3f}"


def median_of(values: list[float]) -> dict[str, Any]:
    """Median and quartiles, and the interval of the median by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(4000))
    return {
        "median": statistics.median(values),
        "quartiles": statistics.quantiles(values, n=4) if len(values) > 1 else values * 3,
        "interval": [medians[99], medians[3899]],
    }


def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], Any]:
    """All rounds of all starts, and the Plan; the first round after a start warms up and is not counted."""
    rows: list[dict[str, Any]] = []
    for start in range(arguments.starts):
        offline = Offline(arguments.model)
        served = Offline(arguments.model) if arguments.control else Served(arguments.model)
        try:
            for number in range(arguments.rounds + 1):
                todo = prompts(arguments.requests, arguments.input_len, start * 1000 + number)
                row = run_round(offline, served, todo, arguments.output_len, served_first=bool((start + number) % 2))
                print(shown(f"{start + 1}.{number or 'first'}", row), flush=True)
                if number:
                    rows.append(row)
        finally:
            served.stop()
            offline.stop()
    return rows, offline.plan


def main() -> None:
    """Measure, print a line a round and the medians, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.offline:
        serve_offline(arguments.model)
        return
    rows, plan = measure(arguments)
    found = {"wall": median_of([row["ratio"] for row in rows]), "processor": median_of([row["cpu_ratio"] for row in rows])}
    for name, value in found.items():
        (low, high), median = value["interval"], value["median"]
        print(f"{name} time: median {median:.3f} of offline, {100 * (median - 1):+.1f} % (95 %: {low:.3f} to {high:.3f})")
    if arguments.out is not None:
        names = ("model", "requests", "input_len", "output_len", "rounds", "starts", "control")
        result = {**{name: getattr(arguments, name) for name in names}, **found, "rows": rows, "plan": plan}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
