"""Settings of one engine: frozen pydantic models, one class per concern.

The command line is generated from them; an unknown option is an error with the nearest name. Imported only where
an engine is made, since pydantic costs tens of milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_core.elsewhere import instead
from vllm_core.errors import ConfigError, UnknownOptionError, nearest

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]


GenerationValue = Literal["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(_Settings):
    """Which model, and how it is read."""

    model: str = Field(description="folder, GGUF file, repository name, or 'demo'")
    tokenizer: str | None = Field(None, description="folder or file of the tokenizer, if not the model's own")
    skip_tokenizer_init: bool = Field(False, description="run on token ids alone")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    dtype: DType = Field(
        "auto", description="dtype of weights and activations; auto takes the checkpoint's, if the device has it"
    )
    max_model_len: Annotated[int, Field(gt=0)] | None = Field(None, description="longest sequence, prompt and output")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = Field(
        "auto", description="dummy draws random weights from the config"
    )
    model_impl: Literal["auto", "agnostic", "transformers"] = Field("auto", description="model track")
    runner: Literal["auto", "generate", "pooling"] = Field("auto", description="what the model is used for")
    chat_template: str | None = Field(None, description="a Jinja template, or the file that holds it")
    hf_overrides: dict[str, Any] = Field(default_factory=dict, description="values that replace those of config.json")
    override_generation_config: dict[GenerationValue, float] = Field(
        default_factory=dict, description="values that replace those of generation_config.json, for requests that send none"
    )
    served_model_name: list[str] = Field(default_factory=list, description="names that the server answers to")
    trust_remote_code: Literal[False] = Field(False, description="code in a model repository is never run")
    seed: int = Field(0, description="seed of dummy weights")
    quantization: Literal["int8", "int4", "fp8"] | None = Field(
        None, description="round weights to these numbers while loading; default: as the checkpoint has them"
    )
    activation: Literal["exact", "int8", "fp8"] = Field(
        "exact",
        description="int8 rounds the inputs of products with packed weights to eight bits, fp8 those of products with fp8 "
        "weights to fp8: faster, less accurate",
    )
    dummy_bound: Annotated[float, Field(gt=0)] | None = Field(
        None, description="dummy weights are uniform within this; default: normal with deviation 0.02"
    )


class CacheConfig(_Settings):
    """The paged KV cache."""

    block_size: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        None, description="tokens per block; negotiated if not given"
    )
    kv_cache_dtype: KVDType = Field("auto", description="dtype of the KV cache; auto takes the model's")
    kv_cache_memory_bytes: Annotated[int, Field(gt=0)] | None = Field(
        None, description="absolute size; overrides the utilization"
    )
    device_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="fraction of the device's memory to use"
    )
    num_gpu_blocks_override: Annotated[int, Field(gt=1)] | None = Field(None, description="number of blocks of the full group")
    enable_prefix_caching: bool = Field(True, description="share full blocks between requests with equal prefixes")


class SchedulerConfig(_Settings):
    """What runs in one step."""

    max_num_seqs: Annotated[int, Field(gt=0, le=65536)] = Field(256, description="most sequences running")
    max_num_batched_tokens: Annotated[int, Field(gt=0)] = Field(2048, description="most tokens in one step")
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = Field(
        0, description="most prompt tokens of one request in a step; 0: no limit"
    )
    enable_chunked_prefill: bool = Field(True, description="let a prompt span several steps")
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="order of waiting requests")
    async_scheduling: bool | None = Field(
        None, description="schedule the next step while one runs; auto: where the device is asynchronous"
    )


class PlatformConfig(_Settings):
    """Where it runs, and which providers may be chosen."""

    platform: str | None = Field(None, description="platform or vendor; default: the best match")
    device_ids: list[str] | None = Field(None, description="devices by the ids of `platforms list`")
    provider: dict[str, str] = Field(
        default_factory=dict, description="OP=NAME forces a provider; all=reference is the generic path"
    )
    deny_provider: list[str] = Field(default_factory=list, description="providers that must not be chosen")
    program: str | None = Field(
        None, description="step program: core, or one that the platform brings; default: core, unless another is proven faster"
    )
    strict: bool = Field(False, description="raise where a chosen provider fails in warm-up, instead of taking the next")
    allow_fallback: bool = Field(False, description="use the host when an accelerator is visible but cannot be used")
    allow_host_ops: bool = Field(False, description="run ops that nobody offers on the host, counted")
    enforce_eager: bool = Field(False, description="never capture graphs")
    compile: str | None = Field(
        None,
        min_length=1,
        description="backend of torch.compile that makes one graph of the model, inductor for one; default: not compiled",
    )
    graph_sizes: list[Annotated[int, Field(gt=0)]] | None = Field(
        None, description="padded numbers of sequences whose decode steps are captured; default: what the platform asks for"
    )


class ParallelConfig(_Settings):
    """How many devices share one model."""

    tensor_parallel_size: Annotated[int, Field(gt=0, le=64)] = Field(1, description="devices that share each layer")
    data_parallel_size: Annotated[int, Field(gt=0, le=64)] = Field(
        1, description="engines side by side behind one server, each with devices of its own"
    )


class ObservabilityConfig(_Settings):
    """What is logged."""

    disable_log_stats: bool = Field(False, description="no statistics in the log")


class EngineConfig(_Settings):
    """Everything an engine is made of."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    platform: PlatformConfig = PlatformConfig()
    parallel: ParallelConfig = ParallelConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from flat options, as `LLM(...)` and the command line give them.

        Raises UnknownOptionError with the nearest name, ConfigError for a wrong value.
        """
        grouped: dict[str, dict[str, Any]] = {}
        owners = option_owners()
        for name, value in options.items():
            key = ALIASES.get(name, name)
            if key not in owners:
                raise UnknownOptionError(
                    "Unknown option",
                    on=name,
                    found="no such option",
                    expected="a known option",
                    fix=instead("options", name) or nearest(name, owners),
                )
            if key in grouped.setdefault(owners[key], {}):
                raise ConfigError(
                    "Option is given twice",
                    on=name,
                    found=f"{key} under two names",
                    expected="one of them",
                    fix=f"leave {name} out",
                )
            grouped[owners[key]][key] = value
        try:
            return cls.model_validate(grouped)
        except ValidationError as error:
            first = error.errors()[0]
            name = next((str(part) for part in reversed(first["loc"]) if part in owners), "options")
            raise ConfigError(
                "Option has a wrong value",
                on=name,
                found=repr(first.get("input")),
                expected=first["msg"].removeprefix("Value error, "),
                fix=f"change {name}; `vllm-core serve --help` lists the options",
            ) from error

    def with_changes(self, changes: Mapping[str, Any]) -> EngineConfig:
        """Return a copy with flat options replaced, checked like new ones; `model_fields_set` of groups is kept."""
        if not changes:
            return self
        owners = option_owners()
        updated: dict[str, Any] = {}
        for group, settings in self:
            mine = {name: value for name, value in changes.items() if owners.get(name) == group}
            fresh = type(settings).model_validate({**settings.model_dump(), **mine})
            updated[group] = settings.model_copy(update={name: getattr(fresh, name) for name in mine})
            updated[group].__pydantic_fields_set__.difference_update(set(mine) - settings.model_fields_set)
        return self.model_copy(update=updated)


ALIASES = {"gpu_memory_utilization": "device_memory_utilization", "enable_eager": "enforce_eager"}
"""Names that users of vLLM know, and ours."""


def groups() -> dict[str, type[_Settings]]:
    """The settings classes by name of their field in EngineConfig."""
    return {name: field.annotation for name, field in EngineConfig.model_fields.items() if isinstance(field.annotation, type)}


def option_owners() -> dict[str, str]:
    """Which group each flat option belongs to."""
    return {option: group for group, cls in groups().items() for option in cls.model_fields}


KNOWN_ENVIRONMENT = {
    "VLLM_CORE_CACHE": "folder of probe results and compiled kernels",
    "VLLM_CORE_LOG_LEVEL": "DEBUG, INFO, WARNING or ERROR",
    "VLLM_CORE_OPS_PATH": "a native op library to try first; its failure is an error",
    "VLLM_CORE_DEMO_MODEL": "path of the demo model's GGUF file",
    "VLLM_CORE_API_KEY": "key that the server asks for",
    "VLLM_CORE_PLUGINS": "comma-separated names of the platforms that may be loaded",
    "VLLM_CORE_PROBE_TIMEOUT_S": "time limit of one probe",
}


def check_environment(environ: Mapping[str, str] | None = None) -> list[str]:
    """Check the variables of this process. Raises UnknownOptionError for a `VLLM_CORE_*` that does not exist.

    Returns the `VLLM_*` names that are not ours, to be mentioned once.
    """
    names = [name for name in (os.environ if environ is None else environ) if name.startswith("VLLM_")]
    for name in names:
        if name.startswith("VLLM_CORE_") and name not in KNOWN_ENVIRONMENT:
            raise UnknownOptionError(
                "Unknown environment variable",
                on=name,
                found="no such variable",
                expected="a known VLLM_CORE_* variable",
                fix=nearest(name, KNOWN_ENVIRONMENT),
            )
    return sorted(name for name in names if not name.startswith("VLLM_CORE_") and name != "VLLM_PLATFORM")
