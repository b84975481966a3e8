"""Gathers the cases of all levels from the modules of `vllm_conformance.cases`. Touches no device."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from vllm_conformance.case import TIME_LIMITS_S, Case
from vllm_core.errors import ConfigError

if TYPE_CHECKING:
    from vllm_core.api import DeviceFacts, Offer, Support

LEVELS = (0, 1, 2, 3, 4, 5)
PACKAGE = "vllm_conformance.cases"


def case_modules(package: str = PACKAGE) -> tuple[ModuleType, ...]:
    """The modules of a package that define `collect`, by name."""
    root = import_module(package)
    names = sorted(info.name for info in pkgutil.iter_modules(root.__path__, f"{package}."))
    return tuple(module for module in map(import_module, names) if hasattr(module, "collect"))


def collect(
    claims: Mapping[str, Support],
    offers: Sequence[Offer],
    facts: DeviceFacts,
    *,
    modules: Iterable[ModuleType] | None = None,
) -> tuple[Case, ...]:
    """All cases, by level and then as their modules give them. Raises ConfigError for two of one id, or a wrong one."""
    cases = list(_collected(claims, offers, facts, case_modules() if modules is None else modules))
    seen: set[str] = set()
    for case in cases:
        problem = _problem(case, seen)
        if problem:
            raise ConfigError(
                "Cases cannot be collected",
                on=f"case {case.id!r} of {case.run}",
                found=problem,
                expected="unique ids that begin with their level",
                fix="correct the module that generates it",
            )
        seen.add(case.id)
    return tuple(sorted(cases, key=lambda case: case.level))


def _collected(
    claims: Mapping[str, Support], offers: Sequence[Offer], facts: DeviceFacts, modules: Iterable[ModuleType]
) -> Iterator[Case]:
    for module in modules:
        yield from module.collect(claims, offers, facts)


def _problem(case: Case, seen: set[str]) -> str:
    if case.id in seen:
        return "its id is not unique"
    if case.level not in LEVELS or not case.id.startswith(f"L{case.level}/"):
        return f"its id does not begin with L{case.level}/"
    if case.size not in TIME_LIMITS_S:
        return f"no such size: {case.size}"
    if any(character.isspace() for character in case.id):
        return "its id has white space"
    return ""
