"""The result file: what ran, on what, what came out, and the evidence that it was right. JSON, one schema version.

Raw figures are kept beside their summary, because `compare` computes everything again from them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from vllm_core.bench.workloads import Workload
from vllm_core.errors import ConfigError
from vllm_core.registry.cache import write_atomic
from vllm_core.registry.plan import Plan

SCHEMA = 1
MAX_FILE_BYTES = 256 * 2**20
STAGES = ("queue", "prefill", "decode")
PERCENTILES = (50, 90, 99)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload: its tokens, its wall time, and of each request the seconds in each stage."""

    seed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    queue_s: list[float]
    prefill_s: list[float]
    decode_s: list[float]

    @property
    def out_per_s(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def in_per_s(self) -> float:
        """Prompt tokens per second, those found in the prefix cache included."""
        return self.prompt_tokens / self.seconds


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of the counted runs: medians and ranges, and medians of the percentiles over each run's requests, in seconds."""

    seconds: float
    out_per_s: float
    in_per_s: float
    range: dict[str, tuple[float, float]]
    latency_s: dict[str, dict[str, float]]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One workload. The first run is apart: it captures steps and compiles what the kernel cache does not hold."""

    workload: Workload
    first: Run
    runs: list[Run]
    summary: Summary | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence as it was generated. `top` has at each position the likeliest tokens with their log-probabilities.

    `prompt_logprobs` are those of the prompt's tokens after the first, where they were asked for.
    """

    prompt: list[int]
    temperature: float
    seed: int
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    prompt_logprobs: list[float] = []


class Longest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that leaves room for a few tokens of the engine's context; drawn from `seed`, too long to be kept."""

    seed: int
    prompt_tokens: int
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a grammar asked for, as the model wrote it; or why none was made."""

    text: str = ""
    missing: str = ""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was generated at fixed seeds: each request alone, all at once, the longest context, a tool call.

    `digest` is over all tokens. No verdict is stored.
    """

    alone: list[Sample]
    together: list[Sample]
    longest: Longest
    tool_call: ToolCall
    digest: str


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes: the device's allocations by pool after the runs, their peak, and the peak of this process in the host's memory."""

    pools: dict[str, int]
    peak_bytes: int
    host_peak_bytes: int

    @property
    def beside_kv_bytes(self) -> int:
        """Peak without the KV cache, which takes what it is given."""
        return self.peak_bytes - self.pools.get("kv", 0)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Which model: `config` and `weights` are digests, of the weights' names and sizes; those of dummy ones say how drawn."""

    name: str
    architecture: str
    config: str
    weights: str
    dummy: bool
    formats: dict[str, int] = {}


class Git(msgspec.Struct, frozen=True, kw_only=True):
    """The checkout that core runs from."""

    commit: str
    changed: bool


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran. `variables` are those that change how; `versions` are all installed distributions."""

    created: str
    python: str
    system: str
    machine: str
    cores: int
    git: Git | None
    variables: dict[str, str]
    versions: dict[str, str]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start in a process of its own. Seconds from the process's start, unless they are a stage.

    `accepts_s`: requests are accepted. `tokens` are (seconds, tokens so far) of `throughput`, run at once, and `steady` of a
    second run. `full_speed_s` is when a tenth of the first run's tokens came at 80 % of the rate of the same tenth of the
    second; None where none did.
    """

    stages: dict[str, float]
    accepts_s: float
    first_token_s: float
    full_speed_s: float | None
    first_share: float
    tokens: list[tuple[float, int]]
    steady: list[tuple[float, int]]


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """Starts with an empty cache of compiled kernels and with a full one, and what the light commands cost."""

    workload: Workload
    cold: Start
    cached: list[Start]
    light: dict[str, list[float]]
    modules: dict[str, int]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One result file; latency and throughput have rows, memory and evidence, startup has `startup`."""

    schema: int = SCHEMA
    kind: Literal["latency", "throughput", "startup"]
    model: ModelFacts
    environment: Environment
    plan: Plan
    config: dict[str, dict[str, Any]]
    max_model_len: int
    timings: dict[str, float] = {}
    prefix_cache: Literal["kept", "reset"] = "kept"
    rows: list[Row] = []
    memory: Memory | None = None
    evidence: Evidence | None = None
    startup: Startup | None = None


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What a process that was started to be measured reports: its start, and the rest of the file."""

    start: Start
    result: Result


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` percent of them do not exceed, interpolated between the two nearest."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * share / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def stage_percentile(runs: Sequence[Run], stage: str, share: float) -> float:
    """Seconds in a stage: the percentile over a run's requests, and of that the median over the runs."""
    return statistics.median(percentile(getattr(run, f"{stage}_s"), share) for run in runs)


def summarize(runs: Sequence[Run]) -> Summary:
    """Medians, ranges and percentiles of counted runs."""
    figures = {name: [getattr(run, name) for run in runs] for name in ("seconds", "out_per_s", "in_per_s")}
    return Summary(
        **{name: statistics.median(values) for name, values in figures.items()},
        range={name: (min(values), max(values)) for name, values in figures.items()},
        latency_s={stage: {f"p{share}": stage_percentile(runs, stage, share) for share in PERCENTILES} for stage in STAGES},
    )


def row_of(workload: Workload, first: Run, runs: list[Run]) -> Row:
    """A row with its summary."""
    return Row(workload=workload, first=first, runs=runs, summary=summarize(runs))


def to_json(result: Result) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def write(result: Result, path: Path) -> None:
    """Write whole or not at all. Raises OSError."""
    write_atomic(path, to_json(result))


def read(path: Path) -> Result:
    """Read a result file. Raises ConfigError for one that is none, is too large or of another schema."""
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error
    if size > MAX_FILE_BYTES:
        raise _unreadable(path, f"{size} bytes")
    try:
        head = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from error
    schema = head.get("schema") if isinstance(head, dict) else None
    if schema != SCHEMA:
        raise _unreadable(path, "no result file" if schema is None else f"schema {schema!r}")
    try:
        return msgspec.json.decode(data, type=Result)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, found: str) -> ConfigError:
    return ConfigError(
        "Result file cannot be read",
        on=str(path),
        found=found,
        expected=f"what `vllm-core bench latency` or `throughput` wrote with --out, schema {SCHEMA}",
        fix="run the benchmark again with this version, and compare its file",
    )
