"""Putting an engine together: the one place that knows both the registry and the engine.

`blueprint` decides everything (configuration, model, Plan) without torch; `assemble` builds the engine from it in the
process that will run it. A blueprint made in one process can be assembled in another.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from vllm_core.api import POOLS
from vllm_core.api.quant import FP8_FORMATS, ONLINE_FORMATS
from vllm_core.config import EngineConfig, check_environment
from vllm_core.errors import ConfigError, VLLMCoreError
from vllm_core.loader.source import ModelSource, open_model
from vllm_core.models import catalog
from vllm_core.models.spec import ModelSpec, Pooling
from vllm_core.registry import candidates, explain, matching, select, snapshot
from vllm_core.registry.demotion import demote
from vllm_core.registry.plan import Candidate, Needs, Plan

if TYPE_CHECKING:
    from vllm_core.api import Device
    from vllm_core.engine.binding import BoundOps
    from vllm_core.engine.core import EngineCore
    from vllm_core.engine.memory import KVBudget
    from vllm_core.engine.parallel.group import WorkerGroup
    from vllm_core.registry.load import Loaded

log = logging.getLogger("vllm_core")

_DTYPES = ("float32", "bfloat16", "float16")
_LASTING = frozenset({"platform", "dtype"})
"""What the first choice decides, and its reason, whatever the platform changes."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything decided. `config` has the platform's changes applied; `max_model_len` is what was asked for."""

    config: EngineConfig
    source: ModelSource
    spec: ModelSpec
    plan: Plan
    runner: str
    max_model_len: int
    explicit_len: bool

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence, from the generation config, else from the model's."""
        found = self.source.generation_config.get("eos_token_id", self.source.config.get("eos_token_id"))
        ids = found if isinstance(found, list) else [found]
        return tuple(token for token in ids if isinstance(token, int) and 0 <= token < self.spec.vocab_size)


@dataclass(frozen=True, slots=True)
class Engine:
    """An assembled engine. `timings` are seconds by stage of the start; `workers` share the model with this process."""

    core: EngineCore
    blueprint: Blueprint
    budget: KVBudget
    device: Device
    timings: Mapping[str, float]
    workers: WorkerGroup | None = None

    def close(self) -> None:
        """Stop the workers and give the device's memory back."""
        try:
            self.device.synchronize()
        except Exception as error:
            if self.workers is None or not self.workers.has_failed:
                raise
            log.debug("what was queued when a worker failed: %s", error)
        if self.workers is not None:
            self.workers.close()
        self.core.program.close()
        for pool in POOLS:
            self.device.release(pool)


def track_of(config: EngineConfig, source: ModelSource) -> str:
    """The model track: what the user asked for, else agnostic where the architecture is known."""
    if config.model.model_impl != "auto":
        return config.model.model_impl
    names = source.config.get("architectures") or [None]
    return "agnostic" if names[0] in catalog.architectures() or source.kind == "gguf" else "transformers"


def describe(config: EngineConfig, source: ModelSource) -> tuple[ModelSpec, str, str]:
    """Return the model's specification, the runner (generate or pooling) and the track."""
    track, dtype = track_of(config, source), _dtype(config, source)
    pooling = cast("Pooling | None", source.pooling)
    if pooling is None and config.model.runner == "pooling":
        pooling = "last"
    if config.model.runner == "generate":
        pooling = None
    if track == "transformers":
        from vllm_core.models import transformers_track

        spec: ModelSpec = transformers_track.describe(source.config, dtype=dtype, path=str(source.path))
        if pooling is not None:
            spec = replace(spec, pooling=pooling)
    else:
        spec = catalog.describe(source.config, dtype=dtype, pooling=pooling)
    rounded = None if config.model.activation == "exact" else config.model.activation
    spec = replace(spec, quantization=config.model.quantization, rounded_inputs=rounded)
    if track == "transformers" and config.model.quantization is not None:
        raise ConfigError(
            "Weights of this model cannot be rounded while loading",
            on=f"{source.name} ({spec.architecture}), --quantization {config.model.quantization}",
            found="track transformers",
            expected="track agnostic, whose layers know their weights",
            fix="leave --quantization out, or --model-impl agnostic where it has the architecture",
        )
    if spec.pooling is not None and config.model.runner == "generate":
        raise ConfigError(
            "Model cannot generate",
            on=f"{source.name} ({spec.architecture})",
            found="an encoder" if spec.kind == "encoder" else "a decoder without a language head",
            expected="a decoder for --runner generate",
            fix="use --runner pooling and embed()",
        )
    return spec, "pooling" if spec.pooling is not None else "generate", track


