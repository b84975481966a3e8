"""Who sent the request that is being served, until when it must be answered, and what it is part of."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from vllm_core.serve.errors import HTTPRequestError

DEADLINE_HEADER = "x-request-timeout-s"


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant` is the number of the key, never the key; `deadline` is in the event loop's time, `trace` a span's context."""

    request_id: str = ""
    tenant: str = ""
    deadline: float | None = None
    trace: Any = None


_NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller of the request", default=_NOBODY)
"""Set for each HTTP request before its endpoint runs."""


def deadline_of(headers: Headers, longest_s: float | None) -> float | None:
    """When the request ends at the latest: the sooner of what the client and the server allow. Raises HTTPRequestError."""
    text = headers.get(DEADLINE_HEADER)
    seconds = longest_s
    if text is not None:
        asked = _seconds(text)
        seconds = asked if longest_s is None else min(asked, longest_s)
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


def _seconds(text: str) -> float:
    try:
        value = float(text) if len(text) < 32 else 0.0
    except ValueError:
        value = 0.0
    if 0 < value < 1e7:
        return value
    raise HTTPRequestError(
        "Deadline cannot be read",
        on=DEADLINE_HEADER,
        found=repr(text[:32]),
        expected="seconds above 0",
        fix="send a number of seconds, or leave the header out",
    )
