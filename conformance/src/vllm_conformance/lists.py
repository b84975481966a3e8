"""The must-pass lists: which case is required, level by level, and under which conditions. Files with hashes, in `lists/`.

A list is text: a line in brackets gives conditions, the ids below it are required where all of them hold.

    [op:rms_norm +dtype.bfloat16]
    L2/rms_norm/bfloat16/one_token/seed0 ci

``+NAME`` holds where the capability is claimed, ``-NAME`` where it is declared absent, ``op:NAME`` where something serves the
op here, ``references`` where core's references may run. A word behind an id names a subset to which it belongs. The lists are
derived from the cases' generators by `derive`: what vanishes from, or comes into, the collection when one claim or service is
taken away has that condition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_conformance.case import Case
from vllm_core.errors import ConfigError
from vllm_core.registry.validate import REFERENCE

FOLDER = Path(__file__).parent / "lists"
SUMS = "SHA256SUMS"
SUBSETS = ("ci",)
REFERENCES = "references"

Conditions = frozenset[str]


@dataclass(frozen=True, slots=True)
class Entry:
    """A required case."""

    id: str
    conditions: Conditions
    subsets: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MustPass:
    """One level's list and its hash."""

    level: int
    sha256: str
    entries: tuple[Entry, ...]

    def required(self, conditions: Conditions, subset: str | None = None) -> tuple[str, ...]:
        """Ids that must be good where these conditions hold."""
        return tuple(
            one.id for one in self.entries if one.conditions <= conditions and (subset is None or subset in one.subsets)
        )


def conditions_of(absent: Mapping[str, bool], providers: Mapping[str, Iterable[str]]) -> Conditions:
    """Conditions that hold for a platform: for each capability whether its claim says absent, and who serves which op."""
    claims = {f"{'-' if gone else '+'}{name}" for name, gone in absent.items()}
    references = {REFERENCES} if any(REFERENCE in names for names in providers.values()) else set()
    return frozenset(claims | references | {f"op:{op}" for op in providers})


def to_text(entries: Iterable[Entry]) -> str:
    """The file of a list."""
    sections: dict[str, list[str]] = {}
    for entry in entries:
        head = " ".join(sorted(entry.conditions))
        sections.setdefault(head, []).append(" ".join([entry.id, *sorted(entry.subsets)]))
    lines: list[str] = []
    for head in sorted(sections):
        lines += [f"[{head}]", *sorted(sections[head]), ""]
    return "\n".join(lines)


def from_text(text: str) -> tuple[Entry, ...]:
    """Read what `to_text` wrote."""
    entries: list[Entry] = []
    conditions: Conditions = frozenset()
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            conditions = frozenset(line.strip("[]").split())
        else:
            one, *subsets = line.split()
            entries.append(Entry(one, conditions, frozenset(subsets)))
    return tuple(entries)


def read_lists(folder: Path = FOLDER) -> Mapping[int, MustPass]:
    """The lists by level. Raises ConfigError for one that is missing or is not the one that was shipped."""
    lists = {}
    try:
        sums = [line.split("  ") for line in (folder / SUMS).read_text("ascii").splitlines()]
        for expected, name in sums:
            data = (folder / name).read_bytes()
            found = hashlib.sha256(data).hexdigest()
            if found != expected:
                raise _wrong(folder / name, f"SHA-256 {found}", expected)
            level = int(name[1])
            lists[level] = MustPass(level, found, from_text(data.decode("ascii")))
    except (OSError, ValueError) as error:
        raise _wrong(folder, str(error), "the lists of this version") from error
    return lists


def write_lists(files: Mapping[str, str], folder: Path = FOLDER) -> None:
    """Write lists and their hashes."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, "ascii")
    sums = [f"{hashlib.sha256(text.encode('ascii')).hexdigest()}  {name}\n" for name, text in sorted(files.items())]
    (folder / SUMS).write_text("".join(sums), "ascii")


def _wrong(path: Path, found: str, expected: str) -> ConfigError:
    return ConfigError(
        "Must-pass list is not the one that was shipped",
        on=str(path),
        found=found,
        expected=expected,
        fix="reinstall vllm-conformance; in a checkout, python tools/conformance_files.py",
    )


def derive(
    collect: Callable[[frozenset[str], frozenset[str]], Iterable[Case]],
    capabilities: Iterable[str],
    services: Iterable[str],
) -> Mapping[int, tuple[Entry, ...]]:
    """Lists from a collection: ``collect(absent claims, services)`` gives the cases of such a platform.

    ``services`` are the conditions that speak of ops: ``op:NAME``, and ``references``.
    """
    names, served = tuple(capabilities), frozenset(services)

    @cache
    def ids(absent: frozenset[str], without: str = "") -> Mapping[str, Case]:
        return {case.id: case for case in collect(absent, served - {without})}

    everything = ids(frozenset())
    found: dict[str, tuple[Case, set[str]]] = {one: (case, set()) for one, case in everything.items()}
    for name in names:
        changed = ids(frozenset({name}))
        for one in everything.keys() - changed.keys():
            found[one][1].add(f"+{name}")
        for one in changed.keys() - everything.keys():
            others = {f"+{other}" for other in names if other != name and one not in ids(frozenset({name, other}))}
            needed = {service for service in served if one not in ids(frozenset({name}), service)}
            found[one] = changed[one], {f"-{name}"} | others | needed
    for service in served:
        for one in everything.keys() - ids(frozenset(), service).keys():
            found[one][1].add(service)
    levels: dict[int, list[Entry]] = {}
    for one, (case, conditions) in found.items():
        subsets = frozenset(subset for subset in SUBSETS if case.params.get(subset) is True)
        levels.setdefault(case.level, []).append(Entry(one, frozenset(conditions), subsets))
    return {level: tuple(entries) for level, entries in sorted(levels.items())}
