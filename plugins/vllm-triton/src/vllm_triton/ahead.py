"""Compile what the steps of a rehearsal launch: in processes side by side, before a real step waits for it.

Triton compiles a kernel where it is first launched, one after the other. Within `rehearsal` launches start nothing: a hook of
Triton's (`knobs.runtime.jit_cache_hook`) is told each specialisation that is not compiled yet, and processes of
`vllm_triton.ahead_child` put it into Triton's cache on disk, where the launch that follows finds it. What could not be compiled
so is compiled where it is launched, as without this. Marks beside that cache say what is there already.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import PriorityQueue
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from vllm_triton.offline import own_kernels

log = logging.getLogger(__name__)

MOST_CHILDREN = 16
LIMIT_S = 120.0
"""After this the children are ended, and what is left is compiled where it is launched."""

_MARKS = "vllm-triton-ahead"
_END = 1 << 62


class _Nothing:
    """Stands where a compiled kernel would, and starts nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: object) -> None:
        return None

    def run(self, *arguments: object) -> None:
        return None


_NOTHING = _Nothing()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A specialisation: where its kernel is, and what `JITFunction.preload` takes. ``mark`` names it in the cache."""

    module: str
    name: str
    data: str
    mark: str
    size: int
    """Characters of the kernel's source: the longest ones start first."""


@dataclass(slots=True)
class Rehearsed:
    """What a rehearsal asked for: all specialisations, and those of them that had to be compiled; what failed, and why."""

    asked: list[Wanted] = field(default_factory=list)
    compiled: list[Wanted] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def settle_keys() -> None:
    """Have Triton compute the keys of all kernels, in one order.

    What a kernel's key covers depends on which of the functions that it shares had theirs before (`JITCallable.cache_key`
    takes the constants that those use from it, or not): processes that launch in different orders would not find
    each other's kernels in the cache on disk.
    """
    for kernel in own_kernels():
        assert kernel.cache_key


def possible() -> bool:
    """Whether this Triton has the hook, nobody else uses it, and kernels are compiled at all."""
    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    if not hasattr(runtime, "jit_cache_hook") or not hasattr(JITFunction, "preload"):
        return False
    return bool(runtime.jit_cache_hook is None and not runtime.interpret)


