"""What `decode_layers` is given of a model: all layers of a dense decoder, as one op computes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderLayer:
    """One layer. qkv, out, gate_up and down are what `linear_pack` returned for weights [(Hq + 2 Hk) D, H], [H, Hq D], [2I, H]
    and [H, I]; the norms float32 [H], of heads [D] or None; kv what `kv_bind` returned."""

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    input_norm: Any
    mlp_norm: Any
    q_norm: Any
    k_norm: Any
    kv: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderLayers:
    """All layers, in order: pre-norm, dense, gated MLPs, full causal attention, heads rotated by pairs D/2 apart.

    cos_sin is the rotary table, float32 [P, 2, R/2]; `scale` is that of attention scores, `activation` a kind of
    `gated_activation`. `made` is the provider's own, empty at first: what it made of the layers to run them.
    """

    layers: tuple[DecoderLayer, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float
    scale: float
    activation: str
    cos_sin: Any
    made: dict[Any, Any] = field(default_factory=dict)
