"""What serving costs over the offline engine: the same requests through `LLM.generate` and as streams over HTTP.

    python bench/server_overhead.py [--model demo] [--requests 32] [--output-len 64] [--rounds 5] [--out FILE]

Both engines have the same options and stay up; rounds alternate between them, so that whatever else the machine does falls on
both. The figure is the ratio of their times in a round, and its median over the rounds. The client is a plain socket reader in
this process: what it costs counts against the server. On a machine that does other things too, look at the seconds of processor
time beside it: those of the offline process, of the server's engine, and of the server's HTTP process.
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
import time
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
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None, "the pipe was asked for"
    for line in process.stderr:
        found = re.search(r"listening on \S+:(\d+)", line)
        if found:
            return process, int(found[1])
    raise RuntimeError("the server did not start")


def main() -> None:
    """Alternate, print a line a round and the median, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from vllm_core import LLM
    from vllm_core.registry import explain

    flags = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "200000000"]
    process, port = start_server(arguments.model, flags)
    llm = LLM(arguments.model, max_model_len=1024, kv_cache_memory_bytes=200_000_000)
    pids = [os.getpid(), engine_of(process.pid), process.pid]
    rows: list[dict[str, Any]] = []
    try:
        for number in range(arguments.rounds + 1):
            todo = prompts(arguments.requests, arguments.input_len, number)
            before = [cpu_s(pid) for pid in pids]
            offline = generate_all(llm, todo, arguments.output_len)
            between = cpu_s(pids[0])
            served = asyncio.run(serve_all(port, todo, arguments.output_len))
            cpu = [between - before[0], *(cpu_s(pid) - was for pid, was in zip(pids[1:], before[1:], strict=True))]
            shown = f"processor: offline {cpu[0]:.2f} s, engine {cpu[1]:.2f} s, HTTP {cpu[2]:.2f} s"
            print(
                f"{number or 'first'}: offline {offline:.3f} s, served {served:.3f} s, {served / offline:.3f}; {shown}",
                flush=True,
            )
            if number:  # the first one warms up
                rows.append({"offline_s": offline, "served_s": served, "ratio": served / offline, "cpu_s": cpu})
    finally:
        process.terminate()
        process.wait()
    median = statistics.median(row["ratio"] for row in rows)
    print(f"median ratio {median:.3f}: serving costs {100 * (median - 1):.1f} %")
    if arguments.out is not None:
        facts = {name: getattr(arguments, name) for name in ("model", "requests", "input_len", "output_len")}
        result = {**facts, "median_ratio": median, "rows": rows, "plan": json.loads(explain.to_json(llm.plan))}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    llm.shutdown()


if __name__ == "__main__":
    main()
