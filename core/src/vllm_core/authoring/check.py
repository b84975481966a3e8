"""Level 0: everything that can be said of a plugin without its hardware, in seconds.

`check` reads the files and the metadata, and lets a child process with a time limit import the plugin and ask its hooks. This
process imports nothing of the plugin.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_core.api import Manifest
from vllm_core.authoring import child
from vllm_core.authoring.finding import Finding, failed, ok, skipped
from vllm_core.authoring.manifest_rules import check_manifest, check_metadata
from vllm_core.authoring.offer_rules import check_offers
from vllm_core.authoring.source_rules import check_sources
from vllm_core.authoring.subject import Subject, open_subject
from vllm_core.registry.discover import Found
from vllm_core.registry.probe import child_environment
from vllm_core.registry.snapshot import manifest_from_data

TIMEOUT_S = 20.0
"""For a plugin that hangs; one that works needs a second or two."""

MAX_REPORT_BYTES = 4 << 20
_decode = msgspec.json.Decoder(child.Event).decode


@dataclass(frozen=True, slots=True)
class Checked:
    """All findings on one distribution. `name` is for a person: distribution and version."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(one.outcome != "failed" for one in self.findings)


def check(target: str, environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> tuple[Checked, ...]:
    """Check a project folder, a wheel or an installed plugin by name (empty: all).

    Raises ConfigError for what cannot be checked at all, UnknownPlatformError for an unknown name.
    """
    with open_subject(target) as subjects:
        return tuple(_check(subject, environ, timeout_s) for subject in subjects)


def _check(subject: Subject, environ: Mapping[str, str], timeout_s: float) -> Checked:
    findings = [*check_metadata(subject), *check_sources(subject)]
    for found in subject.entries:
        findings += _hooks(subject, found, environ, timeout_s)
    order = {"failed": 0, "ok": 1, "skipped": 2}
    told = list({_told(one): one for one in reversed(findings)}.values())[::-1]
    return Checked(f"{subject.distribution} {subject.version}", tuple(sorted(told, key=lambda one: order[one.outcome])))


def _told(finding: Finding) -> tuple[str, ...]:
    """What makes a finding one of its own: what holds for every architecture alike is told once."""
    rule = finding.rule.partition(" for ")[0]
    return (rule, finding.found) if rule in ("offers", "ops") else (rule, finding.on, finding.found)


def _hooks(subject: Subject, found: Found, environ: Mapping[str, str], timeout_s: float) -> Iterator[Finding]:
    """What the child process saw, and where it ended if it did not come through."""
    manifest: Manifest | None = None
    events, code, stderr = _run(subject, found, environ, timeout_s)
    for event in events:
        if isinstance(event, child.Imported):
            manifest = manifest_from_data(event.manifest) if event.manifest is not None else None
            yield from _imported(subject, found, event, manifest)
        elif isinstance(event, child.Offered):
            built_for = manifest.architectures if manifest is not None else ()
            yield from check_offers(subject, event.architecture, event.offers, built_for)
        elif isinstance(event, child.Configured):
            yield _configured(found, event)
        elif isinstance(event, child.Probed):
            yield from _probed(found, event)
        elif isinstance(event, child.Refused):
            yield _refused(found, event)
        elif isinstance(event, child.Broken):
            yield failed(event.step, found.key, event.found, expected=event.expected, fix=event.fix)
    if code != 0:
        step = next((one.step for one in reversed(events) if isinstance(one, child.Begun)), "import")
        why = f"no answer within {timeout_s:g} s" if code is None else _died(code, stderr)
        expected = "a step that ends, whether or not its hardware is here"
        yield failed(
            step, found.key, why, expected=expected, fix=f"run it alone: python -c 'import {found.value.partition(':')[0]}'"
        )


def _run(
    subject: Subject, found: Found, environ: Mapping[str, str], timeout_s: float
) -> tuple[list[child.Event], int | None, str]:
    """The events, the exit status (None: the limit was reached) and the end of what it printed."""
    with tempfile.TemporaryDirectory(prefix="vllm-core-check-") as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        report.touch()
        command = [sys.executable, "-m", "vllm_core.authoring.child", found.distribution, found.entry_point, str(report)]
        environment = child_environment(environ, first=subject.search)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
            code = _wait(process, timeout_s)
        lines = report.read_bytes()[:MAX_REPORT_BYTES].splitlines()
        events = [_decode(line) for line in lines if line.endswith(b"}")]
        return events, code, log.read_bytes()[-4096:].decode("utf-8", "replace").strip()


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of its process group is left
        process.wait()


def _died(code: int, stderr: str) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"exit status {code}, after {stderr.splitlines()[-1]!r}" if stderr else f"exit status {code}"


def _imported(subject: Subject, found: Found, event: child.Imported, manifest: Manifest | None) -> Iterator[Finding]:
    if event.heavy:
        yield failed(
            "import",
            found.key,
            f"imports {', '.join(event.heavy)}",
            expected="a module that is read without them: every process that looks for platforms imports it",
            fix="import them inside of the hooks that need them",
        )
    if event.changed:
        fix = "offer an op, a device method or a step program instead; say which hook is missing"
        yield failed(
            "patches", found.key, f"changes {', '.join(event.changed)} at import", expected="nothing of core changed", fix=fix
        )
    if not event.heavy and not event.changed:
        yield ok("import", found.key, f"hooks and their signatures are in order, {event.took_s * 1e3:.0f} ms")
    if manifest is not None:
        yield from check_manifest(subject, manifest)


def _configured(found: Found, event: child.Configured) -> Finding:
    wrong = [f"{name}: no such option" for name in event.unknown] + [
        f"{name}: no reason given" for name in event.without_reason
    ]
    wrong += [] if event.pure else ["two calls with one configuration gave two answers"]
    if not wrong:
        return ok("configure", found.key, f"changes {', '.join(event.changes) or 'nothing'} by default")
    expected = "options of the engine, each with a reason, the same at every call"
    return failed("configure", found.key, "; ".join(wrong), expected=expected, fix="correct the ConfigPatch")


def _probed(found: Found, event: child.Probed) -> Iterator[Finding]:
    report = event.report
    silent = [check.name for check in report.failures if not check.hint]
    if silent:
        fix = "say what a person can do, in Check.hint"
        yield failed("probe", found.key, f"failed without a hint: {', '.join(silent)}", expected="a hint for each", fix=fix)
    if not report.checks:
        expected, fix = "every check that was made, also the successful ones", "report them: they are what users see"
        yield failed("probe", found.key, "no checks", expected=expected, fix=fix)
    wrong = [f"device {one.id!r} has {one.memory_bytes} bytes" for one in report.devices if one.memory_bytes <= 0]
    counts = Counter(one.id for one in report.devices)
    wrong += [f"{count} devices with the id {name!r}" for name, count in counts.items() if count > 1]
    if wrong:
        fix = "say what the driver says: the selector and the memory budget work with it"
        yield failed("probe", found.key, "; ".join(wrong), expected="memory of each device, and an id of its own", fix=fix)
    detail = f"{_count(len(report.devices), 'device')}, {_count(len(report.checks), 'check')}, {len(report.failures)} failed"
    yield ok("probe", found.key, detail)
    yield from (skipped(f"probe: {one.name}", found.key, one.detail, fix=one.hint) for one in report.failures)


def _refused(found: Found, event: child.Refused) -> Finding:
    """A wrong version of a companion is refused with both numbers."""
    if event.complete:
        return ok("versions", found.key, f"refused: {event.said}")
    return failed(
        "versions",
        f"probe of {found.key}, with {event.companion} in version {event.planted}",
        event.said or "no check names that version",
        expected="a failed check with the version that was found and the range that is needed",
        fix="judge what is found by `Companion.refusal`, and put its sentence into the check",
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
