"""Building an engine core on a device: model, weights, KV cache, batch state, program, warm-up, scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_core.api import Communicator, Device, KVGroupSpec, KVLayout, ProgramBudget, StepProgram, load_entry
from vllm_core.engine.binding import BindingLike, BoundOps
from vllm_core.engine.core import EngineCore
from vllm_core.engine.memory import GroupMemory, KVBudget, MemoryRequest, size_kv
from vllm_core.engine.parallel.program import LeadProgram
from vllm_core.engine.program import ComposedProgram, StateShape, allocate_state, bytes_of
from vllm_core.engine.rehearsal import rehearse
from vllm_core.engine.scheduler import GroupLimits, Scheduler, SchedulerLimits
from vllm_core.engine.structured.grammars import Grammars, Vocabulary
from vllm_core.engine.warmup import warm_up
from vllm_core.errors import ConfigError
from vllm_core.layers.shard import ALONE, Shard
from vllm_core.models.build import build_model
from vllm_core.ops import comm

if TYPE_CHECKING:
    from vllm_core.config import EngineConfig
    from vllm_core.engine.parallel.group import WorkerGroup
    from vllm_core.loader.source import ModelSource
    from vllm_core.models.spec import ModelSpec


class GroupPlanLike(Protocol):
    """A KV group with its layout."""

    @property
    def spec(self) -> KVGroupSpec:
        """The layers."""

    @property
    def layout(self) -> KVLayout:
        """The provider's answer."""


class PlanLike(Protocol):
    """What the engine reads of a Plan."""

    @property
    def platform(self) -> str:
        """Name of the platform."""

    @property
    def track(self) -> str:
        """Model track."""

    @property
    def program(self) -> str:
        """Name of the step program."""

    @property
    def program_entry(self) -> str:
        """``module:callable`` of a program that the platform brings, else empty."""

    @property
    def kv_dtype(self) -> str:
        """Dtype of the KV cache."""

    @property
    def graphs(self) -> bool:
        """Whether steps are captured."""

    @property
    def compiler(self) -> str:
        """Backend of torch.compile that the model is compiled by; empty where it is not."""

    @property
    def bindings(self) -> tuple[BindingLike, ...]:
        """Providers of call sites."""

    @property
    def kv_groups(self) -> tuple[GroupPlanLike, ...]:
        """KV groups with their layouts."""


class DesignLike(Protocol):
    """What the engine reads of a blueprint."""

    @property
    def config(self) -> EngineConfig:
        """All options."""

    @property
    def source(self) -> ModelSource:
        """Where weights come from."""

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text of the model."""

    @property
    def plan(self) -> Any:
        """A PlanLike."""

    @property
    def max_model_len(self) -> int:
        """Context asked for, in tokens."""

    @property
    def explicit_len(self) -> bool:
        """Whether the user asked for it."""


@dataclass(frozen=True, slots=True)
class Part:
    """What of the engine this process builds.

    `sharers` workers divide the device, `agree` settles the KV cache with all of them, `check` raises where one has failed.
    """

    shard: Shard = ALONE
    sharers: int = 1
    agree: Callable[[KVBudget, Sequence[GroupMemory]], KVBudget] = lambda budget, _: budget
    check: Callable[[], None] = lambda: None


def shard_of(communicator: Communicator) -> Shard:
    """This rank's share. Core's references of the family ``comm`` find the communicator's group, until `comm.leave`."""
    comm.enter(communicator)
    return Shard(communicator.rank, communicator.world_size, communicator.handle)


@contextmanager
def _timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    timings[stage] = time.perf_counter() - started


def build_program(
    design: DesignLike, device: Device, ops: BoundOps, timings: dict[str, float], part: Part
) -> tuple[StepProgram, KVBudget]:
    """Build what runs steps on one worker; ``timings`` receives seconds by stage. Raises VLLMCoreError."""
    spec, plan = design.spec, design.plan
    if plan.program_entry:
        return _brought_program(design, device, ops, timings, part)
    with _timed(timings, "weights_s"):
        model = _model(design, device, ops, part)
    with _timed(timings, "memory_s"):
        groups, rows = [GroupMemory(group.spec, group.layout) for group in plan.kv_groups], _max_rows(design)
        later = bytes_of(spec, _state_shape(design, groups, design.max_model_len), rows)
        request = replace(_memory_request(design, part.sharers), later_bytes=later)
        budget = part.agree(size_kv(request, groups, device.statistics()), groups)
        kv, memory = _bind_kv(spec, plan, device, ops, budget)
        state = allocate_state(device, _state_shape(design, groups, budget.max_model_len))
    sizes = _graph_sizes(design, device)
    program = ComposedProgram(spec, model, device, ops, state, kv, rows, sizes, memory, design.max_model_len)
    return program, budget


