"""What is here: the CPU, the cores and the memory that this process may use. Reads files alone; works without them.

Every check is reported. On systems without /proc and cgroups the checks that need them are skipped, and what
Python knows is used.
"""

from __future__ import annotations

import os
import platform as host
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from vllm_core.api import Check, DeviceFacts, ProbeReport, UnsupportedError
from vllm_cpu import native

INTERESTING = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16")
SMALL_SHM_BYTES = 64 << 20
MAX_WORKERS = 8
"""Processes that may share a model on one host. They divide its cores; beyond this they would mostly wait for each other."""

UNLIMITED_BYTES = 1 << 60
"""A cgroup v1 without a limit shows a number near 2**63."""


@dataclass
class _Looking:
    """A probe under way: where to look, and what has been found."""

    root: Path
    checks: list[Check] = field(default_factory=list)

    def read(self, path: str) -> str | None:
        """Contents of a small file, or None where it does not exist or may not be read."""
        try:
            return (self.root / path.lstrip("/")).read_text("utf-8", "replace").strip()
        except OSError:
            return None

    def note(self, name: str, detail: str | None, *, missing: str = "not found", hint: str = "") -> None:
        """Record a check: ok with its detail, or skipped where there was nothing to look at."""
        if detail is None:
            self.checks.append(Check(name=name, outcome="skipped", detail=missing, hint=hint))
        else:
            self.checks.append(Check(name=name, outcome="ok", detail=detail))


def probe(root: Path = Path("/")) -> ProbeReport:
    """Look below ``root``."""
    look = _Looking(root)
    model, flags = _processor(look)
    cores = _cores(look)
    memory = _memory(look)
    nodes = _numa(look)
    _shared_memory(look)
    _native_library(look)
    if not memory:
        look.checks.append(
            Check(
                name="memory",
                outcome="failed",
                detail="size unknown",
                hint="mount /proc, or set a memory limit on the container",
            )
        )
        return ProbeReport(devices=(), checks=tuple(look.checks))
    facts = DeviceFacts(
        id="0",
        name=model,
        device_type="cpu",
        architecture=architecture(flags),
        memory_kind="host",
        memory_bytes=memory,
        driver_version=host.release(),
        max_workers=MAX_WORKERS,
        properties={"cores": str(cores), "features": " ".join(flags), "numa_nodes": str(nodes)},
    )
    return ProbeReport(devices=(facts,), checks=tuple(look.checks))


def architecture(flags: tuple[str, ...]) -> str:
    """The machine with its widest vector unit, e.g. ``x86_64-avx2``."""
    machine = host.machine() or "unknown"
    widest = next((flag for flag in ("avx512f", "avx2", "sve", "asimd") if flag in flags), None)
    return f"{machine}-{widest}" if widest else machine


def _processor(look: _Looking) -> tuple[str, tuple[str, ...]]:
    text = look.read("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in (text or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    model = fields.get("model name") or fields.get("cpu model") or host.processor() or host.machine() or "CPU"
    present = set(fields.get("flags", fields.get("features", "")).split())
    flags = tuple(flag for flag in INTERESTING if flag in present)
    look.note("processor", f"{model}; {' '.join(flags) or 'no vector extensions that matter here'}" if text else None)
    return model, flags


def _cores(look: _Looking) -> int:
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
        look.note("affinity", f"{allowed} of {os.cpu_count()} cores")
    else:
        allowed = os.cpu_count() or 1
        look.note("affinity", None, missing="this system has none")
    quota = _quota(look)
    look.note("cpu quota", None if quota is None else f"{quota:g} cores", missing="no limit")
    return max(1, min(allowed, int(quota) if quota is not None else allowed))


def _quota(look: _Looking) -> float | None:
    """Cores that the control group grants (v2, then v1), or None without a limit."""
    if text := look.read("/sys/fs/cgroup/cpu.max"):
        limit, _, period = text.partition(" ")
        return int(limit) / int(period) if limit.isdecimal() and period.isdecimal() else None
    quota, span = (look.read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(span) if quota and span and quota.isdecimal() and span.isdecimal() else None


def _memory(look: _Looking) -> int:
    total = memory_info(look.root).get("MemTotal", 0) or _sysconf_bytes()
    look.note("memory", f"{total >> 20} MiB" if total else None)
    limit = memory_limit(look.root)
    look.note("memory limit", None if limit is None else f"{limit >> 20} MiB", missing="no limit")
    return min(total, limit) if limit is not None and total else total or limit or 0


def memory_info(root: Path = Path("/")) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    found = {}
    for line in (_Looking(root).read("/proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[key] = int(words[0]) << (10 if words[1:] == ["kB"] else 0)
    return found


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the control group grants (v2, then v1), or None without a limit."""
    return _first_number(root, "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_used(root: Path = Path("/")) -> int | None:
    """Bytes that the control group counts as used, file cache that can be dropped aside; None where it does not say."""
    used = _first_number(root, "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
    if used is None:
        return None
    look = _Looking(root)
    text = look.read("/sys/fs/cgroup/memory.stat") or look.read("/sys/fs/cgroup/memory/memory.stat") or ""
    cached = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return max(0, used - int(cached.get("total_inactive_file", cached.get("inactive_file", "0"))))


def features(root: Path = Path("/")) -> frozenset[str]:
    """Vector extensions of this CPU that matter here; empty where /proc/cpuinfo does not say."""
    return frozenset(_processor(_Looking(root))[1])


def _first_number(root: Path, *paths: str) -> int | None:
    for path in paths:
        text = _Looking(root).read(path)
        if text and text.isdecimal() and int(text) < UNLIMITED_BYTES:
            return int(text)
    return None


def _sysconf_bytes() -> int:
    """Physical memory as POSIX tells it; 0 where it does not."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return 0
    return max(0, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _numa(look: _Looking) -> int:
    nodes = len(list((look.root / "sys/devices/system/node").glob("node[0-9]*")))
    look.note("numa", f"{nodes} node{'s' if nodes != 1 else ''}" if nodes else None)
    return max(1, nodes)


def _shared_memory(look: _Looking) -> None:
    folder = look.root / "dev/shm"
    if not folder.is_dir():
        look.note("/dev/shm", None)
        return
    total = shutil.disk_usage(folder).total
    if total < SMALL_SHM_BYTES:
        hint = "start the container with --shm-size=1g; loaders and worker processes share memory there"
        look.checks.append(Check(name="/dev/shm", outcome="failed", detail=f"only {total >> 20} MiB", hint=hint))
    else:
        look.note("/dev/shm", f"{total >> 20} MiB")


def _native_library(look: _Looking) -> None:
    try:
        found = native.load()
    except UnsupportedError as error:
        look.checks.append(Check(name="native library", outcome="failed", detail=error.found, hint=error.fix))
    else:
        look.note("native library", None if found.library is None else str(found), missing=str(found))
