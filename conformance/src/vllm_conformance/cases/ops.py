"""L2: every op that something serves here, in every dtype claimed, at the edges of `op_classes`. Planning; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_conformance.case import Case
from vllm_conformance.cases.op_classes import ANY_DTYPE, Run, runs_of, size_of
from vllm_core.api import OPS, DeviceFacts, Offer, Support, is_available

DTYPES = ("float32", "bfloat16", "float16")
PRIVATE = frozenset({"linear_pack", "moe_pack", "kv_bind"})
"""Ops that return the provider's own form; they are judged through the ops that read it."""


def collect(claims: Mapping[str, Support], offers: Sequence[Offer], facts: DeviceFacts) -> Iterator[Case]:
    """One case for each op, dtype, class, layout and seed."""
    claimed = [dtype for dtype in DTYPES if is_available(claims[f"dtype.{dtype}"])]
    served = {op for offer in offers for op in offer.ops}
    for op in OPS:
        if op in served and op not in PRIVATE:
            for dtype in ["any"] if op in ANY_DTYPE else claimed:
                yield from (_case(op, dtype, run) for run in runs_of(op, dtype, claims))


def _case(op: str, dtype: str, run: Run) -> Case:
    params: dict[str, Any] = {"op": op, "dtype": dtype, "shape": run.shape, "seed": run.seed, "layout": run.layout}
    if run.ci and dtype != "float16":
        params["ci"] = True
    return Case(
        id=f"L2/{op}/{dtype}/{run.name}",
        level=2,
        group=f"op:{op}",
        size=size_of(op),
        run="vllm_conformance.cases.runs.ops:run_op",
        params=params,
    )
