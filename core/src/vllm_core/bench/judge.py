"""Correctness, computed again from the evidence of result files; a verdict that somebody stored is not looked at.

Two engines may part where the likeliest tokens are nearly tied. Until then, and at that place, their distributions must
agree within the tolerance of their dtypes; after it their contexts differ, and nothing more is compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_core.bench import evidence
from vllm_core.bench.results import Result, Sample
from vllm_core.registry.plan import Plan

TOLERANCE = {"float32": 1e-3, "float16": 0.015, "bfloat16": 0.1, "int8": 0.15, "fp8": 0.4}
"""How far an engine's log-probabilities may be from the truth, by the coarsest of its dtype, its KV cache's and its weights'.
The values by which `vllm-conformance` judges near-ties."""

MOST_TIES = {"float32": 0.02, "float16": 0.05, "bfloat16": 0.15, "int8": 0.2, "fp8": 0.3}
"""Largest share of near-ties among the tokens compared. Dummy weights are nothing but near-ties, and are not held to it."""

MAX_DRAWN = 1 << 26
"""Most tokens of a workload that are drawn again: a file may say anything."""

_EXACT = tuple(TOLERANCE)
"""From the finest to the coarsest."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one rule: `problem` is empty where it holds; `missing` says why it could not be looked at."""

    problem: str = ""
    missing: str = ""
    detail: str = ""


def precision(*results: Result) -> str:
    """The coarsest precision among them, a key of `TOLERANCE`."""
    found = {"float32"}
    for result in results:
        for dtype in (result.plan.dtype, result.plan.kv_dtype):
            found.add(dtype if dtype in TOLERANCE else "fp8" if dtype.startswith("fp8") else "float32")
        # Quantised weights may be decoded, or multiplied with activations rounded to 8 bits: it is the provider's choice.
        if set(result.model.formats) - set(TOLERANCE) or result.config.get("model", {}).get("quantization"):
            found.add("int8")
    return max(found, key=_EXACT.index)


def whole(result: Result) -> Finding:
    """The file's own sums: the digest of its tokens, and of every run the tokens that its workload asks for."""
    found = result.evidence
    if found is None:
        return Finding(problem="the file has no evidence")
    if evidence.digest(found) != found.digest:
        return Finding(problem="tokens do not have the digest that was written with them")
    for row in result.rows:
        for run in (row.first, *row.runs):
            if not 0 < row.workload.requests * row.workload.longest <= MAX_DRAWN:
                return Finding(problem=f"{row.workload.name}: {row.workload.title} is no workload")
            asked = row.workload.draw(run.seed)
            if run.prompt_tokens != sum(len(prompt) for prompt, _ in asked) or run.output_tokens != sum(n for _, n in asked):
                return Finding(problem=f"{row.workload.name}, seed {run.seed}: not the tokens that its workload asks for")
            if any(len(times) != len(asked) for times in (run.queue_s, run.prefill_s, run.decode_s)):
                return Finding(problem=f"{row.workload.name}, seed {run.seed}: not every request has its times")
    return Finding(detail=f"digest {found.digest[:12]}")


def greedy(result: Result) -> Finding:
    """Greedy requests took the likeliest token, and log-probabilities are such."""
    found, tolerance = result.evidence, TOLERANCE[precision(result)]
    assert found is not None, "`whole` came first"
    for number, one in enumerate((*found.alone, *found.together)):
        where = f"sequence {number}"
        if len(one.tokens) != evidence.OUTPUT_TOKENS or not _is_whole(one):
            return Finding(problem=f"{where}: {len(one.tokens)} tokens, {evidence.OUTPUT_TOKENS} were asked for")
        if not all(_is_logprob(value) for value in (*one.logprobs, *one.prompt_logprobs)):
            return Finding(problem=f"{where}: a log-probability that is none")
        behind = [top[0][1] - chosen for top, chosen in zip(one.top, one.logprobs, strict=True)]
        if not one.temperature and max(behind) > tolerance:
            at = behind.index(max(behind))
            return Finding(problem=f"{where}: token {at} is {max(behind):.3g} behind the likeliest")
    return Finding(detail=f"{len(found.alone) + len(found.together)} sequences")


def same(first: Sequence[Sample], second: Sequence[Sample], tolerance: str, *, dummy: bool) -> Finding:
    """Both generated the same for the same requests, but for near-ties."""
    if [(one.prompt, one.temperature, one.seed) for one in first] != [(o.prompt, o.temperature, o.seed) for o in second]:
        return Finding(problem="the requests are not the same")
    limit, ties, drawn, tokens = TOLERANCE[tolerance], 0, 0, 0
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if len(one.tokens) != len(other.tokens) or not _is_whole(one) or not _is_whole(other):
            return Finding(
                problem=f"sequence {number}: {len(one.tokens)} and {len(other.tokens)} tokens, or not all that belongs to them"
            )
        apart = _mean(abs(x - y) for x, y in zip(one.prompt_logprobs, other.prompt_logprobs, strict=False))
        if apart > limit:
            return Finding(problem=f"sequence {number}: log-probabilities of the prompt differ by {apart:.3g}, {limit} may be")
        at = _parting(one.tokens, other.tokens)
        tokens += at
        apart = _mean(_gaps(one, other, at))
        if apart > limit:
            return Finding(problem=f"sequence {number}: log-probabilities differ by {apart:.3g}, {limit} may be")
        if at == len(one.tokens):
            continue
        if one.temperature:
            drawn += 1
            continue
        gap = max(_gap(one, at, other.tokens[at]), _gap(other, at, one.tokens[at]))
        if gap > 2 * limit:
            pair = f"{one.tokens[at]} or {other.tokens[at]}"
            return Finding(problem=f"sequence {number}: token {at} is {pair}, {gap:.3g} apart: no near-tie")
        ties += 1
    most = max(1, int(MOST_TIES[tolerance] * tokens))
    detail = f"{len(first) - ties - drawn} of {len(first)} equal, {ties} part at near-ties, {drawn} where a token was drawn"
    if ties > most and not dummy:
        return Finding(problem=f"{ties} near-ties in {tokens} tokens, at most {most} may be")
    return Finding(detail=detail)