@contextmanager
def rehearsal(launcher: str = "", jobs: int | None = None) -> Iterator[Rehearsed]:
    """Launch nothing inside; on leaving, what would have been launched is compiled.

    ``launcher`` is the ``module:class`` of Triton's that builds the code which starts a kernel, where its version compiles
    that too. ``jobs`` is the most processes: as many as there are cores, or 0 to compile nothing and only see what is asked.
    Nothing else may launch kernels in this process meanwhile. Check `possible` before.
    """
    device, target = triton.runtime.driver.active.get_current_device(), triton.runtime.driver.active.get_current_target()
    found, started = Rehearsed(), time.perf_counter()
    kept = _hide(device)
    touched: list[tuple[dict[Any, Any], Any]] = []
    pool = _Pool(_command(target, launcher), cores() if jobs is None else jobs)

    def note(*, key: Any, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        kernel = fn.jit_function
        cache = kernel.device_caches[device][0]
        cache[key] = _NOTHING
        touched.append((cache, key))
        if key not in kept.get(kernel.fn, {}):
            wanted = _wanted(kernel, compile["specialization_data"], target)
            found.asked.append(wanted)
            if jobs != 0 and not _marked(wanted):
                found.compiled.append(wanted)
                pool.add(wanted)
        return True

    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = None
        for cache, key in touched:
            del cache[key]
        _show(device, kept)
        found.failures += pool.finish()
    if found.compiled:
        seconds = time.perf_counter() - started
        log.info("%d kernel variants compiled ahead in %.1f s, %d failed", len(found.compiled), seconds, len(found.failures))
    for line in found.failures:
        log.info("not compiled ahead: %s", line)


def _hide(device: int) -> dict[Any, dict[Any, Any]]:
    """Take away what this process has compiled of our kernels, so that nothing is launched."""
    kept = {}
    for kernel in own_kernels():
        if device in kernel.device_caches:
            cache = kernel.device_caches[device][0]
            kept[kernel.fn] = dict(cache)
            cache.clear()
    return kept


def _show(device: int, kept: dict[Any, dict[Any, Any]]) -> None:
    for kernel in own_kernels():
        if kernel.fn in kept:
            kernel.device_caches[device][0].update(kept[kernel.fn])


def _wanted(kernel: Any, data: str, target: Any) -> Wanted:
    what = "\n".join((data, kernel.cache_key, triton.__version__, str(target), sys.version))
    mark = hashlib.sha256(what.encode()).hexdigest()
    return Wanted(kernel.fn.__module__, kernel.fn.__qualname__, data, mark, len(kernel.src))


def _folder() -> Path:
    return Path(triton.knobs.cache.dir) / _MARKS


def _marked(wanted: Wanted) -> bool:
    return (_folder() / wanted.mark).exists()


def _mark(wanted: Wanted) -> None:
    """Say that it is in the cache; nothing is lost where that cannot be written."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / wanted.mark).touch()
    except OSError as error:
        log.debug("no mark for %s: %s", wanted.name, error)


def _command(target: Any, launcher: str) -> list[str]:
    described = json.dumps([target.backend, target.arch, target.warp_size])
    return [sys.executable, "-m", "vllm_triton.ahead_child", described, launcher]


def cores() -> int:
    """Processors that this process may use, the share of its control group counted."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


class _Pool:
    """Child processes, each fed by a thread, started as there is something to compile."""

    def __init__(self, command: Sequence[str], jobs: int) -> None:
        self._command, self._jobs = command, min(jobs, MOST_CHILDREN)
        self._left: PriorityQueue[tuple[int, int, Wanted | None]] = PriorityQueue()
        self._count = 0
        self._threads: list[threading.Thread] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._failures: list[str] = []

    def add(self, wanted: Wanted) -> None:
        """Compile it, those of long sources first."""
        self._count += 1
        self._left.put((-wanted.size, self._count, wanted))
        if len(self._threads) < self._jobs:
            thread = threading.Thread(target=self._serve, daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self) -> list[str]:
        """Wait for all; what was not compiled, and why."""
        deadline = time.monotonic() + LIMIT_S
        for number in range(len(self._threads)):
            self._left.put((_END, number, None))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            child.kill()
        for thread in self._threads:
            thread.join()
        for child in self._children:
            with child:
                pass
        while not self._left.empty():
            wanted = self._left.get()[2]
            if wanted is not None:
                self._failures.append(f"{wanted.name}: no process was left for it")
        return self._failures

    def _serve(self) -> None:
        """Feed one child until nothing is left or it has died."""
        names = filter(None, [os.environ.get("PYTHONPATH", ""), *sys.path])
        # What this process imports, and nothing of the folder that it was started in.
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(names), "PYTHONSAFEPATH": "1"}
        pipe = subprocess.PIPE
        try:
            child = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environ, bufsize=0)
        except OSError as error:
            self._failures.append(f"no process: {error}")
            return
        self._children.append(child)
        assert child.stdin is not None, "it is a pipe"
        assert child.stdout is not None, "it is a pipe"
        while (wanted := self._left.get()[2]) is not None:
            try:
                child.stdin.write(json.dumps([wanted.module, wanted.name, wanted.data]).encode() + b"\n")
                answer = child.stdout.readline()
            except OSError as error:
                answer, reason = b"", str(error)
            else:
                reason = "the process ended"
            if not answer:
                self._failures.append(f"{wanted.name}: {reason}")
                return
            problem = json.loads(answer)
            if problem:
                self._failures.append(f"{wanted.name}: {problem}")
            else:
                _mark(wanted)
