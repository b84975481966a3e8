"""What other engines of this kind have under a name that is not here, and what there is instead: `elsewhere.toml`.

Read only where a name was not found: who comes from vLLM learns why, which the nearest of our names would not tell.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

Kind = Literal["options", "values", "fields", "paths"]


@cache
def _table() -> dict[str, dict[str, str]]:
    tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return found


def instead(kind: Kind, name: str) -> str | None:
    """What there is instead of ``name``, or None for a name that is unknown there too.

    Options are named as on the command line without leading dashes; underscores and a leading ``no-`` make no difference.
    """
    if kind == "options":
        name = name.lstrip("-").replace("_", "-").removeprefix("no-")
    table = _table()[kind]
    if name in table:
        return table[name]
    starts = [one for one in table if one.endswith("*") and name.startswith(one[:-1])]
    return table[max(starts, key=len)] if starts else None
