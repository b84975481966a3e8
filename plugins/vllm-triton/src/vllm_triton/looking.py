"""The checks that a probe makes, written down as it makes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_core.api import Check


@dataclass
class Looking:
    """`checks` in their order."""

    checks: list[Check] = field(default_factory=list)

    def ok(self, name: str, detail: str) -> None:
        """It is as it should be."""
        self.checks.append(Check(name=name, outcome="ok", detail=detail))

    def failed(self, name: str, detail: str, hint: str) -> None:
        """It keeps devices from being used."""
        self.checks.append(Check(name=name, outcome="failed", detail=detail, hint=hint))

    def skipped(self, name: str, detail: str, hint: str = "") -> None:
        """It is not there, and not needed."""
        self.checks.append(Check(name=name, outcome="skipped", detail=detail, hint=hint))
