"""Counts patches in every process that loads a plugin, while a request is served.

`watched` runs a command whose Python processes, and theirs, all begin by importing this module (through a `sitecustomize` that
comes first on their path). Each looks at core and the libraries just before it first imports the plugin, and again when the
folder holds a file ``compare``, which the command puts there once its request has been served.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from vllm_core.registry.probe import child_environment

VARIABLE = "CONFORMANCE_WATCH"
COMPARE = "compare"
LIMIT_S = 1200.0
"""The longest that a case may take where other work has the processors (`vllm_conformance.worker`); it ends all of them."""
_POLL_S = 0.05
_SITE = f"""\
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

# The one that this one hides.
hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != os.path.dirname(__file__)])
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(module_from_spec(hidden))
if {VARIABLE!r} in os.environ:
    from vllm_conformance import watch

    watch.begin()
"""
# Processes that look at a machine, in which no engine runs.
_APART = ("vllm_core.registry.probe_child", "vllm_core.authoring.child")


@dataclass(frozen=True, slots=True)
class Process:
    """One process that loaded the plugin: what it was, and the names that it found changed. None: it never answered."""

    command: str
    changes: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Watched:
    """What became of the command, and of every process that loaded the plugin."""

    status: int
    output: str
    processes: tuple[Process, ...]


def watched(command: Sequence[str], package: str, device_type: str, environ: Mapping[str, str] = os.environ) -> Watched:
    """Run a command. ``package`` is the plugin's top package, ``device_type`` what it may register with torch."""
    with tempfile.TemporaryDirectory(prefix="vllm-conformance-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_SITE, "utf-8")
        told = json.dumps({"folder": name, "package": package, "device_type": device_type})
        environment = child_environment({**environ, VARIABLE: told})
        environment["PYTHONPATH"] = os.pathsep.join([name, environment["PYTHONPATH"]])
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
        )
        return Watched(done.returncode, done.stdout.decode("utf-8", "replace"), processes_in(folder))


def processes_in(folder: Path) -> tuple[Process, ...]:
    """The processes that loaded the plugin so far, and what they have answered."""
    found = []
    for path in sorted(folder.glob("*.begun")):
        answer = path.with_suffix(".changes")
        changes = tuple(json.loads(answer.read_text("utf-8"))) if answer.exists() else None
        found.append(Process(path.read_text("utf-8"), changes))
    return tuple(found)


def compare(limit_s: float = LIMIT_S) -> None:
    """In the command: ask all processes to look again, and wait for those that are alive. Raises TimeoutError."""
    folder = Path(json.loads(os.environ[VARIABLE])["folder"])
    (folder / COMPARE).touch()
    deadline = time.monotonic() + limit_s
    while any(one.changes is None for one in processes_in(folder)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes that loaded the plugin did not answer within {limit_s:g} s")
        time.sleep(_POLL_S)


def begin() -> None:
    """In every Python process of the command: look when the plugin is about to be imported."""
    if not any(name in sys.orig_argv for name in _APART):
        told = json.loads(os.environ[VARIABLE])
        sys.meta_path.insert(0, _Finder(Path(told["folder"]), told["package"], told["device_type"]))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing; is asked first."""

    def __init__(self, folder: Path, package: str, device_type: str) -> None:
        self._folder, self._package, self._device_type = folder, package, device_type

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname == self._package:
            sys.meta_path.remove(self)
            self._look()
        return None

    def _look(self) -> None:
        from vllm_conformance.patches import snapshot

        own = self._folder / str(os.getpid())
        own.with_suffix(".begun").write_text(" ".join(sys.orig_argv[1:])[:200], "utf-8")
        before = snapshot()

        def wait() -> None:
            while not (self._folder / COMPARE).exists():
                time.sleep(_POLL_S)
            changes = [str(change) for change in before.changes(device_type=self._device_type)]
            own.with_suffix(".part").write_text(json.dumps(changes), "utf-8")
            own.with_suffix(".part").rename(own.with_suffix(".changes"))

        threading.Thread(target=wait, daemon=True).start()
