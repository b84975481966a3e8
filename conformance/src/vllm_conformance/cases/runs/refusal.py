"""Judging a refusal: it names its reason, a forced call raises UnsupportedError, and the device is usable after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_conformance.case import Evidence, Outcome, Subject
from vllm_core.api import Rejected, UnsupportedError

if TYPE_CHECKING:
    from vllm_core.api import Device

Attempt = tuple[str, Rejected, Callable[[], list[str]] | None]
"""Who refuses, how, and the direct call, if there is one: it returns what was wrong with its results."""


def refused(subject: Subject, attempts: Sequence[Attempt]) -> Evidence:
    """Force every attempt. UNDERCLAIMED where the results are right, BAD_REFUSAL where it fails in another way."""
    if not attempts:
        return Evidence(outcome="BAD_REFUSAL", detail="nobody offers it, and nobody says why")
    worst = Evidence(outcome="REFUSED", detail="; ".join(f"{who}: {verdict}" for who, verdict, _ in attempts))
    for who, verdict, call in attempts:
        outcome, detail = forced(call) if call is not None else ("REFUSED", "")
        if outcome != "REFUSED" and worst.outcome == "REFUSED":
            worst = Evidence(outcome=outcome, detail=f"{who} rejects it ({verdict}), and a direct call {detail}")
    unusable = unusable_after(subject.device)
    if unusable:
        return Evidence(outcome="BAD_REFUSAL", detail=f"{worst.detail}; afterwards {unusable}")
    return worst


def forced(call: Callable[[], list[str]]) -> tuple[Outcome, str]:
    """What a direct call of something that is declared absent did."""
    try:
        problems = call()
    except UnsupportedError as error:
        return "REFUSED", f"raised {error.what}"
    except Exception as error:  # noqa: BLE001 - any other exception is the finding
        text = " ".join(str(error).split())[:300]
        return "BAD_REFUSAL", f"raised {type(error).__name__} instead of UnsupportedError: {text}"
    if problems:
        return "BAD_REFUSAL", f"gave wrong results instead of UnsupportedError: {problems[0]}"
    return "UNDERCLAIMED", "gave right results"


def unusable_after(device: Device) -> str:
    """Copy something there and back; says what is wrong, or nothing."""
    import torch

    values = torch.arange(64, dtype=torch.float32)
    try:
        there = device.allocate("workspace", (64,), torch.float32)
        there.copy_(values)
        device.synchronize()
        back = there.to("cpu")
        device.release("workspace")
    except Exception as error:  # noqa: BLE001 - whatever it raises, the device cannot be used
        return f"the device raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if torch.equal(back, values) else "the device copies wrongly"
