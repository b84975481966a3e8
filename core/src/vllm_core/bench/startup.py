"""`bench startup`: from the start of a process until it serves, with no compiled kernels and with those of an earlier start.

Each start is a process of its own. The first finds an empty home, so that whatever compiles kernels has nothing to find, and
no probe result is known; the next ones find what it left. An earlier process that is not counted has read the libraries from
disk.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_core.bench import surroundings
from vllm_core.bench.results import Result, Start, Started, Startup
from vllm_core.bench.start_child import Order
from vllm_core.bench.workloads import Workload, engine_options
from vllm_core.errors import EngineError
from vllm_core.loader.locate import locate

LIGHT = {
    "python": "",
    "import vllm_core": "import vllm_core",
    "vllm-core --help": "import sys; from vllm_core.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
}
"""Code of the commands that should cost next to nothing; the first is what all others cost more than."""

_MODULES = "import sys; before = set(sys.modules)\n{}\nprint(len(set(sys.modules) - before), file=sys.stderr)"
_CACHES = ("_CACHE", "_CACHE_DIR", "_CACHE_PATH", "_CACHE_HOME", "TRITON_HOME")


def measure(
    model: str, options: Mapping[str, Any], workload: Workload, runs: int, watch: Callable[[str, Start], None]
) -> Result:
    """One cold start and ``runs`` cached ones; ``watch`` hears of each. Raises VLLMCoreError."""
    light = {name: [_seconds(code) for _ in range(runs + 1)][1:] for name, code in LIGHT.items()}
    modules = {name: _modules(code) for name, code in LIGHT.items() if code}
    with tempfile.TemporaryDirectory(prefix="vllm-core-bench-") as name:
        folder = Path(name)
        given = engine_options(model, options, folder)
        given["model"] = str(locate(given["model"]) or given["model"])  # the demo model is in the cache that is hidden below
        environ = fresh(os.environ, folder / "home")
        subprocess.run([sys.executable, "-c", "import vllm_core.llm, torch"], env=environ, check=True)
        found = []
        for run in range(runs + 1):
            found.append(
                _start(Order(spawned=0, name=model, options=given, workload=workload, out=f"{name}/{run}.json"), environ)
            )
            watch("cached" if run else "cold", found[-1].start)
    cold, *cached = [one.start for one in found]
    startup = Startup(workload=workload, cold=cold, cached=cached, light=light, modules=modules)
    return msgspec.structs.replace(found[-1].result, startup=startup, environment=surroundings.environment())


def fresh(environ: Mapping[str, str], home: Path) -> dict[str, str]:
    """An environment whose caches are all empty, but for models from the hub and the user's own packages."""
    (home / "tmp").mkdir(parents=True)
    hub = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    kept = {name: value for name, value in environ.items() if name.startswith("HF_") or not name.endswith(_CACHES)}
    new = {"HOME": home, "XDG_CACHE_HOME": home / ".cache", "VLLM_CORE_CACHE": home / "vllm-core", "TMPDIR": home / "tmp"}
    return {**kept, **{k: str(v) for k, v in new.items()}, "HF_HOME": hub, "PYTHONUSERBASE": site.getuserbase()}


def _start(order: Order, environ: Mapping[str, str]) -> Started:
    order = msgspec.structs.replace(order, spawned=time.monotonic())
    command = [sys.executable, "-m", "vllm_core.bench.start_child"]
    done = subprocess.run(command, input=msgspec.json.encode(order), env=dict(environ), stderr=subprocess.PIPE, check=False)
    if done.returncode:
        raise EngineError(
            "Engine did not start",
            on=order.name,
            found=done.stderr.decode(errors="replace").strip()[-2000:] or f"status {done.returncode}",
            expected="an engine that runs the workload twice",
            fix="try the same options with `vllm-core generate`",
        )
    return msgspec.json.decode(Path(order.out).read_bytes(), type=Started)


def _seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _modules(code: str) -> int:
    """How many modules a fresh interpreter has more after ``code``."""
    command = [sys.executable, "-c", _MODULES.format(code)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stderr.split()[-1])
