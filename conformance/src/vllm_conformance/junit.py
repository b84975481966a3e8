"""The report as JUnit XML, for whatever shows test results."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from vllm_conformance.report import Report
from vllm_conformance.verdict import BAD_WAIVERS, GOOD, JUDGED_LEVELS, JudgedWaiver, Row

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(report: Report, path: Path) -> None:
    """Write a suite a level: what is bad is a failure, a crash or hang an error, what did not run is skipped."""
    root = ElementTree.Element("testsuites", name=f"vllm-conformance {report.platform.name}", time=str(report.seconds))
    for level in sorted({row.level for row in report.rows}):
        rows = [row for row in report.rows if row.level == level]
        _suite(root, f"L{level}", [_case(row) for row in rows])
    if report.waivers:
        _suite(root, "waivers", [_waiver(one) for one in report.waivers])
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _suite(root: ElementTree.Element, name: str, cases: list[ElementTree.Element]) -> None:
    counts = {tag: sum(case.find(tag) is not None for case in cases) for tag in ("failure", "error", "skipped")}
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=name,
        tests=str(len(cases)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
    )
    suite.extend(cases)


def _case(row: Row) -> ElementTree.Element:
    case = ElementTree.Element("testcase", name=row.id, classname=row.group, time=str(row.seconds))
    if row.verdict == "NOT_RUN":
        ElementTree.SubElement(case, "skipped", message=_clean(row.detail))
    elif row.verdict not in GOOD and row.level in JUDGED_LEVELS:
        tag = "error" if row.outcome in ("CRASH", "HANG") else "failure"
        ElementTree.SubElement(case, tag, type=row.verdict, message=_clean(row.detail.partition("\n")[0])).text = _clean(
            row.detail
        )
    elif row.detail:
        ElementTree.SubElement(case, "system-out").text = _clean(f"{row.verdict}: {row.detail}")
    return case


def _waiver(one: JudgedWaiver) -> ElementTree.Element:
    case = ElementTree.Element("testcase", name=one.id, classname="waiver")
    if one.verdict in BAD_WAIVERS:
        ElementTree.SubElement(
            case, "failure", type=one.verdict, message=f"{one.verdict}: {one.owner}, {one.link}, {one.expiry}"
        )
    return case


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)
