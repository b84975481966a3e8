"""Versions that belong together, and the sentence that refuses one that does not, with both numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wrong:
    """What was found and what was expected."""

    found: str
    expected: str

    def __str__(self) -> str:
        return f"found {self.found}, expected {self.expected}"


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 1, 7) of ``0.1.7.post2``, (2, 13, 0) of ``2.13.0+xpu``."""
    parts: list[int] = []
    for part in version.replace("+", ".").replace("-", ".").split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def outside(
    name: str, version: str, first: tuple[int, ...], below: tuple[int, ...] | None = None, why: str = ""
) -> Wrong | None:
    """What is wrong with ``version`` of ``name``; None where it is at least ``first`` and below ``below``."""
    found = numbers(version)
    if first <= found and (below is None or found < below):
        return None
    low = ".".join(map(str, first))
    wanted = f"{name} {low} or newer" if below is None else f"{name} >={low},<{'.'.join(map(str, below))}"
    return Wrong(f"{name} {version}", f"{wanted} {why}".rstrip())
