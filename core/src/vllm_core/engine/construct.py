"""Building an engine core on a device: model, weights, KV cache, batch state, program, warm-up, scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_core.api import Device, KVGroupSpec, KVLayout
from vllm_core.engine.binding import BindingLike, BoundOps
from vllm_core.engine.core import EngineCore
from vllm_core.engine.memory import GroupMemory, KVBudget, MemoryRequest, size_kv
from vllm_core.engine.program import ComposedProgram, StateShape, allocate_state
from vllm_core.engine.scheduler import GroupLimits, Scheduler, SchedulerLimits
from vllm_core.engine.warmup import warm_up
from vllm_core.models.build import build_model

if TYPE_CHECKING:
    from vllm_core.config import EngineConfig
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
    def track(self) -> str:
        """Model track."""

    @property
    def kv_dtype(self) -> str:
        """Dtype of the KV cache."""

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
    def plan(self) -> Any:
        """A PlanLike."""

    @property
    def max_model_len(self) -> int:
        """Context asked for, in tokens."""

    @property
    def explicit_len(self) -> bool:
        """Whether the user asked for it."""


@contextmanager
def _timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    timings[stage] = time.perf_counter() - started


def build_core(design: DesignLike, device: Device, ops: BoundOps, timings: dict[str, float]) -> tuple[EngineCore, KVBudget]:
    """Build everything; ``timings`` receives seconds by stage. Raises VLLMCoreError."""
    config, spec, plan = design.config, design.spec, design.plan
    limits = config.scheduler
    with _timed(timings, "weights_s"):
        model = _model(design, device, ops)
    with _timed(timings, "memory_s"):
        groups = [GroupMemory(group.spec, group.layout) for group in plan.kv_groups]
        budget = size_kv(_memory_request(design), groups, device.statistics())
        kv = _bind_kv(spec, plan, device, ops, budget)
        state = allocate_state(device, _state_shape(design, groups, budget))
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    program = ComposedProgram(spec, model, device, ops, state, kv, rows)
    group_limits = tuple(
        GroupLimits(spec=group.spec, tokens_per_block=group.layout.tokens_per_block, num_blocks=count)
        for group, count in zip(plan.kv_groups, budget.num_blocks, strict=True)
    )
    scheduler_limits = _scheduler_limits(design, budget)
    core = EngineCore(Scheduler(scheduler_limits, group_limits), program, ops, depth=_depth(config, device))
    with _timed(timings, "warmup_s"):
        warm_up(EngineCore(Scheduler(scheduler_limits, group_limits), program, ops), spec, budget.max_model_len)
        device.synchronize()
    return core, budget


def _model(design: DesignLike, device: Device, ops: BoundOps) -> Any:
    limits, spec = design.config.scheduler, design.spec
    sizes = {"max_tokens": limits.max_num_batched_tokens, "max_model_len": design.max_model_len}
    if design.plan.track == "transformers":
        from vllm_core.models import transformers_track

        model: Any = transformers_track.build(spec, design.source, device, ops, **sizes)
    else:
        model = build_model(spec, device, ops, **sizes)
    if design.config.model.load_format == "dummy":
        model.load_dummy(design.config.model.seed)
    else:
        model.load(design.source.weights())
    return model


def _memory_request(design: DesignLike) -> MemoryRequest:
    cache = design.config.cache
    return MemoryRequest(
        max_model_len=design.max_model_len,
        explicit_len=design.explicit_len,
        chunk=min(design.config.scheduler.max_num_batched_tokens, design.max_model_len),
        absolute_bytes=cache.kv_cache_memory_bytes,
        utilization=cache.device_memory_utilization,
        override_blocks=cache.num_gpu_blocks_override,
    )


def _bind_kv(spec: ModelSpec, plan: PlanLike, device: Device, ops: BoundOps, budget: KVBudget) -> list[Any]:
    """One KV object per layer, in layer order; encoders have none."""
    kv: list[Any] = [None] * len(spec.layers)
    for group, count in zip(plan.kv_groups, budget.num_blocks, strict=True):
        bind = ops.get("kv_bind", f"kv.{group.spec.index}.{group.spec.kind}")
        for layer in group.spec.layers:
            memory = device.allocate("kv", (count, group.layout.block_bytes), torch.uint8)
            kv[layer] = bind(
                memory, group.spec.num_kv_heads, group.spec.head_size, group.layout.dtype, group.layout.tokens_per_block
            )
    return kv


def _state_shape(design: DesignLike, groups: list[GroupMemory], budget: KVBudget) -> StateShape:
    return StateShape(
        num_slots=design.config.scheduler.max_num_seqs,
        max_len=budget.max_model_len,
        max_blocks=tuple(-(-budget.max_model_len // g.layout.tokens_per_block) + 1 for g in groups),
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


def _depth(config: EngineConfig, device: Device) -> int:
    wanted = config.scheduler.async_scheduling
    return 2 if (device.asynchronous if wanted is None else wanted) else 1
