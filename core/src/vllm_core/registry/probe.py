"""Runs a plugin's probe in a child process with a time limit, and caches what it found.

The child is what may crash, hang, or open a driver; this process loads no torch because of it. A failed probe, and
one that found no device, is never cached: the next start looks again.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_core.api import ProbeReport
from vllm_core.errors import ConfigError
from vllm_core.registry.cache import cache_folder, write_atomic
from vllm_core.registry.load import Loaded
from vllm_core.registry.plan import Failed

TIMEOUT_VARIABLE = "VLLM_CORE_PROBE_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 20.0
MAX_REPORT_BYTES = 4 << 20
STDERR_TAIL_BYTES = 4096


def timeout_of(environ: Mapping[str, str]) -> float:
    """The time limit in seconds. Raises ConfigError."""
    text = environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            "Environment variable has a wrong value",
            on=TIMEOUT_VARIABLE,
            found=repr(text),
            expected="a number of seconds above 0",
            fix=f"unset it, or {TIMEOUT_VARIABLE}={DEFAULT_TIMEOUT_S:g}",
        )
    return value


def probe(
    loaded: Loaded, *, timeout_s: float | None = None, environ: Mapping[str, str] | None = None, use_cache: bool = True
) -> ProbeReport | Failed:
    """Return what the plugin sees on this machine, from the cache if nothing that it depends on has changed."""
    environ = os.environ if environ is None else environ
    limit_s = timeout_of(environ) if timeout_s is None else timeout_s
    path = cache_folder(environ) / "probes" / f"{loaded.found.distribution}-{_key(loaded, environ)}.json"
    if use_cache and (cached := _read(path)) is not None:
        return cached
    report = _run(loaded, limit_s, environ)
    if isinstance(report, ProbeReport) and report.devices:
        try:
            write_atomic(path, msgspec.json.encode(report))
        except OSError:
            return report  # a read-only home is normal in containers; the next start probes again
    return report


def _key(loaded: Loaded, environ: Mapping[str, str]) -> str:
    """Digest of what a report depends on: the plugin's version and files, this boot, and what the user made visible."""
    variable = loaded.manifest.visible_devices_env if loaded.manifest is not None else None
    parts = [
        loaded.found.key,
        loaded.found.version,
        loaded.found.value,
        str(_newest_change(loaded)),
        _boot_id(),
        platform.node(),  # containers of one boot differ in what they see
        sys.executable,
        environ.get("LD_LIBRARY_PATH", ""),
        f"{variable}={environ.get(variable)}" if variable else "",
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def _newest_change(loaded: Loaded) -> int:
    """Newest modification time in ns among the plugin's Python files: an editable install changes under one version."""
    file = getattr(sys.modules.get(loaded.found.value.partition(":")[0]), "__file__", None)
    if file is None:
        return 0
    return max((path.stat().st_mtime_ns for path in Path(file).parent.glob("*.py")), default=0)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return "unknown boot"


def _read(path: Path) -> ProbeReport | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProbeReport)
    except (OSError, msgspec.DecodeError):
        return None


def _run(loaded: Loaded, timeout_s: float, environ: Mapping[str, str]) -> ProbeReport | Failed:
    found = loaded.found
    with tempfile.TemporaryDirectory(prefix="vllm-core-probe-") as folder:
        report, log = Path(folder, "report.json"), Path(folder, "log")
        command = [sys.executable, "-m", "vllm_core.registry.probe_child", found.distribution, found.entry_point, str(report)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(environ),
                cwd=folder,
                start_new_session=True,
            )
            code = _wait(child, timeout_s)
        if code is None:
            fix = f"raise {TIMEOUT_VARIABLE} if the driver is slow; else `vllm-core doctor`, then reboot or reload the driver"
            return _failed(loaded, f"no answer within {timeout_s:g} s; it was killed", fix)
        if code != 0:
            return _failed(
                loaded, _cause(code, log), "`vllm-core doctor` shows what the driver says; report it to the plugin's authors"
            )
        return _decode(loaded, report)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment in which a child process finds the modules that this one finds, and none of the working folder's."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Exit status, or None after the limit. Whatever the probe started is killed with it."""
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the normal case: nothing of its process group is left
        child.wait()


def _cause(code: int, log: Path) -> str:
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - STDERR_TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {code}"


def _decode(loaded: Loaded, path: Path) -> ProbeReport | Failed:
    fix = "return a ProbeReport of plain values"
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            return _failed(loaded, f"its report is longer than {MAX_REPORT_BYTES} bytes", fix)
        report = msgspec.json.decode(path.read_bytes(), type=ProbeReport)
    except (OSError, msgspec.DecodeError) as error:
        return _failed(loaded, f"its report cannot be read: {error}", fix)
    ids = [device.id for device in report.devices]
    if len(set(ids)) != len(ids):
        return _failed(loaded, f"two devices have one id: {', '.join(ids)}", "give each device an id of its own")
    return report


def _failed(loaded: Loaded, cause: str, fix: str) -> Failed:
    found = loaded.found
    return Failed(distribution=found.distribution, entry_point=found.entry_point, stage="probe", cause=cause, fix=fix)
