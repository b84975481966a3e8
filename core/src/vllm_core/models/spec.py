"""What a model is, as plain data: read from its config alone, without torch.

`models/<architecture>.py` turns a Hugging Face config into a `ModelSpec`; layers are built from it, call sites and
KV groups are derived from it, and `platforms explain` plans with it for machines that are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from vllm_core.api import CallSite, KVGroupSpec
from vllm_core.api.ops import FP8_ACTIVATION, INT8_ACTIVATION, OPS, WHOLES, family_of
from vllm_core.errors import ConfigError

_ROUNDING = {"int8": INT8_ACTIVATION, "fp8": FP8_ACTIVATION}
"""Feature of the products whose inputs are rounded."""

Pooling: TypeAlias = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of some layers; `scaling` keeps the config's own names (factor, low_freq_factor, ...)."""

    theta: float
    rotary_dim: int
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    scaling: Mapping[str, object] = field(default_factory=dict)
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The experts of a layer that has them: `chosen` of `count` compute a token.

    `renormalize`: the chosen ones' shares of the router's softmax are divided by their sum.
    """

    count: int
    chosen: int
    intermediate_size: int
    renormalize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What differs from layer to layer. `sparse`: its MLP is the model's mixture of experts. `sinks`: attention has sinks."""

    window: int | None = None
    rope: RopeSpec | None = None
    sparse: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder, dense or with experts, or an encoder.

    `norm_offset` is added to stored norm weights when they are loaded. `sandwich_norms`: each sub-layer's output is
    normed before it is added (Gemma). `post_norm`: norms follow the residual add (BERT).
    `extended_position` is how far dynamic NTK scaling reaches beyond `max_position`, in tokens. A user has to ask for
    more than `max_position`, because one rotary table serves all sequences: a longer context changes short ones too.
    `quantization` rounds weights while they are loaded, `rounded_inputs` the inputs of products with packed weights.
    `workers` is by how many devices each layer is shared: heads and inner sizes are then those of one worker.
    `num_labels` is how many classes a model that classifies tells apart; `label_pooler`: BERT's pooler comes before them.
    """

    architecture: str
    kind: Literal["decoder", "encoder"]
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    post_norm: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    tied_embeddings: bool = False
    token_types: int = 0
    learned_positions: bool = False
    pooling: Pooling | None = None
    normalize_pooled: bool = True
    num_labels: int = 0
    label_pooler: bool = False
    weight_prefix: str = "model."
    extended_position: int | None = None
    experts: ExpertSpec | None = None
    workers: int = 1
    quantization: Literal["int8", "int4", "fp8"] | None = None
    rounded_inputs: Literal["int8", "fp8"] | None = None

    def shard(self, workers: int) -> ModelSpec:
        """What one of ``workers`` computes: its query heads, the KV heads that they read, its part of the MLP.

        With more workers than KV heads each KV head is kept by several. KV heads that fewer workers cannot share equally are
        filled up with heads of zeros, and so are the query heads that read them: what they compute is multiplied by zeros.
        Raises ConfigError where the sizes do not divide.
        """
        if workers == 1:
            return self
        if not self._divides(workers):
            raise self._not_shared(workers)
        kv = -(-self.num_kv_heads // workers)
        return replace(
            self,
            num_heads=kv * self.num_heads // self.num_kv_heads if workers <= self.num_kv_heads else self.num_heads // workers,
            num_kv_heads=kv,
            intermediate_size=self.intermediate_size // workers,
            experts=self._experts_of(workers),
            workers=workers,
        )

    def _experts_of(self, workers: int) -> ExpertSpec | None:
        """Every worker has a part of each expert."""
        whole = self.experts
        return None if whole is None else replace(whole, intermediate_size=whole.intermediate_size // workers)

    def _not_shared(self, workers: int) -> ConfigError:
        fitting = [str(count) for count in range(1, self.num_heads + 1) if self._divides(count)]
        inner = " and ".join(map(str, sorted(self._inner_sizes())))
        return ConfigError(
            "Model cannot be shared by this many workers",
            on=f"{self.architecture}, tensor_parallel_size {workers}",
            found=f"{self.num_heads} attention heads, {self.num_kv_heads} KV heads, {inner} inner features",
            expected=f"heads and inner features that {workers} workers can share equally",
            fix=f"--tensor-parallel-size {', '.join(fitting)}",
        )

    def _divides(self, workers: int) -> bool:
        kv = self.num_kv_heads
        shared = not any(size % workers for size in self._inner_sizes())
        return shared and (workers <= kv or not (workers % kv or self.num_heads % workers))

    def _inner_sizes(self) -> set[int]:
        """Inner features of all MLPs."""
        return {self.intermediate_size} | (set() if self.experts is None else {self.experts.intermediate_size})

    @property
    def waits(self) -> str:
        """Where the model's code waits for numbers of the device, so that no step of it can be captured; else empty."""
        return ""

    @property
    def is_all_ops(self) -> bool:
        """Whether a step of the model is nothing but calls of ops."""
        return True

    def notes(self) -> tuple[str, ...]:
        """What a user should know of how this model is run, for the Plan."""
        return ()

    @property
    def has_dense_mlp(self) -> bool:
        """Whether some layer's MLP is no mixture of experts."""
        return not all(layer.sparse for layer in self.layers)

    @property
    def is_fused_around_linear(self) -> bool:
        """Whether nothing but a norm lies before a layer's products, and nothing but the residual add behind them."""
        return self.kind == "decoder" and self.norm == "rms" and self.gated and not self.sandwich_norms and self.workers == 1

    @property
    def is_plain_stack(self) -> bool:
        """Whether all layers are such as `decode_layers` is given: dense, full attention, one rotation of halves, no more."""
        plain = self.experts is None and self.rounded_inputs is None and not self.attention_soft_cap
        full = not any(layer.window is not None or layer.sinks or layer.sparse for layer in self.layers)
        ropes = [layer.rope for layer in self.layers]
        turned = all(rope is not None and not rope.interleaved and rope == ropes[0] for rope in ropes)
        return self.is_fused_around_linear and plain and full and turned and bool(ropes)

    @property
    def pooled_size(self) -> int:
        """Values of what is pooled: a hidden state, or the logits of classes."""
        return self.num_labels or self.hidden_size

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return self.attention_scale if self.attention_scale is not None else float(self.head_size) ** -0.5

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """Group the layers by what they keep: first all full layers, then each window size. Encoders have none."""
        if self.kind == "encoder":
            return ()
        windows = sorted({layer.window for layer in self.layers}, key=lambda w: (w is not None, w or 0))
        return tuple(
            KVGroupSpec(
                index=index,
                kind="full" if window is None else "window",
                layers=tuple(i for i, layer in enumerate(self.layers) if layer.window == window),
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                window=window,
            )
            for index, window in enumerate(windows)
        )

    def group_of_layer(self) -> tuple[int, ...]:
        """KV group index of each layer."""
        groups = {layer: group.index for group in self.kv_groups() for layer in group.layers}
        return tuple(groups[i] for i in range(len(groups)))

    def call_sites(self, kv_dtype: str, tokens_per_block: int | None = None) -> tuple[CallSite, ...]:
        """Every place that calls an op, by role; layers with equal needs share one."""
        plain = [*self._plain_sites(), *self._shared_sites()]
        rounded = frozenset[str]() if self.rounded_inputs is None else frozenset({_ROUNDING[self.rounded_inputs]})
        sites = [CallSite(op=op, role=role, dtype=self.dtype, features=rounded & OPS[op].features) for op, role in plain]
        interleaved = any(layer.rope is not None and layer.rope.interleaved for layer in self.layers)
        rope = frozenset({"interleaved"}) if interleaved else frozenset[str]()
        if any(layer.rope is not None for layer in self.layers):
            sites.append(CallSite(op="rotary_embedding", role="attention", dtype=self.dtype, features=rope))
        for group in self.kv_groups():
            masks = {"sliding_window"} if group.window is not None else set[str]()
            if self.attention_soft_cap:
                masks.add("soft_cap")
            if any(self.layers[layer].sinks for layer in group.layers):
                masks.add("sinks")
            asked = {"paged_attention": frozenset(masks), "qk_norm_rope_kv_write": rope}
            asked["qk_norm_rope_attention"] = rope | masks
            sites.extend(
                CallSite(
                    op=op,
                    role=f"kv.{group.index}.{group.kind}",
                    dtype=self.dtype,
                    group=group.index,
                    kv_dtype=kv_dtype,
                    head_size=self.head_size,
                    tokens_per_block=tokens_per_block,
                    features=asked.get(op, frozenset()),
                )
                for op in (*family_of("kv_write"), *(WHOLES if self.is_plain_stack else ()))
            )
        return tuple(sites)

    def _shared_sites(self) -> tuple[tuple[str, str], ...]:
        """What workers that share a model call beside the rest."""
        if self.workers == 1:
            return ()
        return ("embedding_shard", "embedding"), *((op, "comm") for op in family_of("all_reduce"))

    def _plain_sites(self) -> tuple[tuple[str, str], ...]:
        sites = [("embedding", "embedding"), ("linear_pack", "linear"), ("linear", "linear"), ("gather_rows", "tail")]
        if self.norm == "rms":
            sites += [("rms_norm", "norm"), ("add_rms_norm", "norm")]
        else:
            sites += [("layer_norm", "norm")]
        sites.append(("add", "residual"))
        if self.is_fused_around_linear:
            sites += [(op, "linear") for op in ("linear_add", "rms_norm_linear")]
        if self.has_dense_mlp:
            if self.kind == "decoder" and self.gated:
                sites.append(("rms_norm_gated_linear" if self.is_fused_around_linear else "gated_linear", "linear"))
            sites.append(("gated_activation", "mlp") if self.gated else ("activation", "mlp"))
        if self.experts is not None:
            sites += [("moe_route", "mlp"), *((op, "moe") for op in family_of("moe"))]
        if self.kind == "encoder":
            sites.append(("encoder_attention", "attention"))
        if self.pooling is not None:
            sites.append(("pool", "tail"))
        if self.logit_soft_cap or self.label_pooler:
            sites.append(("soft_cap", "tail"))
        sites += [(op, "state") for op in ("batch_update", "build_step", "advance")]
        sites += [(op, "tail") for op in ("logit_adjust", "grammar_mask", "sample", "log_probabilities")]
        return tuple(sites)
