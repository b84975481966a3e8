"""One start, measured from inside: ``python -m vllm_core.bench.start_child`` with an `Order` on standard input."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_core.bench.workloads import Workload

if TYPE_CHECKING:
    from vllm_core.llm import LLM

ENTERED = time.monotonic()
"""The interpreter is up, and nothing of the engine is imported."""

Curve = list[tuple[float, int]]
"""(seconds since requests were handed over, tokens generated so far)."""

SHARE = 0.8
PARTS = 10
MOST_POINTS = 200


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to start, and where to write the `Started`. `spawned` is the parent's monotonic clock, which is the machine's."""

    spawned: float
    name: str
    options: dict[str, Any]
    workload: Workload
    out: str


def main() -> int:
    """Start, run the workload at once, run it again, report. Returns the exit status."""
    from vllm_core.errors import VLLMCoreError

    try:
        _report(msgspec.json.decode(sys.stdin.buffer.read(), type=Order))
    except VLLMCoreError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_status
    return 0


def _report(order: Order) -> None:
    from vllm_core.llm import LLM

    imported = time.monotonic()
    llm = LLM(**order.options)
    accepts = time.monotonic()
    from vllm_core.bench import surroundings
    from vllm_core.bench.measure import fitted
    from vllm_core.bench.results import Result, Start, Started

    workload = fitted(order.workload, llm)
    first, steady = curve(llm, workload, 0), curve(llm, workload, 1)
    built = accepts - imported
    stages = {"interpreter": ENTERED - order.spawned, "imports": imported - ENTERED}
    stages |= {"plan": built - sum(llm.timings.values())} | {name.removesuffix("_s"): s for name, s in llm.timings.items()}
    reached, ready = full_speed(first, steady), accepts - order.spawned
    start = Start(
        stages=stages,
        accepts_s=ready,
        first_token_s=ready + next(at for at, count in first if count),
        full_speed_s=None if reached is None else ready + reached,
        first_share=steady[-1][0] * first[-1][1] / (first[-1][0] * steady[-1][1]),
        tokens=thinned(first),
        steady=thinned(steady),
    )
    design = llm._engine.blueprint
    result = Result(
        kind="startup",
        model=surroundings.model_facts(design, order.name),
        environment=surroundings.environment(),
        plan=llm.plan,
        config=design.config.model_dump(mode="json"),
        max_model_len=llm.max_model_len,
        timings=dict(llm.timings),
    )
    llm.shutdown()
    Path(order.out).write_bytes(msgspec.json.encode(Started(start=start, result=result)))


def curve(llm: LLM, workload: Workload, seed: int) -> Curve:
    """Run the workload once and note after each step how many tokens there are."""
    from vllm_core.bench.measure import sampling

    requests = [(prompt, sampling(workload, count)) for prompt, count in workload.draw(seed)]
    before, found = llm.get_metrics().generation_tokens, [(0.0, 0)]
    started = time.monotonic()
    with llm.open_batch(requests) as batch:
        while batch.has_work:
            batch.advance()
            found.append((time.monotonic() - started, llm.get_metrics().generation_tokens - before))
    return found


def full_speed(first: Curve, steady: Curve) -> float | None:
    """Seconds into the first run at which a tenth of its tokens began that came at 80 % of the steady rate of that tenth.

    A tenth is compared with the same tenth, because a batch slows down as its requests end. None where no tenth did.
    """
    for part in range(PARTS):
        begin, end = (_when(first, (part + more) / PARTS) for more in (0, 1))
        usual = _when(steady, (part + 1) / PARTS) - _when(steady, part / PARTS)
        work = first[-1][1] / steady[-1][1]
        if end - begin <= usual * work / SHARE:
            return begin
    return None


def _when(found: Curve, share: float) -> float:
    """When so large a share of the tokens was there."""
    wanted = share * found[-1][1]
    return next(at for at, count in found if count >= wanted)


def thinned(found: Curve) -> Curve:
    """Some of the points, the last among them."""
    every = max(1, -(-len(found) // MOST_POINTS))
    return [(round(at, 5), count) for at, count in (*found[:-1][::every], found[-1])]


if __name__ == "__main__":
    sys.exit(main())
