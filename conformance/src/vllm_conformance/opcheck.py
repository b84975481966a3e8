"""Runs what a platform offers against core's references: every offered op, dtype and shape class.

A case is judged as the planner would judge its call site first: one that the offer rejects is counted as refused, not
run. The comparison is that of `vllm_core.ops.check`: all arguments and results, within the op's tolerance for the dtype.
Cases run in this process and on host memory, so only platforms whose device is the host can be checked so far.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_core.api import OPS, Accepted, CallSite, Offer, UnsupportedError, load_entry
from vllm_core.errors import UnknownPlatformError, nearest
from vllm_core.registry.candidates import collect
from vllm_core.registry.discover import find
from vllm_core.registry.load import attempt, describe_error
from vllm_core.registry.plan import Candidate

Outcome = Literal["PASS", "FAIL", "CRASH", "REFUSED"]
SEEDS = tuple(range(8))
"""The generators turn their variants (windows, soft caps, biases, KV dtypes) with the seed; eight show all."""

PRIVATE = frozenset({"linear_pack", "kv_bind"})
"""Ops whose result is the provider's own form; they are judged through the ops that read it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run of one op."""

    op: str
    dtype: str
    shape_class: str
    seed: int


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of a case. `detail` says what differed, by position and value, or what was raised."""

    provider: str
    case: Case
    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        case = self.case
        return f"{self.outcome} {self.provider} {case.op} {case.dtype} {case.shape_class} seed {case.seed}: {self.detail}"


def cases(offer: Offer, seeds: Sequence[int] = SEEDS) -> Iterator[Case]:
    """All cases of an offer."""
    from vllm_core.ops.inputs import SHAPE_CLASSES

    for op in offer.ops:
        if op in PRIVATE:
            continue
        dtypes = [dtype for dtype in OPS[op].tolerances if offer.dtypes is None or dtype in offer.dtypes]
        for dtype in dtypes:
            for shape_class in SHAPE_CLASSES[op]:
                for seed in seeds:
                    yield Case(op, dtype, shape_class, seed)


def check_offer(offer: Offer, architecture: str, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Run all cases of an offer; whatever a case raises becomes its row."""
    from vllm_core.ops.check import Provider

    provider = Provider({op: load_entry(entry) for op, entry in offer.ops.items()}, offer.kv_layout)
    for case in cases(offer, seeds):
        yield _run(offer, provider, case, architecture)


def _run(offer: Offer, provider: Any, case: Case, architecture: str) -> Row:
    from vllm_core.ops.check import mismatches

    verdict = offer.judge(site_of(case), architecture)
    if not isinstance(verdict, Accepted):
        return Row(offer.provider, case, "REFUSED", str(verdict))
    result = attempt(lambda: mismatches(case.op, provider, case.dtype, case.seed, case.shape_class))
    if isinstance(result, Exception):
        return Row(offer.provider, case, "CRASH", describe_error(result))
    return Row(offer.provider, case, "FAIL" if result else "PASS", "; ".join(result))


def site_of(case: Case) -> CallSite:
    """The call site that a case stands for, from its generated arguments."""
    from vllm_core.ops.inputs import KVContent

    arguments = OPS[case.op].load_generator()(case.dtype, case.seed, case.shape_class)
    content = next((value for value in arguments if isinstance(value, KVContent)), None)
    return CallSite(
        op=case.op,
        role="conformance",
        dtype=case.dtype,
        kv_dtype=content.dtype if content is not None else None,
        head_size=content.blocks.shape[4] if content is not None else None,
        tokens_per_block=content.blocks.shape[2] if content is not None else None,
        features=_features(case.op, arguments),
    )


def _features(op: str, arguments: Sequence[Any]) -> frozenset[str]:
    """Features of the op's specification that these arguments use; positions are those of its schema."""
    uses: dict[str, Any] = {}
    if op == "paged_attention":
        *_, uses["sliding_window"], uses["soft_cap"] = arguments
    elif op == "rotary_embedding":
        uses["interleaved"] = arguments[4]
    elif op == "qk_norm_rope_kv_write":
        uses["interleaved"] = arguments[8]
    return frozenset(name for name, value in uses.items() if value)


def candidate_of(platform: str) -> Candidate:
    """The installed platform of this name as seen on this machine.

    Raises UnknownPlatformError if it is not installed or failed, UnsupportedError if its device is not the host.
    """
    candidates, failed = collect(only=platform, environ=os.environ)
    named = [one for one in candidates if platform in (one.manifest.name, one.distribution)]
    if not named:
        causes = [str(one) for one in failed if platform in (one.entry_point, one.distribution)]
        raise UnknownPlatformError(
            "No usable platform",
            on=platform,
            found="; ".join(causes) or "no installed distribution has it",
            expected="an installed platform with a device here",
            fix=nearest(platform, [one.platform for one in find()]),
        )
    if named[0].manifest.device_class != "host":
        raise UnsupportedError(
            "This check cannot run",
            on=f"platform {platform}",
            found=f"its device is of class {named[0].manifest.device_class}",
            expected="a platform whose device is the host",
            fix="run the plugin's own tests; cases on accelerators are not there yet",
        )
    return named[0]


def check_platform(candidate: Candidate, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Run all offers of a platform but core's own references."""
    for offer in candidate.offers:
        if offer.kind != "reference":
            yield from check_offer(offer, candidate.devices[0].architecture, seeds)


def passed(rows: Iterable[Row]) -> bool:
    """Whether nothing failed, and every op had a case that ran."""
    rows = list(rows)
    ran = {(row.provider, row.case.op) for row in rows if row.outcome != "REFUSED"}
    return bool(rows) and all(row.outcome in ("PASS", "REFUSED") and (row.provider, row.case.op) in ran for row in rows)


def table(rows: Sequence[Row], most_details: int = 20) -> str:
    """One line per provider and op, then the first cases that failed."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.provider, row.case.op), []).append(row)
    lines = [f"{'provider':16} {'op':22} {'pass':>6} {'fail':>6} {'crash':>6} {'refused':>8}  dtypes"]
    for (provider, op), members in groups.items():
        outcomes = [row.outcome for row in members]
        dtypes = dict.fromkeys(row.case.dtype for row in members if row.outcome != "REFUSED")
        counts = [outcomes.count(name) for name in ("PASS", "FAIL", "CRASH")]
        numbers = " ".join(f"{count:6}" for count in counts)
        lines.append(f"{provider:16} {op:22} {numbers} {outcomes.count('REFUSED'):8}  {', '.join(dtypes) or 'never ran'}")
    bad = [row for row in rows if row.outcome in ("FAIL", "CRASH")]
    lines += [str(row) for row in bad[:most_details]]
    if len(bad) > most_details:
        lines.append(f"... and {len(bad) - most_details} more")
    return "\n".join(lines)
