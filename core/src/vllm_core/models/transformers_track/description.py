"""From a Hugging Face config to a `ModelSpec`, and which models this track refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

from vllm_core.api import CallSite
from vllm_core.api.ops import family_of
from vllm_core.errors import ConfigError, ModelConfigError, nearest
from vllm_core.models.spec import LayerSpec, ModelSpec, RopeSpec
from vllm_core.models.transformers_track.findings import NOTHING, Findings
from vllm_core.models.transformers_track.parts import shared_layers, shares_attention

_ATTENTION = {"full_attention", "attention", "sliding_attention"}
_NEEDS = (
    ("kv_lora_rank", "multi-head latent attention"),
    ("attention_chunk_size", "chunked attention"),
    ("num_kv_shared_layers", "layers that share the KV of others"),
    ("quantization_config", "a quantised checkpoint"),
)
_STEERING = frozenset({"attn_implementation", "auto_map", "experts_implementation", "fusion_config", "transformers_weights"})
"""Keys by which a config.json would choose code, kernels or files, instead of describing the model."""
_OFFSET_POSITIONS = frozenset(
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)
"""Encoders whose learned positions start after the padding token's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewiredSpec(ModelSpec):
    """A model whose norms, activations and embeddings stay those of transformers.

    `findings` say which modules are exchanged all the same. `position_offset` is added to positions. `classname` is the
    transformers class that is built. `shared_layers` are the linear layers that workers share: paths with ``*`` for an index,
    and the dimension along which the weight is cut.
    """

    position_offset: int = 0
    classname: str = ""
    shared_layers: tuple[tuple[str, int], ...] = ()
    findings: Findings = NOTHING

    def notes(self) -> tuple[str, ...]:
        """What of the model runs on core's ops, for the Plan."""
        if self.kind == "encoder":
            return ()
        if self.workers > 1:
            return ("track transformers: shared by workers, only linear layers and attention run on core's ops",)
        return self.findings.lines(len(self.layers))

    @property
    def waits(self) -> str:
        """Where the code that is left as it is waits for the device."""
        return self.findings.waits

    @property
    def is_all_ops(self) -> bool:
        """Whether nothing of the model's own code runs in a step."""
        return self.findings.chain is not None and (self.pooling is not None or bool(self.findings.head))

    @property
    def is_plain_stack(self) -> bool:
        """Never: the class goes from layer to layer."""
        return False

    def call_sites(self, kv_dtype: str, tokens_per_block: int | None = None) -> tuple[CallSite, ...]:
        """Every place that calls an op, rotary embeddings of exchanged attention among them."""
        rotary = [self.findings.rotary_of(index) for index in range(len(self.layers))]
        ropes = [None if one is None else RopeSpec(theta=1.0, rotary_dim=2, interleaved=one.interleaved) for one in rotary]
        layers = tuple(replace(layer, rope=rope) for layer, rope in zip(self.layers, ropes, strict=True))
        return ModelSpec.call_sites(replace(self, layers=layers), kv_dtype, tokens_per_block)

    def shard(self, workers: int) -> ModelSpec:
        """What one of ``workers`` computes. Raises ConfigError where the class has no plan for it, or sizes do not divide."""
        if workers > 1 and not shares_attention(self.shared_layers):
            raise ConfigError(
                "Model cannot be shared by workers",
                on=f"{self.classname or self.architecture}, tensor_parallel_size {workers}, track transformers",
                found="a class whose attention transformers has no plan to share, or one of more than cutting and summing",
                expected="queries, keys and values cut by rows, the output by columns",
                fix="--tensor-parallel-size 1, or --model-impl agnostic where it has the architecture",
            )
        # Not super(): a dataclass with slots is another class than the one that this method was written in.
        whole = self if workers == 1 else replace(self, findings=NOTHING)
        return ModelSpec.shard(whole, workers)

    def _divides(self, workers: int) -> bool:
        return self.num_kv_heads % workers == 0 and ModelSpec._divides(self, workers)

    def _shared_sites(self) -> tuple[tuple[str, str], ...]:
        return () if self.workers == 1 else tuple((op, "comm") for op in family_of("all_reduce"))

    def _plain_sites(self) -> tuple[tuple[str, str], ...]:
        sites = [("linear_pack", "linear"), ("linear", "linear"), ("gather_rows", "tail"), *self.findings.sites()]
        if self.kind == "encoder":
            sites.append(("encoder_attention", "attention"))
        if self.pooling is not None:
            sites.append(("pool", "tail"))
        sites += [(op, "state") for op in ("batch_update", "build_step", "advance")]
        sites += [(op, "tail") for op in ("logit_adjust", "grammar_mask", "sample", "log_probabilities")]
        return tuple(sites)


