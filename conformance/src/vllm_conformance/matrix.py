"""The support matrix from reports: a table of Markdown for the README, whose rows are capabilities and columns platforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_conformance.report import Report
from vllm_conformance.verdict import GOOD, Row
from vllm_core.api import CAPABILITIES
from vllm_core.errors import ConfigError

BEGIN = "<!-- support matrix: written by `vllm-core conformance matrix` -->"
END = "<!-- end of the support matrix -->"
LEVEL_ROW = "conformance"


def claim_word(claim: Mapping[str, Any]) -> str:
    """A claim as plain data in a word or two, with the cases of a partial one."""
    match claim["kind"]:
        case "full":
            return "yes"
        case "versioned":
            return f"since {claim['since']}"
        case "partial":
            return f"partly: {', '.join(claim['cases'])}"
        case "not_implemented":
            return "not yet"
        case _:
            return "no"


def proof_of(report: Report, capability: str) -> str:
    """``proved``, ``refuted`` or ``unproved``: what the capability's own cases say."""
    rows: list[Row] = [row for row in report.rows if row.group == f"capability:{capability}"]
    if not rows or any(row.outcome == "NOT_RUN" for row in rows):
        return "unproved"
    return "proved" if all(row.verdict in GOOD for row in rows) else "refuted"


def level_word(report: Report) -> str:
    """The result in a few words."""
    if report.result == "INCOMPLETE":
        return "incomplete"
    if report.subset is not None:
        return "not measured"
    word = f"L{report.reached}" if report.reached >= 0 else "fails"
    word = f"{word} simulated" if report.simulated else word
    return f"{word}, without {' and '.join(report.denied)}" if report.denied else word


def heads(reports: Sequence[Report]) -> list[str]:
    """A column's head: the distribution and its support level, and the device where one distribution has several columns."""
    names = [report.platform.distribution for report in reports]
    made = []
    for report, name in zip(reports, names, strict=True):
        device = report.devices[0].name if report.devices and names.count(name) > 1 else ""
        made.append(f"{name} ({', '.join(filter(None, (report.platform.support_level, device)))})")
    return made


def markdown(columns: Sequence[str], claims: Sequence[Mapping[str, Mapping[str, Any]]], levels: Sequence[str]) -> str:
    """The table: levels first, then a row for each capability."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines.append(f"| {LEVEL_ROW} | " + " | ".join(levels) + " |")
    for name, capability in CAPABILITIES.items():
        cells = [claim_word(one[name]) if name in one else "?" for one in claims]
        lines.append(f"| `{name}`: {capability.doc} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def matrix(reports: Sequence[Report]) -> str:
    """The table of some reports."""
    return markdown(heads(reports), [report.claims for report in reports], [level_word(report) for report in reports])


def replaced(text: str, table: str, on: str = "README.md") -> str:
    """The text with its table replaced. Raises ConfigError if the marks are missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ConfigError(
            "No place for the support matrix",
            on=on,
            found="its marks are not there",
            expected=f"{BEGIN} and {END}",
            fix="add them",
        )
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def write_into(path: Path, table: str) -> None:
    """Replace the table of a file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "File cannot be read",
            on=str(path),
            found=str(error),
            expected="a text with the marks of the matrix",
            fix="name another",
        ) from error
    path.write_text(replaced(text, table, str(path)), encoding="utf-8")
