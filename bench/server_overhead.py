"""What serving costs over the offline engine: the same requests through `LLM.generate` and as streams over HTTP.

    python bench/server_overhead.py [--model demo] [--requests 32] [--output-len 64] [--rounds 16] [--out FILE]

Both engines have the same options and stay up. A round runs the same requests on both, one right after the other, and the next
round the other way round, so that whatever else the machine does falls on both. The figure is the ratio of their times in a
round, and its median over the rounds. The client is a plain socket reader in this process: what it costs counts against the
server. Beside it stand the seconds of processor time of the offline process, of the server's engine and of its HTTP process,
which a busy machine disturbs less; the median of their ratios too leaves the client out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Prompt = list[int]


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


def generate_all(llm: Any, todo: list[Prompt], tokens: int) -> float:
    """Seconds for the same requests offline."""
    from vllm_core import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in todo], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert all(len(one.outputs[0].token_ids) == tokens for one in outputs), "every request has all its tokens"
    return seconds


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(pid: int) -> int:
    """The engine's process: the server's only child."""
    (child,) = (pid for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split())
    return int(child)


def start_server(model: str, options: list[str]) -> tuple[subprocess.Popen[str], int]:
    """A server on a free port. Raises RuntimeError where it does not start."""
    command = [sys.executable, "-m", "vllm_core.cli.main", "serve", model, "--port", "0", "--disable-uvicorn-access-log"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None, "the pipe was asked for"
    for line in process.stderr:
        found = re.search(r"listening on \S+:(\d+)", line)
        if found:
            return process, int(found[1])
    raise RuntimeError("the server did not start")


def run_round(llm: Any, port: int, pids: list[int], todo: list[Prompt], tokens: int, *, served_first: bool) -> dict[str, Any]:
    """The same requests on both; ``pids`` are this process, the server's engine and the server."""
    seconds = {}
    for kind in ("served", "offline") if served_first else ("offline", "served"):
        before = [cpu_s(pid) for pid in pids]
        if kind == "offline":
            seconds[kind] = generate_all(llm, todo, tokens)
            offline_cpu = cpu_s(pids[0]) - before[0]
        else:
            seconds[kind] = asyncio.run(serve_all(port, todo, tokens))
            client, engine, http = (cpu_s(pid) - was for pid, was in zip(pids, before, strict=True))
    return {
        "offline_s": seconds["offline"],
        "served_s": seconds["served"],
        "ratio": seconds["served"] / seconds["offline"],
        "cpu_s": {"offline": offline_cpu, "engine": engine, "http": http, "client": client},
        "cpu_ratio": (engine + http) / offline_cpu,
    }


def shown(number: int, row: dict[str, Any]) -> str:
    """A round as a line."""
    cpu = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["cpu_s"].items())
    times = f"offline {row['offline_s']:.3f} s, served {row['served_s']:.3f} s, {row['ratio']:.3f}"
    return f"{number or 'first'}: {times}; processor seconds: {cpu}, {row['cpu_ratio']:.3f}"


def quartiles(values: Iterable[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4)


def main() -> None:
    """Alternate, print a line a round and the median, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from vllm_core import LLM
    from vllm_core.registry import explain

    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()  # Linux shares time between sessions: the engine process has one of its own, and so has the offline engine
    flags = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "200000000"]
    process, port = start_server(arguments.model, flags)
    llm = LLM(arguments.model, max_model_len=1024, kv_cache_memory_bytes=200_000_000)
    pids = [os.getpid(), engine_of(process.pid), process.pid]
    rows: list[dict[str, Any]] = []
    try:
        for number in range(arguments.rounds + 1):
            todo = prompts(arguments.requests, arguments.input_len, number)
            row = run_round(llm, port, pids, todo, arguments.output_len, served_first=bool(number % 2))
            print(shown(number, row), flush=True)
            if number:  # the first one warms up
                rows.append(row)
    finally:
        process.terminate()
        process.wait()
    wall, cpu = quartiles(row["ratio"] for row in rows), quartiles(row["cpu_ratio"] for row in rows)
    for name, (low, median, high) in (("wall", wall), ("processor", cpu)):
        print(f"{name} time: median {median:.3f} of offline (quartiles {low:.3f}, {high:.3f}), {100 * (median - 1):+.1f} %")
    if arguments.out is not None:
        facts = {name: getattr(arguments, name) for name in ("model", "requests", "input_len", "output_len")}
        ratios = {"wall_quartiles": wall, "processor_quartiles": cpu}
        result = {**facts, **ratios, "rows": rows, "plan": json.loads(explain.to_json(llm.plan))}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    llm.shutdown()


if __name__ == "__main__":
    main()