def longest(result: Result) -> Finding:
    """The context was filled to its end."""
    assert result.evidence is not None, "`whole` came first"
    found = result.evidence.longest
    if found.prompt_tokens != max(1, result.max_model_len - evidence.LONGEST_OUTPUT):
        return Finding(problem=f"a prompt of {found.prompt_tokens} tokens in a context of {result.max_model_len}")
    if (
        len(found.tokens) != evidence.LONGEST_OUTPUT
        or found.finish_reason != "length"
        or not all(map(_is_logprob, found.logprobs))
    ):
        return Finding(problem=f"{len(found.tokens)} tokens, finished by {found.finish_reason or 'nothing'}")
    return Finding(detail=f"{found.prompt_tokens} + {len(found.tokens)}")


def same_longest(a: Result, b: Result) -> Finding:
    """At the end of equal contexts both say the same, but for near-ties."""
    assert a.evidence is not None, "`whole` came first"
    assert b.evidence is not None, "`whole` came first"
    first, second = a.evidence.longest, b.evidence.longest
    if first.prompt_tokens != second.prompt_tokens:
        return Finding(missing=f"contexts of {a.max_model_len} and {b.max_model_len} tokens")
    if not len(first.tokens) == len(second.tokens) == len(first.logprobs) == len(second.logprobs):
        return Finding(problem=f"{len(first.tokens)} and {len(second.tokens)} tokens")
    limit = TOLERANCE[precision(a, b)]
    at = _parting(first.tokens, second.tokens)
    apart = _mean(abs(x - y) for x, y in zip(first.logprobs[: at + 1], second.logprobs[: at + 1], strict=True))
    if apart > 2 * limit:
        return Finding(problem=f"log-probabilities differ by {apart:.3g}, {2 * limit:g} may be")
    return Finding(detail=f"{at} of {len(first.tokens)} tokens equal")


def tool_call(result: Result) -> Finding:
    """The call parses, and is one of the tool that was offered."""
    assert result.evidence is not None, "`whole` came first"
    found = result.evidence.tool_call
    if found.missing:
        return Finding(missing=found.missing)
    try:
        call = json.loads(found.text)
    except (ValueError, RecursionError) as error:
        return Finding(problem=f"{found.text[:60]!r}: {error}")
    is_call = isinstance(call, dict) and call.get("name") == evidence.TOOL_NAME
    arguments = call.get("arguments") if is_call else None
    if not isinstance(arguments, dict) or arguments.get("city") not in evidence.CITIES:
        return Finding(problem=f"{found.text[:60]!r} is no call of {evidence.TOOL_NAME}")
    if type(arguments.get("days")) is not int:
        return Finding(problem=f"{found.text[:60]!r}: days is no integer")
    return Finding(detail=f"{evidence.TOOL_NAME}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})")


def fallback(result: Result) -> Finding:
    """Nothing in the Plan was demoted or runs on the host beside the device. References are named."""
    plan = result.plan
    if plan.demotions:
        last = plan.demotions[-1]
        return Finding(problem=f"{last.op} ({last.role}): {last.provider} failed, {last.replacement} took over")
    host = [one.op for one in plan.bindings if one.kind == "host"]
    if host:
        return Finding(problem=f"on the host: {', '.join(host)}")
    count = len(_references(plan))
    return Finding(detail=f"{count} of {len(plan.bindings)} call sites by reference" if count else "none")


def new_references(a: Result, b: Result) -> Finding:
    """No call site went back from a provider of its own to core's reference."""
    own = {(one.op, one.role) for one in a.plan.bindings} - _references(a.plan)
    lost = sorted(own & _references(b.plan))
    if lost:
        return Finding(problem=f"now by reference: {', '.join(f'{op} ({role})' for op, role in lost)}")
    return Finding(detail="none")


def _references(plan: Plan) -> set[tuple[str, str]]:
    return {(one.op, one.role) for one in plan.bindings if one.kind == "reference"}


def _is_whole(one: Sample) -> bool:
    return len(one.tokens) == len(one.logprobs) == len(one.top) and all(one.top)


def _is_logprob(value: float) -> bool:
    return math.isfinite(value) and value <= 1e-3  # rounding may leave a certainty slightly above 0


def _parting(first: Sequence[int], second: Sequence[int]) -> int:
    """The first position at which they differ, or their length."""
    return next((at for at, (x, y) in enumerate(zip(first, second, strict=True)) if x != y), len(first))


def _gaps(one: Sample, other: Sample, at: int) -> Iterator[float]:
    """By how much log-probabilities of tokens that both list differ, up to where they part, that place included."""
    for mine, theirs in zip(one.top[: at + 1], other.top[: at + 1], strict=True):
        known = dict(theirs)
        yield from (abs(value - known[token]) for token, value in mine if token in known)


def _gap(one: Sample, at: int, token: int) -> float:
    """How far ``token``, which the other took, is behind the one taken here; what is not listed is behind all that is."""
    listed = dict(one.top[at])
    return one.logprobs[at] - listed.get(token, min(listed.values(), default=-math.inf))


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
