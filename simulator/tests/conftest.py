"""Children on simulated machines: what they find out is printed as JSON and judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vllm_simulator
from vllm_simulator import extension

LIMIT_S = 120

PRELUDE = """
import json, sys, torch
torch.default_generator.manual_seed(0)
out = {}
def said(work):
    try:
        return repr(work())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.fixture(scope="session")
def run_on() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a child on a simulated machine; `out` is printed as JSON at its end. Skips without a compiler."""
    if extension.compiler() is None:
        pytest.skip("no C++ compiler")

    def run(code: str, *, more: dict[str, str] | None = None, **settings: Any) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}
        environ = vllm_simulator.environment(environ=environ, **settings)
        whole = PRELUDE + code + "\nprint(json.dumps(out))"
        return subprocess.run([sys.executable, "-c", whole], env=environ, capture_output=True, text=True, timeout=LIMIT_S)

    return run


@pytest.fixture(scope="session")
def found_on(run_on: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., dict[str, Any]]:
    """What such code put into `out`."""

    def found(code: str, **settings: Any) -> dict[str, Any]:
        done = run_on(code, **settings)
        assert done.returncode == 0, done.stderr[-3000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    return found


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of the test's own, for what compiles nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm-simulator"
