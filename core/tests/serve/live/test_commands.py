"""The commands that talk to a running server: `ps`, `top`, `chat`, `bench serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def command(served: Any, start: Any) -> Any:
    cache = next(v for k, v in (part.split("=", 1) for part in environment(served.process.pid)) if k == "VLLM_CORE_CACHE")

    def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k != "VLLM_CORE_API_KEY"} | {"VLLM_CORE_CACHE": cache}
        program = [sys.executable, "-m", "vllm_core.cli.main", *argv]
        return subprocess.run(program, input=stdin, capture_output=True, text=True, check=False, timeout=120, env=env)

    return run


def environment(pid: int) -> list[str]:
    return [part for part in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in part]


def test_ps_lists_the_server_and_top_shows_it(served: Any, command: Any) -> None:
    (one,) = [row for row in json.loads(command("ps", "--json").stdout) if row["address"] == served.url]
    assert (one["pid"], one["state"], one["platform"]["platform"]) == (served.process.pid, "ready", "cpu")
    done = command("top", "--once", "--interval-s", "0.1", "--url", served.url)
    assert done.returncode == 0, done.stderr
    assert "0 running, 0 waiting" in done.stdout
    assert "ready" in command("ps").stdout


def test_a_server_that_is_not_there_is_an_error_with_a_fix(command: Any) -> None:
    for argv in (("top", "--url", "http://127.0.0.1:9"), ("chat", "--url", "http://127.0.0.1:9")):
        done = command(*argv, stdin="hello\n")
        assert done.returncode == 2
        assert "Server does not answer" in done.stderr
        assert "Traceback" not in done.stderr


def test_bench_serve_measures_and_writes_a_result(served: Any, command: Any, tmp_path: Path) -> None:
    load = ("--num-prompts", "20", "--request-rate", "100", "--burstiness", "0.5", "--random-output-len", "8")
    where = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--base-url", served.url)
    done = command("bench", "serve", *load, *where)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (20, 0, 160)
    assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"]
    assert "time to first token" in done.stdout


@pytest.mark.model
def test_chat_talks_to_a_server_and_remembers(start: Any, command: Any, model_file: Any) -> None:
    model = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    with start(
        "--load-format", "auto", "--max-model-len", "256", "--kv-cache-memory-bytes", "100000000", model=model
    ) as server:
        said = "What is the capital of France?\nSay that again.\n"
        done = command("chat", "--url", server.url, "--temperature", "0", "--max-tokens", "8", stdin=said)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout.splitlines()[0]
    assert len(done.stdout.splitlines()) >= 2
