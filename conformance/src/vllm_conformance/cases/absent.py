"""Capabilities declared absent, which are run too: refused by offers, by direct calls, and while planning. Imports no torch.

A device's capabilities are forced at L1, those of ops at L2, and all are asked of the planner, with ``strict``, at L3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_conformance.case import Case
from vllm_core.api import CAPABILITIES, DeviceFacts, Offer, Support, is_available

DEVICE = ("graphs", "sleep", "peer_copy", "parallel.tensor")
OPS = (
    *("dtype.float32", "dtype.bfloat16", "dtype.float16", "kv_dtype.fp8", "kv_dtype.int8", "attention.sliding_window"),
    *("attention.soft_cap", "attention.sinks", "attention.encoder", "quantization.weight_only"),
    "quantization.fp8_activation",
)
"""Those that a call site can ask for."""


def collect(claims: Mapping[str, Support], offers: Sequence[Offer], facts: DeviceFacts) -> Iterator[Case]:
    """Cases of every capability whose claim says absent."""
    for name in CAPABILITIES:
        if not is_available(claims[name]):
            if name in DEVICE:
                yield _case(1, name, "on_device")
            if name in OPS:
                yield _case(2, name, "on_ops")
            yield _case(3, name, "while_planning")


def _case(level: int, name: str, how: str) -> Case:
    run = f"vllm_conformance.cases.runs.absent:{how}"
    params = {"capability": name, "ci": True}
    return Case(f"L{level}/absent/{name}", level, f"capability:{name}", "large", run, params)
