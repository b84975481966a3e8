"""What a run is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_conformance.case import TIME_LIMITS_S, Size
from vllm_conformance.collect import PACKAGE
from vllm_conformance.lists import FOLDER
from vllm_conformance.waivers import Waiver


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to run. `only` are patterns of ids, `maxfail` a number of bad rows to stop at: both leave the run INCOMPLETE."""

    platform: str
    level: int = 5
    subset: str | None = None
    device: str | None = None
    jobs: int = 2
    only: tuple[str, ...] = ()
    maxfail: int | None = None
    waivers: tuple[Waiver, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    limits_s: Mapping[Size, float] = field(default_factory=lambda: TIME_LIMITS_S)
    cases: str = PACKAGE
    lists: Path = FOLDER
