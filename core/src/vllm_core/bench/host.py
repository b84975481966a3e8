"""`bench host`: what the host spends on a step, with a model that computes nothing.

Everything else is real: `LLM` and its loop, scheduling, packing, `batch_update`, `build_step`, `sample`, `advance` and
copies through bound calls, sampling parameters, stop checks, metrics, and detokenising beside it.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_core.models.null import TOKEN
from vllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_core.llm import LLM

PROMPT_TOKENS = 16
CONTEXT = 2048
WARM_STEPS = 8

OPS = {
    "_batch_update": "batch_update",
    "_build_step": "build_step",
    "_gather": "gather_rows",
    "_adjust": "logit_adjust",
    "_sample": "sample",
    "_logprobs": "log_probabilities",
    "_advance": "advance",
}
"""Where core's step program keeps the callables that it bound."""

STAGES = ("schedule", "program", "complete", "postprocess")
Place = tuple[object, str, str]
"""An owner, the attribute that holds a callable, and the name to show."""


@dataclass(frozen=True, slots=True)
class HostRow:
    """Microseconds with so many running and waiting.

    A step's wall time: median, and 5 % to 95 %. `cpu_us` is the thread's own time, which tells the engine's cost from other
    users of the machine. `stages_us` is the time in each stage of a step, `ops_us` that of a call of each bound op and of the
    model's forward and logits, `op_calls` their number in a step; all are medians. `detokenize_us` is decoding a token of
    each running request as it comes, which `generate` leaves to the end of a sequence. `admit_us` is the prefill of a request.
    """

    running: int
    waiting: int
    steps: int
    median_us: float
    p05_us: float
    p95_us: float
    cpu_us: float
    stages_us: dict[str, float]
    ops_us: dict[str, float]
    op_calls: dict[str, float]
    detokenize_us: float
    admit_us: float


def write_null_model(folder: Path) -> Path:
    """Write a model that computes nothing and a byte tokenizer, so that text is decoded for real."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["NullForCausalLM"],
        "model_type": "null",
        "vocab_size": len(alphabet),
        "max_position_embeddings": CONTEXT,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def measure(running: int, waiting: int, steps: int, **options: Any) -> HostRow:
    """Fill an engine, then time the steps of its loop while every running request decodes one token a step."""
    from vllm_core.llm import LLM

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write_null_model(Path(folder))),
            load_format="dummy",
            max_num_seqs=running,
            max_num_batched_tokens=max(2048, running * PROMPT_TOKENS),
            kv_cache_memory_bytes=1 << 28,
            **options,
        )
        try:
            return _measure(llm, running, waiting, steps)
        finally:
            llm.shutdown()


def _measure(llm: LLM, running: int, waiting: int, steps: int) -> HostRow:
    params = SamplingParams(temperature=0.0, max_tokens=CONTEXT - PROMPT_TOKENS, ignore_eos=True)
    prompts = [[i % 251] * PROMPT_TOKENS for i in range(running + waiting)]
    loop = llm.open_batch([(prompt, params) for prompt in prompts])
    started = time.perf_counter()
    while llm.get_metrics().running < running:
        loop.advance()
    admit_us = (time.perf_counter() - started) * 1e6 / running
    for _ in range(WARM_STEPS):
        loop.advance()
    wall, cpu = zip(*(_timed(loop.advance) for _ in range(steps)), strict=True)
    stages = _watched(_stages_of(llm), loop.advance, steps)
    calls = _watched(_calls_of(llm), loop.advance, steps)
    loop.close()
    ordered = sorted(wall)
    return HostRow(
        running=running,
        waiting=waiting,
        steps=steps,
        median_us=statistics.median(ordered),
        p05_us=ordered[len(ordered) // 20],
        p95_us=ordered[-1 - len(ordered) // 20],
        cpu_us=statistics.median(cpu),
        stages_us={name: statistics.median(times) for name, times in stages.items()},
        ops_us={name: statistics.median(times) for name, times in calls.items() if times},
        op_calls={name: len(times) / steps for name, times in calls.items() if times},
        detokenize_us=_detokenize(llm, running, steps),
        admit_us=admit_us,
    )


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of wall time and of this thread's time."""
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    work()
    return (time.perf_counter_ns() - wall) / 1000, (time.thread_time_ns() - cpu) / 1000


