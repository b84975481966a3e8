"""`conformance.json`: everything that a run found, in a form from which its result can be computed again."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from vllm_conformance.sources import Source
from vllm_conformance.verdict import JudgedWaiver, Result, Row
from vllm_core.api import DeviceFacts
from vllm_core.errors import ConfigError

FORMAT = 1
MAX_BYTES = 256 << 20
SCHEMA = Path(__file__).with_name("conformance.schema.json")


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Of everything that takes part."""

    core: str
    suite: str
    plugin: str
    api: str
    torch: str
    python: str
    driver: str
    runtime: str


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """What was tested. `problem` says why it could not be beyond level 0."""

    name: str
    distribution: str
    entry_point: str
    vendor: str
    support_level: str
    problem: str = ""
    companions: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """The versions that it was made for. Unset where it names none, so that reports from before keep their digest."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `digest` is a SHA-256 over everything else: it catches accidents, not intent."""

    format: int
    result: Result
    level: int
    reached: int
    subset: str | None
    started: str
    seconds: float
    platform: Platform
    devices: tuple[DeviceFacts, ...]
    versions: Versions
    host: dict[str, str]
    sources: tuple[Source, ...]
    lists: dict[str, str]
    """SHA-256 of each level's must-pass list."""
    claims: dict[str, dict[str, Any]]
    providers: dict[str, tuple[str, ...]]
    plan: dict[str, Any] | None
    plan_problem: str
    options: dict[str, Any]
    rows: tuple[Row, ...]
    waivers: tuple[JudgedWaiver, ...]
    digest: str = ""

    @property
    def simulated(self) -> str:
        """What stood for the hardware; empty where the hardware was there."""
        return self.host.get("simulated", "")

    @property
    def denied(self) -> tuple[str, ...]:
        """Providers that the run left out; what they serve was judged on those behind them."""
        return tuple(self.options.get("deny_provider", ()))

    @property
    def dirty(self) -> tuple[str, ...]:
        """Names of the distributions whose code is not that of a commit or a wheel."""
        return tuple(one.name for one in self.sources if one.dirty or one.kind == "files")


def digest_of(report: Report) -> str:
    """The digest that a report should have."""
    blank = msgspec.structs.replace(report, digest="")
    return hashlib.sha256(msgspec.json.encode(blank, order="deterministic")).hexdigest()


def sealed(report: Report) -> Report:
    """The report with its digest."""
    return msgspec.structs.replace(report, digest=digest_of(report))


def write_report(report: Report, path: Path) -> None:
    """Write it as JSON, a row a line."""
    data: dict[str, Any] = msgspec.to_builtins(report)
    rows = ",\n    ".join(msgspec.json.encode(row).decode() for row in data["rows"])
    lines = [
        f"  {msgspec.json.encode(name).decode()}: "
        + (f"[\n    {rows}\n  ]" if name == "rows" else msgspec.json.encode(value).decode())
        for name, value in data.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_report(path: Path) -> Report:
    """Read a report. Raises ConfigError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _unreadable(path, f"more than {MAX_BYTES} bytes")
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise _unreadable(path, str(error)) from error
    if report.format != FORMAT:
        raise _unreadable(path, f"format {report.format}")
    return report


def _unreadable(path: Path, found: str) -> ConfigError:
    return ConfigError(
        "Report cannot be read",
        on=str(path),
        found=found,
        expected=f"a conformance.json of format {FORMAT}",
        fix="write it again with this version: vllm-core conformance run",
    )


def schema() -> dict[str, Any]:
    """The JSON Schema of a report, which is also in the package as `conformance.schema.json`."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Report of vllm-conformance"}
    return {**head, **msgspec.json.schema(Report)}


def calls_by_op(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    """Per op, calls by kind of provider."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        if row.group.startswith("op:"):
            counts.setdefault(row.group.removeprefix("op:"), Counter()).update(row.calls)
    return counts


def by_reference(rows: Iterable[Row]) -> tuple[str, ...]:
    """Ops that were served by core's reference, or on the host, and by nothing of the platform's own."""
    counts = calls_by_op(rows)
    return tuple(sorted(op for op, kinds in counts.items() if kinds and not kinds["kernel"] + kinds["vendor"]))