def describe(config: Mapping[str, Any], *, dtype: str, path: str) -> RewiredSpec:
    """Describe the model of a Hugging Face ``config``; ``path`` names it in errors. Loads no weights.

    Raises ModelConfigError for a broken config and for a model that cannot run on core's ops, saying why.
    """
    normal = normalise(config, path)
    _refuse_foreign(normal, path)
    kind = _kind(normal)
    headless = kind == "encoder" or _causal_class(normal) is None
    cls = model_class(normal, headless=headless, path=path)
    heads = _positive(normal, "num_attention_heads", path)
    hidden = _positive(normal, "hidden_size", path)
    cap = getattr(normal, "attn_logit_softcapping", None)
    offset = (normal.pad_token_id or 0) + 1 if normal.model_type in _OFFSET_POSITIONS else 0
    spec = RewiredSpec(
        architecture=_architecture(normal) or cls.__name__,
        kind=kind,
        dtype=dtype,
        vocab_size=_positive(normal, "vocab_size", path),
        hidden_size=hidden,
        intermediate_size=getattr(normal, "intermediate_size", None) or 4 * hidden,
        num_heads=heads,
        num_kv_heads=kv_heads(normal, heads),
        head_size=getattr(normal, "head_dim", None) or hidden // heads,
        max_position=_max_position(normal, path) - offset,
        layers=_layers(normal, path),
        attention_soft_cap=float(cap or 0.0),
        tied_embeddings=bool(getattr(normal, "tie_word_embeddings", False)),
        pooling=("mean" if kind == "encoder" else "last") if headless else None,
        position_offset=offset,
        classname=cls.__name__,
        shared_layers=shared_layers(normal),
    )
    if kind == "encoder":
        return spec
    findings = _findings(normal, spec, headless)
    layers = tuple(replace(layer, sinks=index in findings.sinks) for index, layer in enumerate(spec.layers))
    return replace(spec, findings=findings, layers=layers)


_FOUND: dict[tuple[str, bool], Findings] = {}
"""By config and head: a model is described several times in a process."""


def _findings(config: Any, spec: RewiredSpec, headless: bool) -> Findings:
    """What a trial finds out; how it failed where the class does not run at a small width."""
    key = config.to_json_string(use_diff=False), headless
    if key not in _FOUND:
        from vllm_core.models.transformers_track.recognise import recognise
        from vllm_core.models.transformers_track.trial import HEAD_SIZE, one_thread, run_trial

        longest = min(spec.max_position, _positive(config, "max_position_embeddings", "config"))
        options: dict[str, Any] = {"headless": headless, "max_position": longest, "offset": spec.position_offset}
        for size in (HEAD_SIZE, spec.head_size):
            try:
                with one_thread():
                    _FOUND[key] = recognise(run_trial(config, head_size=size, **options), spec, headless=headless)
                break
            except Exception as error:  # noqa: BLE001 - foreign code at sizes that it was not made for: it runs as it is
                reason = " ".join(str(error).split())[:200]
                _FOUND[key] = Findings(failure=f"at a small width its class raises {type(error).__name__}: {reason}")
    return _FOUND[key]


