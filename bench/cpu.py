"""The CPU platform against other engines on the same file, and its native kernels against its kernels on torch.

    python bench/cpu.py engines --model FILE.gguf [--peer llama=PYTHON] [--peer vllm=PYTHON] [--runs 5] [--out FILE]
    python bench/cpu.py ops [--runs 9] [--threads 2] [--out FILE]

A peer is a name and the Python of the environment that it is installed in: `llama` is llama-cpp-python, `vllm` is vLLM's CPU
build, which takes a Hugging Face model or folder instead of the file (--peer-model vllm=NAME). Every engine is loaded once and
waits in a process of its own; each round asks each of them in turn, so that what else the machine does falls on all alike.
Medians with the range; ratios are taken within a run. `first token` is a whole new process, its first byte of text awaited.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

CHILD = Path(__file__).with_name("cpu_child.py")
WORKLOADS = ("decode", "prefill", "batch")
OURS = "ours"


class Engine:
    """A child that holds a loaded engine and answers with a line of JSON."""

    def __init__(self, name: str, python: str, model: str, threads: int) -> None:
        self.name, self._command = name, [python, str(CHILD), name, model, str(threads)]
        self._environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environ
        )
        self.ready = self._answer()

    def ask(self, workload: str) -> dict[str, Any]:
        """One measurement."""
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None, "the pipe was asked for"
        print(workload, file=pipe, flush=True)
        return self._answer()

    def first_token(self) -> float:
        """Seconds from the start of a new process to its first byte of text."""
        command = [*self._command, "first"]
        if self.name == OURS:
            command = [self._command[0], "-m", "vllm_core.cli.main", "generate", "--model", self._command[3]]
            command += ["--prompt", "The capital of France is", "--max-tokens", "2", "--temperature", "0"]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self._environ) as process:
            assert process.stdout is not None, "the pipe was asked for"
            process.stdout.read(1)
            seconds = time.perf_counter() - started
            process.stdout.read()
        return seconds

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "the pipe was asked for"
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        sys.exit(f"{self.name} ended with status {self._process.wait()}: {' '.join(self._command)}")


def engines(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all engines in turns."""
    peers = dict(one.split("=", 1) for one in arguments.peer)
    models = dict(one.split("=", 1) for one in arguments.peer_model)
    running = [Engine(OURS, sys.executable, arguments.model, arguments.threads)]
    running += [Engine(name, python, models.get(name, arguments.model), arguments.threads) for name, python in peers.items()]
    samples: dict[str, dict[str, list[float]]] = {one.name: {} for one in running}
    for number in range(arguments.runs + 1):
        for workload in arguments.workloads.split(","):
            for one in running:
                answer = {"first token": one.first_token()} if workload == "first" else one.ask(workload)
                for key, value in answer.items():
                    if number:  # the first round warms up
                        samples[one.name].setdefault(key, []).append(value)
    for name, found in samples.items():
        for key, values in found.items():
            ratio = statistics.median(samples[OURS][key]) / statistics.median(values) if key in samples[OURS] else float("nan")
            print(f"{name:8} {key:24} {_figure(values)}   ours / this: {ratio:.2f}", flush=True)
    return {"engines": samples, "details": {one.name: one.ready for one in running}}


def _figure(values: list[float]) -> str:
    return f"{statistics.median(values):10.2f} ({min(values):.2f} to {max(values):.2f})"


def ops(arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per call of each op: the native library and the kernels that serve without it, in turns."""
    from cpu_ops import compare

    rows = compare(arguments.runs, arguments.threads)
    print(f"{'op':24} {'shape':26} {'native us':>10} {'torch us':>10} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['op']:24} {row['shape']:26} {row['native']:10.1f} {row['other']:10.1f} {row['other'] / row['native']:7.2f}"
        )
    return {"ops": rows}


def main() -> None:
    """Measure, print, and write a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("engines", "ops"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--peer-model", action="append", default=[], metavar="NAME=MODEL")
    parser.add_argument("--workloads", default=",".join((*WORKLOADS, "first")))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = engines(arguments) if arguments.what == "engines" else ops(arguments)
    if arguments.out is not None:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
        arguments.out.write_text(json.dumps(machine | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
