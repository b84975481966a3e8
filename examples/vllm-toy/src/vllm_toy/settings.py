"""Variables of the environment that make the device: how large it is, and how it fails. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vllm_core.api import OPS, UnsupportedError

NUM_DEVICES = 2
LINK_BYTES_PER_S = 500e6
KINDS = ("oom", "hang", "crash", "wrong")


@dataclass(frozen=True, slots=True)
class Fault:
    """How the device is to fail: at the allocation or launch ``number``, or at the op named ``op``."""

    kind: str
    op: str
    number: int


def visible() -> tuple[int, ...]:
    """Indices of the visible devices, of two: `VLLM_TOY_VISIBLE_DEVICES`; an empty value hides both."""
    value = os.environ.get("VLLM_TOY_VISIBLE_DEVICES", "0,1")
    return tuple(index for index in range(NUM_DEVICES) if str(index) in value.split(","))


def memory_bytes() -> int:
    """`VLLM_TOY_MEMORY_MIB`, for each device."""
    return int(os.environ.get("VLLM_TOY_MEMORY_MIB", "2048")) << 20


def blocking() -> bool:
    """`VLLM_TOY_BLOCKING=1` runs each launch at once: a failure is raised where it was launched."""
    return os.environ.get("VLLM_TOY_BLOCKING") == "1"


def faults() -> list[Fault]:
    """`VLLM_TOY_FAIL`: ``oom:N``, ``hang:N``, ``crash:N``, ``hang:OP``, ``crash:OP``, ``wrong:OP``, separated by commas.

    Raises UnsupportedError for anything else.
    """
    return [_parse(one) for one in os.environ.get("VLLM_TOY_FAIL", "").split(",") if one]


def _parse(text: str) -> Fault:
    kind, _, what = text.partition(":")
    number = int(what) if what.isdecimal() else 0
    if kind not in KINDS or (kind == "oom" and not number) or (kind == "wrong" and number) or not (number or what in OPS):
        raise UnsupportedError(
            "Failure cannot be simulated",
            on="VLLM_TOY_FAIL",
            found=text,
            expected="oom:N, hang:N, crash:N, hang:OP, crash:OP or wrong:OP",
            fix="name a number from 1 on, or an op of vllm_core.api.OPS",
        )
    return Fault(kind, "" if number else what, number)