def _dtype(config: EngineConfig, source: ModelSource) -> str:
    if config.model.dtype != "auto":
        return config.model.dtype
    found = str(source.config.get("dtype") or source.config.get("torch_dtype") or "float32").removeprefix("torch.")
    return found if found in _DTYPES else "float32"


def needs_of(config: EngineConfig, source: ModelSource | None = None) -> Needs:
    """What the model and the options ask of a platform; from the config alone, no weights are read."""
    source = source if source is not None else open_model(config.model)
    whole, _, track = describe(config, source)
    workers = config.parallel.tensor_parallel_size
    spec = whole.shard(workers)
    kv_dtype = spec.dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    platform = config.platform.platform or os.environ.get("VLLM_PLATFORM") or None
    stored = {} if track == "transformers" or config.model.load_format == "dummy" else source.weight_formats()
    rounded = ONLINE_FORMATS.get(spec.quantization or "", ())
    if spec.rounded_inputs == "fp8":
        _check_fp8(source, rounded or tuple(stored))
    return Needs(
        model=source.name,
        architecture=spec.architecture,
        dtype=spec.dtype,
        kv_dtype=kv_dtype,
        capabilities=_capabilities(spec, kv_dtype, config),
        sites=spec.call_sites(kv_dtype, config.cache.block_size),
        kv_groups=spec.kv_groups(),
        track=track,
        platform=platform,
        device_ids=tuple(config.platform.device_ids) if config.platform.device_ids else None,
        block_size=config.cache.block_size,
        graphs=False if config.platform.enforce_eager or spec.waits else None,
        providers=config.platform.provider,
        denied_providers=frozenset(config.platform.deny_provider),
        strict=config.platform.strict,
        allow_fallback=config.platform.allow_fallback,
        allow_host_ops=config.platform.allow_host_ops,
        workers=workers,
        program=config.platform.program,
        compiler=_compiler(config, source, track),
        rounded_formats=rounded,
        weight_formats=stored,
    )


def _compiler(config: EngineConfig, source: ModelSource, track: str) -> str:
    """Backend of torch.compile, empty for none. Raises ConfigError where the model's code is not core's."""
    name = config.platform.compile or ""
    if name and track == "transformers":
        raise ConfigError(
            "Model cannot be compiled",
            on=f"{source.name}, --compile {name}",
            found="track transformers, whose models run transformers' own code between ops",
            expected="track agnostic, whose layers make one graph",
            fix="leave --compile out, or --model-impl agnostic where it has the architecture",
        )
    return name


def _check_fp8(source: ModelSource, formats: Sequence[str]) -> None:
    """Raises ConfigError where none of the weights' formats is fp8: nothing would be rounded."""
    if not any(name in FP8_FORMATS for name in formats):
        raise ConfigError(
            "Inputs cannot be rounded to fp8",
            on=f"{source.name}, --activation fp8",
            found=f"weights in {', '.join(formats) or 'the dtype of the model'}",
            expected="weights in fp8",
            fix="--quantization fp8, a checkpoint in fp8, or leave --activation out",
        )


