"""Versions as numbers."""

from __future__ import annotations


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 1, 7) of ``0.1.7.post2``, (2, 13, 0) of ``2.13.0+xpu``."""
    parts: list[int] = []
    for part in version.replace("+", ".").replace("-", ".").split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)
