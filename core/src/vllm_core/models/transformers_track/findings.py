"""What was found out about a model's own code, as plain data: which of its modules compute what core's ops compute.

Paths are those of the model's modules. `trial.py` finds it out, `exchange.py` goes by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["parts", "groups"]
"""Rows of a product of queries, keys and values: one after the other, or a KV head's queries, key and value side by side."""
Pairs = Literal["halves", "pairs", "once"]
"""How a rotary module's cosines repeat: the second half is the first again, or each stands twice, or they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormForm:
    """An RMS norm. `offset` is added to its weight, `eps` names the attribute that holds its epsilon."""

    path: str
    offset: float
    eps: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryForm:
    """How a layer rotates queries and keys: `extras` are what its rotary module is called with beside tensors."""

    path: str
    extras: tuple[tuple[str, str], ...]
    pairs: Pairs
    interleaved: bool
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Products of one input, norms per head, rotation, attention, a product.

    `results` is how long the returned tuple is. `sinks` names the module's parameter with a sink per head, if there is one.
    """

    path: str
    layer: int
    products: tuple[str, ...]
    order: Order
    out: str
    q_norm: NormForm | None
    k_norm: NormForm | None
    rotary: RotaryForm | None
    results: int
    sinks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPForm:
    """down(f(gate(x)) * up(x)); `products` are gate and up, or the one that is both."""

    path: str
    products: tuple[str, ...]
    down: str
    kind: Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """A pre-norm layer: x + attention(norm(x)), then x + MLP(norm(x)). `results` is 0 where it returns a tensor alone."""

    path: str
    attention: AttentionForm
    mlp: MLPForm
    input_norm: NormForm
    mlp_norm: NormForm
    results: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A body that is nothing but an embedding, pre-norm layers one after the other, and a norm."""

    embedding: str
    norm: NormForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All of it. Modules of a layer form are in no other list but `attentions` and `mlps` of other layers.

    `sinks`: layers whose attention has sinks. `silent`: rotary modules whose results nobody reads once attention is exchanged.
    `narrows`: what follows the last layer goes row by row. `chain`: the body's own code is not needed. `head`: the module whose
    output are the logits. `waits`: where the code that is left as it is asks the device for numbers, so that its steps cannot
    be captured. `failure`: why nothing was found out.
    """

    norms: tuple[NormForm, ...] = ()
    attentions: tuple[AttentionForm, ...] = ()
    mlps: tuple[MLPForm, ...] = ()
    layers: tuple[LayerForm, ...] = ()
    sinks: tuple[int, ...] = ()
    silent: tuple[str, ...] = ()
    narrows: bool = False
    chain: Chain | None = None
    head: str = ""
    waits: str = ""
    failure: str = ""

    def rotary_of(self, layer: int) -> RotaryForm | None:
        """How a layer rotates, where its attention is exchanged."""
        found = (*self.attentions, *(one.attention for one in self.layers))
        return next((one.rotary for one in found if one.layer == layer), None)

    def sites(self) -> tuple[tuple[str, str], ...]:
        """Ops that what is exchanged calls, beside those of every model: (op, role)."""
        sites: list[tuple[str, str]] = []
        attentions = (*self.attentions, *(one.attention for one in self.layers))
        # Those of the fused op's parts, too, which nobody may offer.
        if self.norms or attentions:
            sites.append(("rms_norm", "norm"))
        if attentions and all(one.rotary is None for one in attentions):
            sites.append(("rotary_embedding", "attention"))
        if self.layers:
            sites += [("add_rms_norm", "norm"), ("add", "residual")]
            sites += [(op, "linear") for op in ("linear_add", "rms_norm_linear", "rms_norm_gated_linear")]
        if self.chain is not None:
            sites.append(("embedding", "embedding"))
        if self.mlps:
            sites.append(("gated_linear", "linear"))
        if self.mlps or self.layers:
            sites.append(("gated_activation", "mlp"))
        return tuple(sites)

    def lines(self, layers: int) -> tuple[str, ...]:
        """For a person: what runs on core's ops, and what was left as transformers wrote it."""
        if self.failure:
            return (f"track transformers: only linear layers and attention run on core's ops: {self.failure}",)
        counts = {
            "layers": len(self.layers),
            "attentions": len(self.attentions),
            "MLPs": len(self.mlps),
            "norms": len(self.norms),
        }
        found = [f"{count} {what}" + (f" of {layers}" if what == "layers" else "") for what, count in counts.items() if count]
        found += ["the embedding"] if self.chain is not None else []
        found += ["the head"] if self.head else []
        lines = [f"track transformers: exchanged for core's ops: {', '.join(found) or 'linear layers alone'}"]
        if self.waits:
            lines.append(f"track transformers: no step is captured: {self.waits}")
        return tuple(lines)


NOTHING = Findings()
"""Nothing is exchanged."""