def _capabilities(spec: ModelSpec, kv_dtype: str, config: EngineConfig) -> frozenset[str]:
    names = {f"dtype.{spec.dtype}"}
    if spec.quantization is not None:
        names.add("quantization.weight_only")
    if spec.rounded_inputs == "fp8":
        names.add("quantization.fp8_activation")
    if spec.workers > 1:
        names.add("parallel.tensor")
    if spec.kind == "encoder":
        return frozenset(names | {"attention.encoder"})
    names |= {"attention.decoder", "sampling.device"}
    if kv_dtype in _DTYPES:
        names.add(f"dtype.{kv_dtype}")
    else:
        names.add("kv_dtype.int8" if kv_dtype == "int8" else "kv_dtype.fp8")
    if any(layer.window is not None for layer in spec.layers):
        names.add("attention.sliding_window")
    if spec.attention_soft_cap:
        names.add("attention.soft_cap")
    if any(layer.sinks for layer in spec.layers):
        names.add("attention.sinks")
    if config.cache.enable_prefix_caching:
        names.add("prefix_caching")
    if config.scheduler.enable_chunked_prefill:
        names.add("chunked_prefill")
    if config.scheduler.async_scheduling:
        names.add("async_scheduling")
    return frozenset(names)


def blueprint(
    options: Mapping[str, Any],
    *,
    probe: Path | None = None,
    opened: Callable[[EngineConfig, ModelSource], None] = lambda config, source: None,
) -> Blueprint:
    """Decide everything for an engine with these options, from the model's config alone: no weights are read.

    ``probe`` is a file that `doctor --json` saved: the decision is for that machine. ``opened`` is called once the model is
    known, before platforms are looked at, which may be a wait for child processes. Raises VLLMCoreError.
    """
    for name in check_environment():
        log.info("environment variable %s belongs to another project and is not read", name)
    config = EngineConfig.from_options(options)
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            "One engine has no replicas",
            on="data_parallel_size",
            found=str(config.parallel.data_parallel_size),
            expected="1, but for a server",
            fix="vllm-core serve --data-parallel-size, or vllm_core.replicas.Replicas",
        )
    source = open_model(config.model)
    needs = needs_of(config, source)
    opened(config, source)
    if probe is None:
        found, failed = candidates.collect(only=needs.platform, environ=os.environ)
    else:
        found, failed = snapshot.recompute(snapshot.read(probe), probe)
    needs = replace(needs, alternatives=_alternatives(config, source, needs, found))
    plan = select.plan(needs, found, failed)
    if plan.dtype != needs.dtype:
        config = config.with_changes({"dtype": plan.dtype})
    config, reasons = _configure(config, plan)
    if reasons:
        pinned = replace(needs_of(config, source), platform=f"{plan.distribution}:{plan.entry_point}")
        plan = _settle(plan, select.plan(pinned, found, failed), reasons)
    spec, runner, _ = describe(config, source)
    if spec.waits:
        plan = replace(plan, reasons={**plan.reasons, "graphs": f"the model's code waits for the device: {spec.waits}"})
    plan = replace(plan, notes=(*plan.notes, *spec.shard(config.parallel.tensor_parallel_size).notes()))
    length = _context(config, spec)
    config = _step_limits(config, spec, runner, length)
    return Blueprint(config, source, spec, plan, runner, length, config.model.max_model_len is not None)


def _alternatives(config: EngineConfig, source: ModelSource, needs: Needs, found: list[Candidate]) -> tuple[Needs, ...]:
    """The needs at the other dtypes, the one that loses nothing first: where dtype is auto and a platform lacks this one."""
    if config.model.dtype != "auto" or not any(matching.lacks_dtype(needs, one) for one in found):
        return ()
    return tuple(needs_of(config.with_changes({"dtype": dtype}), source) for dtype in _DTYPES if dtype != needs.dtype)


