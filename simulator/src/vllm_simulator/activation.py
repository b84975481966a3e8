"""How a process becomes one on a simulated machine: a generated folder before all others, where torch's own autoload finds it.

The folder holds what the vendor's installation would: a distribution with an entry point of the group `torch.backends`, its
command-line tools, and its libraries. `import torch` does the rest, in every process that inherits the environment.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_simulator import extension, installation
from vllm_simulator.settings import Settings
from vllm_simulator.version import __version__

ANNOUNCEMENT = "SIMULATED_HARDWARE"
"""Variable that says to whoever records results what they were measured on; `vllm-conformance` writes it into its report."""
KEY_OF = {"npu": "PrivateUse1", "hip": "CUDA", "xpu": "XPU"}


def environment(settings: Settings | None = None, environ: Mapping[str, str] | None = None, **fields: Any) -> dict[str, str]:
    """The environment of a child process on a machine of ``settings``, or of the `Settings` that ``fields`` give.

    Compiles the device first, if that was never done: about a minute. Raises ValueError for wrong settings, RuntimeError
    where it cannot be compiled.
    """
    settings = Settings(**fields) if settings is None else settings
    base = dict(os.environ if environ is None else environ)
    _compiled(KEY_OF[settings.pose])
    folder = _installed(settings)
    changes = installation.make_installation(settings, folder, extension.library(KEY_OF[settings.pose]))
    for name, value in {**changes, "PYTHONPATH": str(folder), "PATH": str(folder / "bin")}.items():
        listed = name in ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH")
        base[name] = os.pathsep.join(filter(None, (value, base.get(name)))) if listed else value
    base[ANNOUNCEMENT] = f"vllm-simulator {__version__}: {settings.data.name} as torch.{settings.pose}"
    return base


def activate(settings: Settings | None = None, **fields: Any) -> None:
    """Put this process, and the children it starts, on a simulated machine. Raises RuntimeError where torch was imported."""
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported: it cannot be built for another device any more; use a child process")
    settings = Settings(**fields) if settings is None else settings
    os.environ.update(environment(settings))
    sys.path.insert(0, str(_installed(settings)))
    importlib.invalidate_caches()
    if settings.pose != "npu":
        importlib.import_module("sitecustomize" if "sitecustomize" not in sys.modules else "torch")


def _compiled(key: str) -> None:
    if not extension.library(key).exists():
        code = "import sys; from vllm_simulator import extension; extension.load(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", code, key], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message")


def _installed(settings: Settings) -> Path:
    """Its own folder for each machine: what was found on one is not remembered for another."""
    library = str(extension.library(KEY_OF[settings.pose]))
    made_of = json.dumps([asdict(settings), library, Path(installation.__file__).read_text(encoding="utf-8")], sort_keys=True)
    folder = extension.cache_folder() / f"{settings.pose}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
