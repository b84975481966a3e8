"""What can keep a device from being used, walked step by step: each with its outcome, and a fix where it failed.

Imports no torch and opens no device itself: whatever may crash or hang runs in a child process.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from vllm_core.api import API_VERSION, ENTRY_POINT_GROUP
from vllm_core.api.manifest import Check
from vllm_core.registry.candidates import collect
from vllm_core.registry.discover import Found, find
from vllm_core.registry.hardware import Sighting, scan
from vllm_core.registry.libraries import check_library, native_libraries
from vllm_core.registry.plan import Candidate, Failed
from vllm_core.registry.probe import child_environment
from vllm_core.registry.snapshot import FORMAT, Snapshot, save_failure, save_platform
from vllm_core.version import __version__

TORCH_TIMEOUT_S = 120.0
SMALL_SHARED_MEMORY_BYTES = 256 << 20
_TORCH = """
import json, torch
facts = {k: v for k, v in vars(torch.version).items() if isinstance(v, str) and k.isalpha()}
print(json.dumps({"version": torch.__version__, **facts}))
"""
_CONTAINER_MARKS = (".dockerenv", "run/.containerenv")


def examine(environ: Mapping[str, str], *, root: Path = Path("/")) -> Snapshot:
    """Walk all steps. Never raises for what it finds; probes run afresh."""
    found, sightings = find(), scan(root)
    candidates, failed = collect(environ=environ, root=root, use_cache=False)
    return Snapshot(
        format=FORMAT,
        core_version=__version__,
        host=_host(),
        platforms=tuple(save_platform(one) for one in candidates),
        failed=tuple(save_failure(one) for one in failed),
        steps={
            "torch build": check_torch(environ),
            "driver and devices": check_devices(candidates),
            "device files and container": check_files(sightings, root, environ),
            "plugin, probe and backend": check_plugins(candidates, failed),
            "native libraries": check_libraries(found, environ),
            "shared memory": check_shared_memory(root),
        },
    )


def _host() -> dict[str, str]:
    return {
        "node": platform.node(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "api": f"{API_VERSION[0]}.{API_VERSION[1]}",
    }


def check_torch(environ: Mapping[str, str]) -> tuple[Check, ...]:
    """Import torch in a child process, and what it says it was built for."""
    name, hint = "import torch", "pip install torch, in the build that the hardware package asks for"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH],
            env=child_environment(environ),
            cwd=os.sep,
            capture_output=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (Check(name=name, outcome="failed", detail=f"no answer within {TORCH_TIMEOUT_S:g} s", hint=hint),)
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
        return (Check(name=name, outcome="failed", detail=lines[-1], hint=hint),)
    facts = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, str])
    return (Check(name=name, outcome="ok", detail=", ".join(f"{key} {value}" for key, value in facts.items())),)


def check_devices(candidates: Sequence[Candidate]) -> tuple[Check, ...]:
    """Every check that the probes made, and the devices that they found."""
    checks: dict[Check, None] = {}
    for one in candidates:
        for check in one.checks:
            checks[
                Check(name=f"{one.manifest.name}: {check.name}", outcome=check.outcome, detail=check.detail, hint=check.hint)
            ] = None
        for device in one.devices:
            memory = f"{device.memory_bytes / 2**30:.1f} GiB {device.memory_kind}"
            versions = f"driver {device.driver_version or 'unknown'}, runtime {device.runtime_version or 'unknown'}"
            detail = f"{device.name}, {device.architecture}, {memory}, {versions}"
            checks[Check(name=f"{one.manifest.name}: device {device.id}", outcome="ok", detail=detail)] = None
    if not any(one.devices for one in candidates):
        hint = "see the step on plugins"
        checks[Check(name="devices", outcome="failed", detail="no platform found a device", hint=hint)] = None
    return tuple(checks)


def check_files(sightings: Sequence[Sighting], root: Path, environ: Mapping[str, str]) -> tuple[Check, ...]:
    """Hardware seen in /sys and /dev, whether this user may open its device files, and whether this is a container."""
    marks = [f"/{mark}" for mark in _CONTAINER_MARKS if (root / mark).exists()]
    marks += ["KUBERNETES_SERVICE_HOST"] if "KUBERNETES_SERVICE_HOST" in environ else []
    inside = f"inside one ({', '.join(marks)})" if marks else "not inside one that can be recognised"
    checks = [Check(name="container", outcome="ok", detail=inside)]
    for one in sightings:
        files = [path for path in one.evidence if path.startswith("/dev/")]
        if not files:
            hint = "start the container with the vendor's runtime or --device" if marks else "load the driver"
            detail = f"{one}, but no device file"
            checks.append(Check(name=one.plugin.hardware, outcome="failed", detail=detail, hint=hint))
        for path in files:
            usable = os.access(root / path.lstrip("/"), os.R_OK | os.W_OK)
            detail = "may be opened" if usable else "may not be opened by this user"
            hint = "" if usable else f"join the group that owns {path} (`ls -l {path}`)"
            checks.append(Check(name=path, outcome="ok" if usable else "failed", detail=detail, hint=hint))
    if not sightings:
        checks.append(Check(name="hardware", outcome="skipped", detail="no known accelerator in /sys or /dev"))
    return tuple(checks)


def check_plugins(candidates: Sequence[Candidate], failed: Sequence[Failed]) -> tuple[Check, ...]:
    """Each plugin: loaded and probed, with what it offers; or the stage at which it failed."""
    checks = []
    for one in candidates:
        own = [offer for offer in one.offers if offer.kind != "reference"]
        ops = {op for offer in own for op in offer.ops}
        providers = ", ".join(sorted({offer.provider for offer in own})) or "none"
        devices = f"{len(one.devices)} device{'' if len(one.devices) == 1 else 's'}"
        detail = f"{one.version}, {one.manifest.support_level}, {devices}, {len(ops)} ops by {providers}"
        made_for = ", ".join(map(str, one.manifest.companions))
        detail += f"; made for {made_for}" if made_for else ""
        key = f"{one.distribution}:{one.entry_point}"
        checks.append(Check(name=key, outcome="ok" if one.devices else "skipped", detail=detail))
    checks += [Check(name=one.key, outcome="failed", detail=f"{one.stage}: {one.cause}", hint=one.fix) for one in failed]
    if not checks:
        detail = f"no installed distribution has an entry point of the group {ENTRY_POINT_GROUP}"
        hint = "install a hardware package, e.g. pip install ./plugins/vllm-cpu in a checkout"
        checks.append(Check(name="plugins", outcome="failed", detail=detail, hint=hint))
    return tuple(checks)


def check_libraries(found: Sequence[Found], environ: Mapping[str, str]) -> tuple[Check, ...]:
    """Every native library in the plugins' packages, and `VLLM_CORE_OPS_PATH`."""
    paths = [path for folder in _package_folders(found) for path in native_libraries(folder)]
    own = environ.get("VLLM_CORE_OPS_PATH")
    if own:
        paths.insert(0, Path(own))
    if not paths:
        return (Check(name="native libraries", outcome="skipped", detail="the installed plugins have none"),)
    return tuple(check_library(path, environ) for path in paths)


def _package_folders(found: Sequence[Found]) -> list[Path]:
    """Folders of the plugins' top packages, found without importing them."""
    folders = []
    for name in dict.fromkeys(one.value.partition(":")[0].partition(".")[0] for one in found):
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders += [Path(path) for path in spec.submodule_search_locations]
    return folders


def check_shared_memory(root: Path) -> tuple[Check, ...]:
    """Size of /dev/shm, through which processes of one host exchange tensors."""
    path = root / "dev/shm"
    if not path.is_dir():
        return (Check(name="/dev/shm", outcome="skipped", detail="not there on this system"),)
    usage = shutil.disk_usage(path)
    detail = f"{usage.free >> 20} MiB free of {usage.total >> 20} MiB"
    if usage.free >= SMALL_SHARED_MEMORY_BYTES:
        return (Check(name="/dev/shm", outcome="ok", detail=detail),)
    hint = "in a container: --shm-size=8g, or --ipc=host"
    return (Check(name="/dev/shm", outcome="failed", detail=detail, hint=hint),)
