"""Whether two results can be compared at all, and what differs between two that can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_core.bench.results import Result
from vllm_core.errors import ConfigError

Difference = tuple[str, str, str]
"""What, in the first file, in the second."""

_ABSENT = "-"


def require(a: Result, b: Result) -> None:
    """Raises ConfigError, naming the first thing that must be equal and is not."""
    for what, of in (("kind", _kind), ("model", _model), ("device", _device), ("workloads", _workloads)):
        first, second = of(a), of(b)
        if first != second:
            raise ConfigError(
                "Unlike cannot be compared with like",
                on=what,
                found=second,
                expected=first,
                fix=f"measure both with the same {what}; what may differ is versions, options and what the Plan chose",
            )
    if a.kind == "startup":
        raise ConfigError(
            "There is nothing to judge",
            on="kind startup",
            found="files of `bench startup`",
            expected="files of `bench latency` or `bench throughput`",
            fix="read the starts side by side in their tables: --out FILE.md",
        )


def _kind(result: Result) -> str:
    return f"bench {result.kind}"


def _model(result: Result) -> str:
    model = result.model
    weights = model.weights if model.dummy else f"files {model.weights[:12]}"
    return f"{model.architecture}, config {model.config[:12]}, weights {weights}"


def _device(result: Result) -> str:
    plan = result.plan
    device = plan.device
    cores = f", {result.environment.cores} cores" if device.memory_kind == "host" else ""
    return f"{max(1, len(plan.devices))} x {device.name}, {device.architecture}, {device.device_type}{cores}"


def _workloads(result: Result) -> str:
    rows = [
        f"{row.workload.name}: {row.workload.title}, temperature {row.workload.temperature}, "
        f"ids below {row.workload.vocabulary}, "
        f"seeds {', '.join(str(one.seed) for one in (row.first, *row.runs))}"
        for row in result.rows
    ]
    return "; ".join([*rows, f"prefix cache {result.prefix_cache}"])


def differences(a: Result, b: Result) -> list[Difference]:
    """What is not the same, the weightiest first: what the Plan chose, options, versions, variables."""
    pairs = ((_plan(a), _plan(b)), (_options(a), _options(b)), (_versions(a), _versions(b)))
    return [found for first, second in pairs for found in _unequal(first, second)]


def _unequal(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    for name in dict.fromkeys((*a, *b)):
        first, second = a.get(name, _ABSENT), b.get(name, _ABSENT)
        if first != second:
            yield name, first, second


def _plan(result: Result) -> dict[str, str]:
    plan = result.plan
    names = ("platform", "distribution", "track", "program", "dtype", "kv_dtype", "graphs", "tensor_parallel")
    found = {f"plan.{name}": str(getattr(plan, name)) for name in names}
    found |= {f"provider of {one.op} ({one.role})": one.provider for one in plan.bindings}
    found |= {f"KV group {one.spec.index}": f"{one.layout.layout_id}, {one.layout.tokens_per_block}" for one in plan.kv_groups}
    return found


def _options(result: Result) -> dict[str, str]:
    found: dict[str, Any] = {name: value for group in result.config.values() for name, value in group.items()}
    found.pop("model", None)  # the path, which may be another on another machine
    return {"max_model_len in use": str(result.max_model_len)} | {f"--{n.replace('_', '-')}": str(v) for n, v in found.items()}


def _versions(result: Result) -> dict[str, str]:
    here = result.environment
    git = f"{here.git.commit[:12]}{', changed' if here.git.changed else ''}" if here.git else _ABSENT
    facts = {
        "commit": git,
        "Python": here.python,
        "system": here.system,
        "driver": result.plan.device.driver_version or _ABSENT,
    }
    return facts | here.versions | {f"${name}": value for name, value in here.variables.items()}