def _settle(chosen: Plan, settled: Plan, reasons: Mapping[str, str]) -> Plan:
    """The Plan after the platform's changes; why the platform was chosen, and over whom, is what the first choice says."""
    platforms = [one for one in chosen.rejected if one.subject == "platform"]
    offers = [one for one in settled.rejected if one.subject != "platform"]
    return replace(
        settled,
        reasons={**settled.reasons, **{name: chosen.reasons[name] for name in _LASTING & set(chosen.reasons)}, **reasons},
        rejected=(*platforms, *offers),
        notes=chosen.notes,
    )


def _context(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens of the longest sequence asked for. Raises ConfigError for more than the model can address."""
    length, most = config.model.max_model_len or spec.max_position, spec.extended_position or spec.max_position
    if length <= most:
        return length
    reach = f" ({spec.max_position} without RoPE scaling)" if most != spec.max_position else ""
    raise ConfigError(
        "Context is longer than the model's",
        on="max_model_len",
        found=str(length),
        expected=f"at most {most} tokens{reach}",
        fix=f"--max-model-len {most}, or give the model a RoPE scaling with --hf-overrides",
    )


def _configure(config: EngineConfig, plan: Plan) -> tuple[EngineConfig, dict[str, str]]:
    """Ask the chosen platform once; explicit options are the user's and must not change."""
    from vllm_core.registry.load import open_platform

    flat = {name: value for group in config for name, value in group[1]}
    explicit = frozenset(name for _, group in config for name in group.model_fields_set)
    flat["dtype"], flat["memory_bytes"] = plan.dtype, plan.device.memory_bytes
    patch = open_platform(plan).configure(flat, explicit)
    clash = explicit & set(patch.changes)
    if clash:
        raise ConfigError(
            "Platform changes an option that was set explicitly",
            on=", ".join(sorted(clash)),
            found="; ".join(patch.reasons.get(name, "no reason") for name in sorted(clash)),
            expected="explicit options to be kept or refused",
            fix=f"leave the option out, or report this to the authors of {plan.distribution}",
        )
    return config.with_changes(patch.changes), dict(patch.reasons)


def _step_limits(config: EngineConfig, spec: ModelSpec, runner: str, length: int) -> EngineConfig:
    """Tokens a step must hold: whole prompts where they cannot be split, one token per sequence always."""
    limits = config.scheduler
    needed = limits.max_num_seqs
    why = f"max_num_seqs {limits.max_num_seqs}"
    if (runner == "pooling" or not limits.enable_chunked_prefill) and length > needed:
        needed, why = length, f"prompts of up to {length} tokens in one step"
    if limits.max_num_batched_tokens >= needed:
        return config
    if "max_num_batched_tokens" in limits.model_fields_set:
        raise ConfigError(
            "A step is too small",
            on="max_num_batched_tokens",
            found=str(limits.max_num_batched_tokens),
            expected=f"at least {needed}, for {why}",
            fix=f"--max-num-batched-tokens {needed}, or lower --max-num-seqs or --max-model-len",
        )
    return config.with_changes({"max_num_batched_tokens": needed})


def assemble(
    design: Blueprint, *, on_stuck: Callable[[VLLMCoreError], None] | None = None, folder: str | None = None
) -> Engine:
    """Build the engine in this process. Demotes providers that fail in warm-up, unless `strict`.

    The other workers of a shared model are started as children; ``on_stuck`` is called in another thread where one is gone
    and this process does not notice, because its device waits for it. ``folder`` is where their files go.
    """
    from vllm_core.registry.load import open_platform

    started = time.perf_counter()
    # The workers start while torch is imported here.
    others = _start_workers(design, on_stuck, folder)
    try:
        platform = open_platform(design.plan)
        device = open_device(platform, design.plan, 0)
    except BaseException:
        if others is not None:
            others.close()
        raise
    timings = {"device_s": time.perf_counter() - started}
    while True:
        engine = _attempt(design, device, timings, others)
        if isinstance(engine, Engine):
            for line in explain.to_text(engine.blueprint.plan).splitlines():
                log.info("%s", line)
            return engine
        design = replace(design, plan=engine)
        gc.collect()  # what was built holds the device's memory in cycles, and the collector may be off during a start
        for pool in POOLS:
            device.release(pool)
        others = _start_workers(design, on_stuck, folder)


def open_device(platform: Loaded, plan: Plan, rank: int) -> Device:
    """Start the platform in the process of worker ``rank`` and open its device."""
    facts = plan.device_of(rank)
    platform.start(facts, plan.sharers(rank))
    return platform.create_device(facts)


def _start_workers(
    design: Blueprint, on_stuck: Callable[[VLLMCoreError], None] | None, folder: str | None
) -> WorkerGroup | None:
    plan = design.plan
    if plan.tensor_parallel == 1:
        return None
    from vllm_core.engine.parallel.group import WorkerGroup
    from vllm_core.registry.probe import child_environment

    ranks = range(plan.tensor_parallel)
    labels = [f"rank {rank} of {len(ranks)}, device {plan.platform}:{plan.device_of(rank).id}" for rank in ranks]
    command = [sys.executable, "-m", "vllm_core.worker_main"]
    return WorkerGroup(labels, command, child_environment(os.environ), to_bytes(design), plan.bindings, on_stuck, folder)


def _attempt(design: Blueprint, device: Device, timings: dict[str, float], others: WorkerGroup | None) -> Engine | Plan:
    """Build the engine; or return the Plan without the provider that failed, on whichever worker."""
    from vllm_core.engine.binding import ProviderFailedError

    try:
        return _build(design, device, timings, others)
    except BaseException as error:
        cause = error
        if others is not None:
            cause = others.explain(error)
            others.close()
        if not isinstance(cause, ProviderFailedError) or cause.binding is None or design.config.platform.strict:
            if cause is error:
                raise
            raise cause from error
        log.warning("%s", cause)
        return demote(design.plan, cause.binding.op, cause.binding.role, cause.found)


def _build(design: Blueprint, device: Device, timings: dict[str, float], others: WorkerGroup | None) -> Engine:
    from vllm_core.engine.binding import BoundOps
    from vllm_core.engine.construct import Part, build_core, shard_of

    ops, workers = BoundOps(design.plan.bindings, device.bind), design.plan.tensor_parallel
    with attributed(ops):
        part = None
        if others is not None:
            communicator = others.join(lambda rendezvous: device.communicator(0, workers, rendezvous))
            part = Part(shard_of(communicator), design.plan.sharers(0), others.agree, others.check)
        core, budget = build_core(design, device, ops, timings, part, others)
    return Engine(core, design, budget, device, timings, others)


@contextmanager
def attributed(ops: BoundOps) -> Iterator[None]:
    """Name the provider that an exception comes from.

    Packing weights and binding the KV cache are ops too, and run outside of steps.
    """
    from vllm_core.engine.binding import ProviderFailedError

    try:
        yield
    except ProviderFailedError:
        raise
    except Exception as error:
        culprit = ops.culprit(error.__traceback__)
        if culprit is None:
            raise
        raise ProviderFailedError.of(culprit, error) from error


class _Parcel(msgspec.Struct, frozen=True):
    """A blueprint on its way to another process."""

    config: str
    plan: bytes
    explicit_len: bool
    max_model_len: int


def to_bytes(design: Blueprint) -> bytes:
    """Pack a blueprint for another process of this machine."""
    parcel = _Parcel(design.config.model_dump_json(), explain.to_json(design.plan), design.explicit_len, design.max_model_len)
    return msgspec.json.encode(parcel)


def from_bytes(data: bytes) -> Blueprint:
    """Unpack; the Plan is taken as it is, nothing is decided again."""
    parcel = msgspec.json.decode(data, type=_Parcel)
    config = EngineConfig.model_validate_json(parcel.config)
    source = open_model(config.model)
    spec, runner, _ = describe(config, source)
    plan = explain.from_json(parcel.plan)
    return Blueprint(config, source, spec, plan, runner, parcel.max_model_len, parcel.explicit_len)