def _brought_program(
    design: DesignLike, device: Device, ops: BoundOps, timings: dict[str, float], part: Part
) -> tuple[StepProgram, KVBudget]:
    """Build the platform's own program, which holds weights, KV cache and state itself; core sizes the KV cache."""
    spec, plan, limits = design.spec, design.plan, design.config.scheduler
    groups = [GroupMemory(group.spec, group.layout) for group in plan.kv_groups]
    needed = ProgramBudget(
        num_slots=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        max_model_len=design.max_model_len,
        kv_groups=tuple(group.spec for group in groups),
        kv_layouts=tuple(group.layout for group in groups),
    )
    if design.config.model.load_format == "dummy":
        raise ConfigError(
            "Random weights need core's own program",
            on=f"load_format dummy, program {plan.program}",
            found="a program that the platform brings, which alone knows its weights",
            expected="program core",
            fix="give a checkpoint, or --program core where the platform can run it",
        )
    with _timed(timings, "weights_s"):
        program: StepProgram = load_entry(plan.program_entry)(spec=spec, device=device, bound=ops, budget=needed)
        program.load((name.removeprefix(spec.weight_prefix), tensor) for name, tensor in design.source.weights())
    with _timed(timings, "memory_s"):
        budget = size_kv(_memory_request(design, part.sharers), groups, device.statistics())
        program.reserve(budget.num_blocks, budget.max_model_len)
    return program, budget


def build_core(
    design: DesignLike,
    device: Device,
    ops: BoundOps,
    timings: dict[str, float],
    part: Part | None = None,
    others: WorkerGroup | None = None,
) -> tuple[EngineCore, KVBudget]:
    """Build everything; ``others`` are the workers that share the model with this one. Raises VLLMCoreError."""
    config, spec, plan = design.config, design.spec, design.plan
    program, budget = build_program(design, device, ops, timings, part or Part())
    if others is not None:
        others.wait_until_ready()
        program = LeadProgram(program, others)
    group_limits = tuple(
        GroupLimits(spec=group.spec, tokens_per_block=group.layout.tokens_per_block, num_blocks=count)
        for group, count in zip(plan.kv_groups, budget.num_blocks, strict=True)
    )
    scheduler_limits = _scheduler_limits(design, budget)
    core = EngineCore(
        Scheduler(scheduler_limits, group_limits),
        program,
        ops,
        depth=steps_in_flight(config, device),
        grammars=Grammars(lambda: _vocabulary(design)),
    )
    # Most models of the transformers track call torch between ops, which would really run, on what ops left as it was.
    # And a compiled model would be traced there.
    if others is None and isinstance(program, ComposedProgram) and spec.is_all_ops and not plan.compiler:
        rehearsed = EngineCore(Scheduler(scheduler_limits, group_limits), program, ops)
        providers = {binding.provider for binding in plan.bindings}
        with _timed(timings, "rehearsal_s"):
            rehearse(rehearsed, program, device, providers, spec, budget.max_model_len)
    with _timed(timings, "warmup_s"):
        warm_up(EngineCore(Scheduler(scheduler_limits, group_limits), program, ops), spec, budget.max_model_len)
        device.synchronize()
    return core, budget


def _vocabulary(design: DesignLike) -> Vocabulary:
    """What grammars are made of; the tokenizer is read once the first is needed."""
    tokenizer, size = design.source.tokenizer(), design.spec.vocab_size
    return Vocabulary([tokenizer.token_bytes(token) for token in range(size)], size, tuple(design.stop_token_ids))


def _max_rows(design: DesignLike) -> int:
    """Most sequences of one step."""
    limits = design.config.scheduler
    return min(limits.max_num_seqs, limits.max_num_batched_tokens)


def _model(design: DesignLike, device: Device, ops: BoundOps, part: Part) -> Any:
    limits, spec = design.config.scheduler, design.spec
    sizes = {
        "max_tokens": limits.max_num_batched_tokens,
        "max_rows": _max_rows(design),
        "max_model_len": design.max_model_len,
    }
    if design.plan.track == "transformers":
        from vllm_core.models import transformers_track

        model: Any = transformers_track.build(spec, design.source, device, ops, **sizes, shard=part.shard)
    elif design.plan.compiler:
        model = _compiled(design, device, ops, sizes, part.shard)
    else:
        model = build_model(spec, device, ops, **sizes, shard=part.shard)
    if design.config.model.load_format == "dummy":
        model.load_dummy(design.config.model.seed, design.config.model.dummy_bound)
    else:
        read = design.source.weights if design.plan.track == "transformers" else design.source.packed_weights
        model.load(_checked(read(model.wanted if part.shard.workers > 1 else None), part.check))
    return model


