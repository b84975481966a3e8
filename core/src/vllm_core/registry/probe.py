"""Imports a plugin and runs its probe in a child process with a time limit, and caches what it found.

The child is what may crash, hang, or open a driver; this process loads no torch because of it. A failed probe, and
one that found no device, is never cached: the next start looks again.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_core.api import ProbeReport
from vllm_core.errors import ConfigError
from vllm_core.registry import fingerprint
from vllm_core.registry.cache import cache_folder, write_atomic
from vllm_core.registry.discover import Found
from vllm_core.registry.load import Loaded
from vllm_core.registry.plan import Failed, Stage

TIMEOUT_VARIABLE = "VLLM_CORE_PROBE_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 20.0
MAX_REPORT_BYTES = 4 << 20
STDERR_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Visit:
    """What became of one plugin in a child process. `importable`: its import ended there, so it may be repeated here."""

    importable: bool
    outcome: ProbeReport | Failed


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
    if use_cache and (known := cached(loaded, environ)) is not None:
        return known
    outcome = visit(loaded.found, timeout_s=limit_s, environ=environ).outcome
    remember(loaded, environ, outcome)
    return outcome


def cached(loaded: Loaded, environ: Mapping[str, str], here: str | None = None) -> ProbeReport | None:
    """The report of an earlier probe that still holds; ``here`` as for `fingerprint.digest`."""
    try:
        return msgspec.json.decode(_path(loaded, environ, here).read_bytes(), type=ProbeReport)
    except (OSError, msgspec.DecodeError):
        return None


def remember(loaded: Loaded, environ: Mapping[str, str], outcome: ProbeReport | Failed, here: str | None = None) -> None:
    """Cache a report with devices."""
    if isinstance(outcome, Failed) or not outcome.devices:
        return
    try:
        write_atomic(_path(loaded, environ, here), msgspec.json.encode(outcome))
    except OSError:
        return  # a read-only home is normal in containers; the next start probes again


def _path(loaded: Loaded, environ: Mapping[str, str], here: str | None) -> Path:
    variable = loaded.manifest.visible_devices_env if loaded.manifest is not None else None
    visible = f"{variable}={environ.get(variable)}" if variable else ""
    key = fingerprint.digest(loaded.found, environ, visible, here=here)
    return cache_folder(environ) / "probes" / f"{loaded.found.distribution}-{key}.json"


def visit(found: Found, *, timeout_s: float, environ: Mapping[str, str], look: bool = True) -> Visit:
    """Import a plugin in a child process and, with ``look``, run its probe there."""
    with tempfile.TemporaryDirectory(prefix="vllm-core-probe-") as folder:
        report, log = Path(folder, "report.json"), Path(folder, "log")
        command = [sys.executable, "-m", "vllm_core.registry.probe_child", found.distribution, found.entry_point, str(report)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, "probe" if look else "import"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(environ),
                cwd=folder,
                start_new_session=True,
            )
            code = _wait(child, timeout_s)
        imported = imported_mark(report).exists()
        return Visit(imported, _outcome(found, code, timeout_s, report, log, "probe" if imported else "import"))


def imported_mark(report: Path) -> Path:
    """The file that says that the import has ended, well or by an exception."""
    return report.with_name("imported")


def _outcome(found: Found, code: int | None, timeout_s: float, report: Path, log: Path, stage: Stage) -> ProbeReport | Failed:
    if code is None:
        fix = f"raise {TIMEOUT_VARIABLE} if the driver is slow; else `vllm-core doctor`, then reboot or reload the driver"
        return _failed(found, f"no answer within {timeout_s:g} s; it was killed", fix, stage)
    if code != 0:
        fix = "`vllm-core doctor` shows what the driver says; report it to the plugin's authors"
        if stage == "import":
            fix = f"pip uninstall {found.distribution}, or install a version for this machine; report it to its authors"
        return _failed(found, _cause(code, log), fix, stage)
    return _decode(found, report)


def child_environment(environ: Mapping[str, str], *, first: Sequence[Path] = ()) -> dict[str, str]:
    """Environment in which a child process finds the modules that this one finds, and none of the working folder's.

    It looks into the folders of ``first`` before all others.
    """
    path = os.pathsep.join([*map(str, first), *(os.path.abspath(entry) for entry in sys.path)])
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


def _decode(found: Found, path: Path) -> ProbeReport | Failed:
    fix = "return a ProbeReport of plain values"
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            return _failed(found, f"its report is longer than {MAX_REPORT_BYTES} bytes", fix)
        report = msgspec.json.decode(path.read_bytes(), type=ProbeReport)
    except (OSError, msgspec.DecodeError) as error:
        return _failed(found, f"its report cannot be read: {error}", fix)
    ids = [device.id for device in report.devices]
    if len(set(ids)) != len(ids):
        return _failed(found, f"two devices have one id: {', '.join(ids)}", "give each device an id of its own")
    return report


def _failed(found: Found, cause: str, fix: str, stage: Stage = "probe") -> Failed:
    return Failed(distribution=found.distribution, entry_point=found.entry_point, stage=stage, cause=cause, fix=fix)