def _detokenize(llm: LLM, running: int, steps: int) -> float:
    """Median over steps of pushing one token to each of ``running`` streams."""
    tokenizer = llm.get_tokenizer()
    streams = [tokenizer.stream() for _ in range(running)]

    def push() -> None:
        for stream in streams:
            stream.push([TOKEN])

    return statistics.median(_timed(push)[0] for _ in range(steps))


def _stages_of(llm: LLM) -> list[Place]:
    core = llm._core
    owners = (core.scheduler, core.program, core.scheduler, llm._post)
    return list(zip(owners, ("schedule", "run", "complete", "process"), STAGES, strict=True))


def _calls_of(llm: LLM) -> list[Place]:
    """Where core's own program keeps its callables; another program's are its own matter."""
    from vllm_core.engine.program import ComposedProgram

    program = llm._core.program
    if not isinstance(program, ComposedProgram):
        return []
    model = program._model
    ops: list[Place] = [(program, attribute, op) for attribute, op in OPS.items()]
    return [*ops, (model, "forward", "model.forward"), (model, "logits", "model.logits")]


def _watched(places: Sequence[Place], work: Callable[[], object], steps: int) -> dict[str, list[float]]:
    """Run ``steps`` times and return microseconds of each call, by standing before the callables; that costs half of one."""
    spent: dict[str, list[float]] = {name: [] for _, _, name in places}

    def watch(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                return function(*args)
            finally:
                times.append((time.perf_counter_ns() - started) / 1000)

        return call

    with ExitStack() as undo:
        for owner, attribute, name in places:
            found = getattr(owner, attribute)
            undo.callback(setattr if attribute in vars(owner) else _unset, owner, attribute, found)
            setattr(owner, attribute, watch(found, spent[name]))
        for _ in range(steps):
            work()
    return spent


def _unset(owner: object, attribute: str, _: object) -> None:
    delattr(owner, attribute)


def run(grid: Sequence[tuple[int, int]], steps: int, out: Path | None, **options: Any) -> list[HostRow]:
    """Measure each (running, waiting), print two tables, and write JSON.

    Ops within a captured step are not seen: ``enforce_eager`` shows them.
    """
    from rich.console import Console

    logging.getLogger("vllm_core").setLevel(logging.WARNING)
    rows = [measure(running, waiting, steps, **options) for running, waiting in grid]
    console = Console()
    console.print(_step_table(rows))
    console.print(_call_table(rows))
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return rows


def _step_table(rows: Sequence[HostRow]) -> Table:
    lines = {
        "step, median": [row.median_us for row in rows],
        "step, 5 %": [row.p05_us for row in rows],
        "step, 95 %": [row.p95_us for row in rows],
        "step, thread's own": [row.cpu_us for row in rows],
        **{f"  {name}": [row.stages_us[name] for row in rows] for name in STAGES},
        "detokenize, beside": [row.detokenize_us for row in rows],
        "admit a request": [row.admit_us for row in rows],
    }
    return _table("Microseconds per step", rows, {name: [f"{value:.0f}" for value in values] for name, values in lines.items()})


def _call_table(rows: Sequence[HostRow]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row.ops_us)
    cells = {name: [f"{row.ops_us[name]:.1f}" if name in row.ops_us else "" for row in rows] for name in names}
    return _table("Microseconds per call", rows, cells)


def _table(title: str, rows: Sequence[HostRow], lines: Mapping[str, Sequence[str]]) -> Table:
    """One column for each pair of running and waiting."""
    from rich import box
    from rich.table import Table

    table = Table("running:waiting", title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_column(f"{row.running}:{row.waiting}", justify="right")
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table