def _compiled(design: DesignLike, device: Device, ops: BoundOps, sizes: Mapping[str, int], shard: Shard) -> Any:
    """The agnostic model, compiled. Raises ConfigError where there is no such compiler."""
    # torch brings its compilers in when they are asked for, which takes seconds.
    from vllm_core.engine.compiled import CompiledModel, CompiledOps

    calls = CompiledOps(ops)
    tokens, rows = sizes["max_tokens"], sizes["max_rows"]
    roomier = {**sizes, "max_tokens": tokens + 1, "max_rows": rows + 1}
    model = build_model(design.spec, device, calls, **roomier, shard=shard)
    return CompiledModel(model, calls, device, backend=design.plan.compiler, max_tokens=tokens, max_rows=rows)


def _checked(weights: Iterable[tuple[str, Any]], check: Callable[[], None]) -> Iterator[tuple[str, Any]]:
    """Reading may take minutes: what has failed elsewhere is noticed between two tensors."""
    for item in weights:
        check()
        yield item


def _memory_request(design: DesignLike, sharers: int) -> MemoryRequest:
    cache = design.config.cache
    return MemoryRequest(
        max_model_len=design.max_model_len,
        explicit_len=design.explicit_len,
        chunk=min(design.config.scheduler.max_num_batched_tokens, design.max_model_len),
        absolute_bytes=cache.kv_cache_memory_bytes,
        utilization=cache.device_memory_utilization,
        override_blocks=cache.num_gpu_blocks_override,
        sharers=sharers,
        chosen=_chosen(design.plan),
    )


def _chosen(plan: PlanLike) -> str:
    """Platform, KV provider, dtype and block size of each group."""
    parts = [f"platform {plan.platform}"]
    for group in plan.kv_groups:
        role, layout = f"kv.{group.spec.index}.{group.spec.kind}", group.layout
        provider = next((one.provider for one in plan.bindings if (one.op, one.role) == ("kv_bind", role)), plan.program)
        parts.append(f"{group.spec.kind} KV of {provider} in {layout.dtype}, {layout.tokens_per_block} tokens a block")
    return "; ".join(parts)


def _bind_kv(
    spec: ModelSpec, plan: PlanLike, device: Device, ops: BoundOps, budget: KVBudget
) -> tuple[list[Any], list[torch.Tensor | None]]:
    """One KV object per layer, in layer order, and the memory of each; encoders have none."""
    kv: list[Any] = [None] * len(spec.layers)
    memories: list[torch.Tensor | None] = [None] * len(spec.layers)
    for group, count in zip(plan.kv_groups, budget.num_blocks, strict=True):
        bind = ops.get("kv_bind", f"kv.{group.spec.index}.{group.spec.kind}")
        for layer in group.spec.layers:
            memories[layer] = memory = device.allocate("kv", (count, group.layout.block_bytes), torch.uint8)
            kv[layer] = bind(
                memory, group.spec.num_kv_heads, group.spec.head_size, group.layout.dtype, group.layout.tokens_per_block
            )
    return kv, memories


def _state_shape(design: DesignLike, groups: list[GroupMemory], max_model_len: int) -> StateShape:
    return StateShape(
        num_slots=design.config.scheduler.max_num_seqs,
        max_len=max_model_len,
        max_blocks=tuple(-(-max_model_len // g.layout.tokens_per_block) + 1 for g in groups),
        tokens_per_block=tuple(g.layout.tokens_per_block for g in groups),
    )


def _scheduler_limits(design: DesignLike, budget: KVBudget) -> SchedulerLimits:
    limits = design.config.scheduler
    return SchedulerLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=budget.max_model_len,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        chunked_prefill=limits.enable_chunked_prefill,
        policy=limits.scheduling_policy,
        prefix_caching=design.config.cache.enable_prefix_caching and design.spec.pooling is None,
        pooling_whole_prompt=design.spec.pooling is not None,
    )


def _graph_sizes(design: DesignLike, device: Device) -> tuple[int, ...]:
    """Numbers of rows to capture: the platform's or the user's, up to the most sequences, which is always one.

    Where the device records steps, and nobody named sizes: each number up to the most that it records.
    """
    if not (design.plan.graphs and device.supports_graphs):
        return ()
    if design.plan.compiler and device.recorded_rows is not None:
        return ()  # what is recorded is called without the compiled graph
    most, sizes = design.config.scheduler.max_num_seqs, design.config.platform.graph_sizes
    if sizes is None and device.recorded_rows is not None:
        return tuple(range(1, min(most, device.recorded_rows) + 1))
    sizes = sizes or [1 << bit for bit in range(most.bit_length())]
    return (*(size for size in sizes if size < most), most)


def steps_in_flight(config: EngineConfig, device: Device) -> int:
    """How many steps are launched before the first is read."""
    wanted = config.scheduler.async_scheduling
    return 2 if (device.asynchronous if wanted is None else wanted) else 1
