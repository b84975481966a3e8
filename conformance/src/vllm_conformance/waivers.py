"""`waivers.toml`: what a platform is known to fail, who looks after it, where, and until when.

    [[waiver]]
    id = "L2/paged_attention/float16/long/*"   # of a case; * stands for anything
    link = "https://example.org/issues/7"
    owner = "jane@example.org"
    expiry = 2027-03-31                        # the last day on which it counts

A waiver that covers a case that is good is STALE, one that covers none UNMATCHED, one past its day EXPIRED: all are bad.
"""

from __future__ import annotations

import sys
from datetime import date, datetime
from pathlib import Path
from typing import Any

import msgspec

from vllm_core.errors import ConfigError, UnknownOptionError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 1 << 20
_FIELDS = ("id", "link", "owner", "expiry")


class Waiver(msgspec.Struct, frozen=True, kw_only=True):
    """One waiver. `id` is that of a case or a pattern of them; it begins with the level."""

    id: str
    link: str
    owner: str
    expiry: date

    @property
    def level(self) -> int:
        """Of the cases that it covers."""
        return int(self.id[1])


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Read a file of waivers. Raises ConfigError, or UnknownOptionError for a key that does not exist."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _wrong(path, f"more than {MAX_BYTES} bytes")
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _wrong(path, str(error)) from error
    _check_keys(path, data, ("waiver",))
    tables = data.get("waiver", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _wrong(path, "waiver is no array of tables")
    waivers = tuple(_waiver(path, table) for table in tables)
    ids = [waiver.id for waiver in waivers]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise _wrong(path, f"two waivers of id {twice[0]!r}")
    return waivers


def _waiver(path: Path, table: dict[str, Any]) -> Waiver:
    _check_keys(path, table, _FIELDS)
    missing = [name for name in _FIELDS if name not in table]
    if missing:
        raise _wrong(path, f"waiver {table.get('id', '?')!r} lacks {', '.join(missing)}")
    for name in ("id", "link", "owner"):
        if not isinstance(table[name], str) or not table[name].strip():
            raise _wrong(path, f"waiver {table['id']!r}: {name} is {table[name]!r}")
    if table["id"][:1] != "L" or table["id"][1:2] not in set("012345") or table["id"][2:3] != "/":
        raise _wrong(path, f"waiver {table['id']!r}: an id begins with its level, like L2/")
    if not isinstance(table["expiry"], date) or isinstance(table["expiry"], datetime):
        raise _wrong(path, f"waiver {table['id']!r}: expiry is {table['expiry']!r}, no date")
    return Waiver(**table)


def _check_keys(path: Path, table: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise UnknownOptionError(
            "Unknown key",
            on=f"{unknown[0]} in {path}",
            found="no such key",
            expected="a key of a waiver",
            fix=nearest(unknown[0], known),
        )


def _wrong(path: Path, found: str) -> ConfigError:
    return ConfigError(
        "File of waivers cannot be read",
        on=str(path),
        found=found,
        expected="[[waiver]] tables with id, link, owner and expiry (a date)",
        fix="see docs/conformance.md",
    )
