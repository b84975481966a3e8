"""What `plugin check` says: one finding a rule and object, in the four parts of an error."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_core.api.manifest import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of one rule on one object.

    `ok`: it holds, and `found` says what was seen. `failed`: a fault, with what was expected and the fix. `skipped`: could not
    be decided here, or is a gap that the author knows of; `found` says why.
    """

    rule: str
    outcome: Outcome
    on: str
    found: str
    expected: str = ""
    fix: str = ""

    def __str__(self) -> str:
        if self.outcome != "failed":
            return f"{self.rule}: {self.on}: {self.found}"
        return f"{self.rule}: {self.on}\n  found:    {self.found}\n  expected: {self.expected}\n  fix:      {self.fix}"


def ok(rule: str, on: str, found: str) -> Finding:
    """The rule holds."""
    return Finding(rule=rule, outcome="ok", on=on, found=found)


def failed(rule: str, on: str, found: str, *, expected: str, fix: str) -> Finding:
    """The rule is broken."""
    return Finding(rule=rule, outcome="failed", on=on, found=found, expected=expected, fix=fix)


def skipped(rule: str, on: str, found: str, *, fix: str = "") -> Finding:
    """Not decided here, or a gap."""
    return Finding(rule=rule, outcome="skipped", on=on, found=found, fix=fix)
