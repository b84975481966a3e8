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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_core.llm import LLM

PROMPT_TOKENS = 16
CONTEXT = 2048
STAGES = ("schedule", "program", "complete", "postprocess")


@dataclass(frozen=True, slots=True)
class HostRow:
    """Microseconds per step with so many running and waiting: median, and the range of 5 % to 95 %."""

    running: int
    waiting: int
    steps: int
    median_us: float
    p05_us: float
    p95_us: float
    stages_us: dict[str, float]
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
    for _ in range(8):
        loop.advance()
    times = [_timed(loop.advance) for _ in range(steps)]
    with _stages(llm) as spent:
        for _ in range(steps):
            loop.advance()
    loop.close()
    times.sort()
    return HostRow(
        running=running,
        waiting=waiting,
        steps=steps,
        median_us=statistics.median(times),
        p05_us=times[len(times) // 20],
        p95_us=times[-1 - len(times) // 20],
        stages_us={name: total / steps for name, total in spent.items()},
        admit_us=admit_us,
    )


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - started) / 1000


@contextmanager
def _stages(llm: LLM) -> Iterator[dict[str, float]]:
    """Time the four stages of the loop by standing before their bound methods; costs about a microsecond a step."""
    spent = dict.fromkeys(STAGES, 0.0)
    core = llm._core
    places = (
        (core.scheduler, "schedule", "schedule"),
        (core.program, "run", "program"),
        (core.scheduler, "complete", "complete"),
        (llm._post, "process", "postprocess"),
    )

    def watch(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                return function(*args)
            finally:
                spent[stage] += (time.perf_counter_ns() - started) / 1000

        return call

    with ExitStack() as undo:
        for owner, name, stage in places:
            setattr(owner, name, watch(getattr(owner, name), stage))
            undo.callback(delattr, owner, name)
        yield spent


def run(grid: list[tuple[int, int]], steps: int, out: Path | None, **options: Any) -> list[HostRow]:
    """Measure each (running, waiting), print a table, and write JSON."""
    from rich.console import Console
    from rich.table import Table

    logging.getLogger("vllm_core").setLevel(logging.WARNING)
    table = Table("running", "waiting", "median us/step", "5-95 %", *STAGES, "admit us/request")
    rows = []
    for running, waiting in grid:
        row = measure(running, waiting, steps, **options)
        rows.append(row)
        table.add_row(
            str(row.running),
            f"{row.waiting:,}",
            f"{row.median_us:.0f}",
            f"{row.p05_us:.0f}-{row.p95_us:.0f}",
            *(f"{row.stages_us[name]:.0f}" for name in STAGES),
            f"{row.admit_us:.0f}",
        )
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return rows
