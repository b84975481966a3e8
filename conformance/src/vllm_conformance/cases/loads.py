"""L0: what `vllm-core plugin check` finds, a case a topic. Needs no hardware beyond what the probe looks at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from vllm_conformance.case import Case, Evidence, Subject
from vllm_core.api import DeviceFacts, Offer, Support
from vllm_core.authoring.check import check
from vllm_core.authoring.finding import Finding

# Rules of a topic, by the first words of their names. What fits none belongs to the first topic, so that nothing is lost.
TOPICS: Mapping[str, tuple[str, ...]] = {
    "loads": ("import", "hooks"),
    "installed": ("entry point", "metadata", "versions"),
    "sources": ("source", "imports", "patches", "written"),
    "manifest": ("manifest", "claims", "architectures"),
    "configure": ("configure",),
    "probe": ("probe",),
    "offers": ("offers", "entry", "signature", "ops"),
}

LIMIT_S = 300.0
"""Longer than a case may take where the processors are free: its own limit, which knows whether they are, ends it before."""


def collect(claims: Mapping[str, Support], offers: Sequence[Offer], facts: DeviceFacts) -> Iterator[Case]:
    """The same for every platform."""
    for topic in TOPICS:
        yield Case(f"L0/{topic}", 0, f"loads:{topic}", "medium", f"{__name__}:run_topic", {"topic": topic, "ci": True})


def topic_of(rule: str) -> str:
    """The topic that a rule belongs to: that of the longest words that fit."""
    fits = [(len(words), topic) for topic, starts in TOPICS.items() for words in starts if f"{rule} ".startswith(f"{words} ")]
    return max(fits)[1] if fits else next(iter(TOPICS))


def run_topic(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """What was found on the topic; it fails with what failed."""
    findings = [one for one in _findings(subject.found.key) if topic_of(one.rule.partition(":")[0]) == params["topic"]]
    failed = [f"{one.rule}: {one.on}: {one.found}; expected {one.expected}" for one in findings if one.outcome == "failed"]
    return Evidence("FAIL" if failed else "PASS", "; ".join(failed or [f"{one.rule}: {one.found}" for one in findings]))


@cache
def _findings(key: str) -> tuple[Finding, ...]:
    found = check(key, os.environ, timeout_s=LIMIT_S)
    return tuple(finding for one in found for finding in one.findings)