def normalise(config: Mapping[str, Any], path: str) -> Any:
    """Return transformers' own config object for ``config``. Raises ModelConfigError."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ModelConfigError(
            "Unknown model type",
            on=path,
            found=f"model_type {kind!r}" + (", code in the repository, which is never run" if "auto_map" in config else ""),
            expected="a model_type that the agnostic track or the installed transformers knows",
            fix=f"{nearest(str(kind), CONFIG_MAPPING.keys())} A newer transformers may know it.",
        )
    try:
        return CONFIG_MAPPING[kind].from_dict({k: v for k, v in config.items() if k not in _STEERING and not k.startswith("_")})
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelConfigError(
            "Config is broken",
            on=path,
            found=f"{type(error).__name__}: {error}",
            expected=f"the fields of a {kind} config",
            fix="repair config.json, or override the field with --hf-overrides",
        ) from error


def model_class(config: Any, *, headless: bool, path: str) -> Any:
    """The transformers class to build: with its language-model head, or without. Raises ModelConfigError."""
    cls = MODEL_MAPPING.get(type(config), None) if headless else _causal_class(config)
    if isinstance(cls, tuple):
        cls = cls[0]
    if cls is None:
        raise refused(path, f"{_architecture(config)} is neither a causal language model nor an encoder")
    if not cls._supports_attention_backend:
        raise refused(path, f"{cls.__name__} does its attention itself, not through transformers' AttentionInterface")
    return cls


def refused(on: str, why: str) -> ModelConfigError:
    """The error for a model that this track cannot run."""
    return ModelConfigError(
        "Model cannot be rewired onto core's ops",
        on=on,
        found=why,
        expected="causal or bidirectional softmax attention in every layer, through transformers' AttentionInterface",
        fix="use a model of another architecture, or one of the agnostic track",
    )


def _architecture(config: Any) -> str | None:
    return next(iter(config.architectures or ()), None)


def _causal_class(config: Any) -> Any:
    """The causal class of this config, if that is what its architecture asks for."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    classes = found if isinstance(found, tuple) else (found,)
    name = _architecture(config)
    return next((cls for cls in classes if cls is not None and name in (None, cls.__name__)), None)


def _kind(config: Any) -> Literal["decoder", "encoder"]:
    """Masked-language-model families are bidirectional, unless the config says decoder."""
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    return "encoder" if is_encoder else "decoder"


def _refuse_foreign(config: Any, path: str) -> None:
    name = _architecture(config) or type(config).__name__
    if getattr(config, "is_heterogeneous", False):
        raise refused(path, f"{name} has sizes that differ from layer to layer")
    if config.get_text_config() is not config:
        raise refused(path, f"{name} has parts beside its text model")
    if getattr(config, "is_encoder_decoder", False):
        raise refused(path, f"{name} is an encoder-decoder")
    for field, need in _NEEDS:
        if value := getattr(config, field, None):
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            more = f", {method}; this track loads plain weights" if method else ""
            raise refused(path, f"{field} in the config: {need}{more}")


def _positive(config: Any, field: str, path: str) -> int:
    value = getattr(config, field, None)
    if isinstance(value, int) and value > 0:
        return value
    raise ModelConfigError(
        "Config lacks a size",
        on=f"{path}: {field}",
        found=repr(value),
        expected="a positive integer",
        fix=f"add {field} to config.json, or give it with --hf-overrides",
    )


def kv_heads(config: Any, heads: int) -> int:
    """Heads of keys and values, as the config says."""
    if getattr(config, "multi_query", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or heads


def _max_position(config: Any, path: str) -> int:
    """Longest sequence whose rotary table does not depend on what else is in the batch.

    transformers picks longrope's factors for a whole batch by its longest sequence; below the original context it never
    switches.
    """
    limit = _positive(config, "max_position_embeddings", path)
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, original or limit)
    return limit


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """One dict of parameters, or one for each layer type."""
    if isinstance(parameters, Mapping):
        nested = [value for value in parameters.values() if isinstance(value, Mapping)]
        yield from nested or [parameters]


def _layers(config: Any, path: str) -> tuple[LayerSpec, ...]:
    count = _positive(config, "num_hidden_layers", path)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
    foreign = set(types) - _ATTENTION
    if foreign:
        raise refused(path, f"layers of type {', '.join(sorted(foreign))}")
    return tuple(LayerSpec(window=window if kind == "sliding_attention" else None) for kind in types[:count])
