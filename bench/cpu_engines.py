"""Engines of `cpu.py peers`: who takes part, a process for each, and the rounds in which all are asked in turn."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cpu_models import MODELS, Models

CHILD = Path(__file__).with_name("cpu_child.py")
SLOWER = 1.5
"""A mode of a peer that its other mode beats by this factor in the first round is not asked for that workload again, and for
what the first round leaves out neither, if it was so with the prompt."""

KV_TOKENS = 8192 + 512
"""Of 32 requests of 128 tokens in and 128 out, and half a thousand more."""

LEFT_OUT = ("batch", "first")
"""Workloads that the first round, which warms up, does without."""


@dataclass(frozen=True)
class Entry:
    """One engine on one model. ``what`` is the model's name; ``workloads`` None: all."""

    kind: str
    what: str
    mode: str
    python: str
    model: str
    weight_bytes: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    workloads: frozenset[str] | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind} {self.what}, {self.mode}"


def lineup(arguments: argparse.Namespace, models: Models) -> list[Entry]:
    """Our engine in its modes and llama.cpp on every file; vLLM once for all files of a checkpoint."""
    entries: list[Entry] = []
    folders: set[str] = set()
    for what in arguments.what.split(","):
        file, size = models.file(what), models.file(what).stat().st_size
        for number, mode in enumerate(arguments.modes.split(",")):
            some = None if number == 0 else frozenset({"decode", "prefill"})
            # As llama.cpp has it: float16, and room for all that runs at once.
            room = {"kv_cache_dtype": "float16", "kv_cache_memory_bytes": KV_TOKENS * MODELS[what].kv_numbers * 2}
            entries.append(Entry("ours", what, mode, sys.executable, str(file), size, _choices(mode) | room, some))
        if arguments.llama:
            entries.append(Entry("llama", what, "its own", arguments.llama, str(file), size))
        checkpoint = MODELS[what].checkpoint
        if arguments.vllm and checkpoint not in folders:
            folders.add(checkpoint)
            some = frozenset(("decode", "prefill", "batch")) if MODELS[what].dummy else None
            for mode in ("float32", "bfloat16"):
                options = {"dtype": mode} | ({"load_format": "dummy"} if MODELS[what].dummy else {})
                folder = str(models.folder_of(checkpoint, mode))
                entries.append(Entry("vllm", checkpoint, mode, arguments.vllm, folder, 0, options, some))
    return entries


def _choices(mode: str) -> dict[str, Any]:
    """Our engine's options in a mode: how inputs of products are rounded, and, after a plus, the model's dtype."""
    activation, _, dtype = mode.partition("+")
    return {"activation": activation} | ({"dtype": dtype} if dtype else {})


class Engine:
    """A child that holds a loaded engine and answers with a line of JSON."""

    def __init__(self, entry: Entry, threads: int, batch_out: int) -> None:
        self.entry, self.samples = entry, dict[str, list[float]]()
        self._skipped: set[str] = set()
        options = json.dumps(entry.options)
        self._command = [entry.python, str(CHILD), entry.kind, entry.model, str(threads), options, str(batch_out)]
        self._environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
        print(f"loading {entry.name}", file=sys.stderr, flush=True)
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environ
        )
        self._answer()

    def takes(self, workload: str) -> bool:
        """Whether it takes part in a workload."""
        return workload not in self._skipped and (self.entry.workloads is None or workload in self.entry.workloads)

    def skip(self, workload: str) -> None:
        """Leave a workload out from now on."""
        self._skipped.add(workload)

    def ask(self, workload: str) -> dict[str, Any]:
        """One measurement."""
        if workload == "first":
            return {"first token s": self._first_token()}
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None, "the pipe was asked for"
        print(workload, file=pipe, flush=True)
        return self._answer()

    def summary(self) -> dict[str, Any]:
        """Who it was, and all samples."""
        entry = self.entry
        who = {"kind": entry.kind, "what": entry.what, "mode": entry.mode, "weight bytes": entry.weight_bytes}
        return who | {"samples": self.samples, "left out after the first round": sorted(self._skipped)}

    def close(self) -> None:
        """End the process: its input ends."""
        assert self._process.stdin is not None, "the pipe was asked for"
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _first_token(self) -> float:
        """Seconds from the start of a new process to its first byte of text."""
        command = [*self._command, "first"]
        if self.entry.kind == "ours":
            command = [self._command[0], "-m", "vllm_core.cli.main", "generate", "--model", self.entry.model]
            command += ["--prompt", "The capital of France is", "--max-tokens", "2", "--temperature", "0"]
            for option, value in _choices(self.entry.mode).items():
                command += [f"--{option}", value]
        # What is installed has been compiled; a checkout is compiled by the first round, unless it may not be kept.
        environ = {name: value for name, value in self._environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as process:
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
        sys.exit(f"{self.entry.name} ended with status {self._process.wait()}: {' '.join(self._command)}")


def read_bandwidth(threads: int) -> float:
    """GB/s, in a process of its own: no engine's memory is counted with it."""
    command = [sys.executable, str(CHILD), "bandwidth", "", str(threads), "{}", "1"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(json.loads(answer)["read GB/s"])


def measure(engines: list[Engine], runs: int, workloads: list[str]) -> None:
    """All workloads in turns; what the first round shows to be a peer's slower mode is left out of the others."""
    first: dict[tuple[str, str, str], dict[Engine, float]] = {}
    for workload in (one for one in workloads if one not in LEFT_OUT):
        for engine in engines:
            if engine.takes(workload):
                rate = next(value for key, value in engine.ask(workload).items() if "tokens/s" in key)
                first.setdefault((engine.entry.kind, engine.entry.what, workload), {})[engine] = rate
    for (kind, _, workload), rates in first.items():
        for engine, rate in rates.items():
            if kind != "ours" and rate * SLOWER < max(rates.values()):
                for one in (workload, *LEFT_OUT) if workload == "prefill" else (workload,):
                    engine.skip(one)
    for number in range(1, runs + 1):
        for workload in workloads:
            for engine in engines:
                if engine.takes(workload):
                    for key, value in engine.ask(workload).items():
                        engine.samples.setdefault(key, []).append(value)
        print(f"round {number} of {runs}: {_line(engines)}", file=sys.stderr, flush=True)


def _line(engines: list[Engine]) -> str:
    parts = []
    for engine in engines:
        figures = ", ".join(f"{key} {statistics.median(values):.1f}" for key, values in engine.samples.items())
        parts.append(f"{engine.entry.name}: {figures}")
    return "; ".join(parts)
