"""`bench latency` and `bench throughput`: workloads through `LLM.generate`, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from vllm_core.bench import evidence, surroundings
from vllm_core.bench.results import Result, Row, Run, row_of
from vllm_core.bench.workloads import Workload, engine_options
from vllm_core.errors import ConfigError, EngineError
from vllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_core.llm import LLM

Watch = Callable[[Row], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure. ``runs`` are counted; one more comes first. `reset`: no run finds blocks of another in the cache."""

    kind: Literal["latency", "throughput"]
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    workloads: Sequence[Workload] = ()
    runs: int = 3
    reset: bool = False


def measure(job: Job, watch: Watch = lambda row: None) -> Result:
    """Start an engine, run the workloads, gather the evidence. Raises VLLMCoreError."""
    from vllm_core.llm import LLM

    with tempfile.TemporaryDirectory(prefix="vllm-core-bench-") as folder:
        options = engine_options(job.model, job.options, Path(folder))
        with LLM(**options) as llm:
            return _measured(job, llm, watch)


def _measured(job: Job, llm: LLM, watch: Watch) -> Result:
    design = llm._engine.blueprint
    facts = surroundings.model_facts(design, job.model)
    workloads = [fitted(one, llm) for one in job.workloads]
    rows = []
    for workload in workloads:
        first, *rest = [run(llm, workload, seed, reset=job.reset) for seed in range(job.runs + 1)]
        rows.append(row_of(workload, first, rest))
        watch(rows[-1])
    memory = surroundings.memory_of(llm)  # before the evidence, whose log-probabilities take memory of their own
    return Result(
        kind=job.kind,
        model=facts,
        environment=surroundings.environment(),
        plan=llm.plan,
        config=design.config.model_dump(mode="json"),
        max_model_len=llm.max_model_len,
        timings=dict(llm.timings),
        prefix_cache="reset" if job.reset else "kept",
        rows=rows,
        memory=memory,
        evidence=evidence.gather(llm),
    )


def fitted(workload: Workload, llm: LLM) -> Workload:
    """The workload with token ids that the model has. Raises ConfigError where its longest request exceeds the context."""
    if workload.longest > llm.max_model_len:
        raise ConfigError(
            "Workload is longer than the context",
            on=f"{workload.name}: {workload.title}",
            found=f"{llm.max_model_len} tokens",
            expected=f"{workload.longest} tokens",
            fix=f"--max-model-len {workload.longest} or more; --input-len, --output-len and --shared-len make it shorter",
        )
    return replace(workload, vocabulary=min(workload.vocabulary, llm._engine.blueprint.spec.vocab_size))


def run(llm: LLM, workload: Workload, seed: int, *, reset: bool = False) -> Run:
    """One run. Raises EngineError where a request fails."""
    requests = workload.draw(seed)
    if reset:
        llm.reset_prefix_cache()
    params = [sampling(workload, count) for _, count in requests]
    started = perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
    seconds = perf_counter() - started
    made, wanted = sum(len(one.outputs[0].token_ids) for one in outputs), sum(count for _, count in requests)
    if made != wanted:
        raise EngineError(
            "Run is not whole",
            on=f"{workload.name}, seed {seed}",
            found=f"{made} tokens; {next((one.error for one in outputs if one.error), 'no request says why')}",
            expected=f"{wanted} tokens",
            fix="`vllm-core doctor` looks at the platform",
        )
    return Run(
        seed=seed,
        seconds=seconds,
        prompt_tokens=sum(len(prompt) for prompt, _ in requests),
        output_tokens=made,
        **{f"{stage}_s": [one.metrics[f"{stage}_s"] for one in outputs] for stage in ("queue", "prefill", "decode")},
    )


def sampling(workload: Workload, count: int) -> SamplingParams:
    """How a request of the workload is sampled: to its last token, whatever the model says."""
    return SamplingParams(temperature=workload.temperature, ignore_eos=True, max_tokens=count, detokenize=False)
