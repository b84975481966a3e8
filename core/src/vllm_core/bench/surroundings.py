"""What a result is worth nothing without: versions, checkout, machine, model, memory."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import vllm_core
from vllm_core.bench.results import Environment, Git, Memory, ModelFacts

if TYPE_CHECKING:
    from vllm_core.launch import Blueprint
    from vllm_core.llm import LLM

_PREFIXES = ("VLLM_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_", "TRITON_", "HF_HUB_OFFLINE", "MALLOC_", "LD_PRELOAD")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def environment() -> Environment:
    """This process's surroundings now."""
    from importlib_metadata import distributions

    versions = {one.metadata["Name"]: one.version for one in distributions() if one.metadata["Name"]}
    return Environment(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        git=git_state(Path(vllm_core.__file__)),
        variables=variables(os.environ),
        versions=dict(sorted(versions.items(), key=lambda item: item[0].lower())),
    )


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how things run; none that is a secret."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(_PREFIXES) and not any(word in name for word in _SECRET)
    }


def git_state(file: Path) -> Git | None:
    """Commit of the checkout that ``file`` belongs to, and whether anything in it has changed; None outside of one."""
    try:
        _git(file, "ls-files", "--error-unmatch", file.name)  # a checkout around an environment is another project's
        return Git(commit=_git(file, "rev-parse", "HEAD"), changed=bool(_git(file, "status", "--porcelain")))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(file: Path, *arguments: str) -> str:
    command = ["git", "-C", str(file.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def model_facts(design: Blueprint, name: str) -> ModelFacts:
    """Which model an engine runs, under the name that the user gave it."""
    config, source = design.config.model, design.source
    dummy = config.load_format == "dummy"
    return ModelFacts(
        name=name,
        architecture=design.plan.architecture,
        config=_digest(source.config),
        weights=f"dummy: seed {config.seed}, bound {config.dummy_bound}" if dummy else _digest(_weight_files(source.path)),
        dummy=dummy,
        formats={} if dummy else dict(source.weight_formats()),
    )


def _weight_files(path: Path) -> list[tuple[str, int]]:
    """Names and sizes: to read the weights of a large model once more would take as long as to load it."""
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in (".safetensors", ".gguf"))
    return [(one.name, one.stat().st_size) for one in files]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def memory_of(llm: LLM) -> Memory:
    """The device's allocations now and at most, those of this process (worker 0 where several share the model)."""
    found = llm._engine.device.statistics()
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Memory(
        pools={str(pool): size for pool, size in found.own_bytes.items()}, peak_bytes=found.peak_own_bytes, host_peak_bytes=peak
    )
