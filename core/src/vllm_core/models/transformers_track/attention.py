"""The attention function that transformers calls, and the two ways it is served: paged KV, and none for encoders.

transformers hands keyword arguments of a model's forward on to its attention function; one of them, `vllm_core_step`,
carries the step. No mask function is registered under our name, so that transformers builds no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from vllm_core.api import StepInputs
from vllm_core.models.transformers_track.description import RewiredSpec, refused

NAME = "vllm_core"
"""The attention implementation's name in transformers."""


@dataclass(frozen=True, slots=True)
class Masks:
    """What a call of attention makes of its scores. A window or a soft cap of 0 is none; sinks are float32 [Hq]."""

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None


class AttentionStep(Protocol):
    """Attention of one step; tensors are [T, heads, D]. `calls` counts."""

    calls: int

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks) -> torch.Tensor:
        """Return [T, Hq, D]."""


@dataclass(frozen=True, slots=True)
class LayerSite:
    """What one decoder layer calls, and what the Plan knows of it."""

    group: int
    window: int
    write: Callable[..., Any]
    attend: Callable[..., Any]


@dataclass(slots=True)
class PagedStep:
    """Causal attention over the paged KV; ``rows`` are all that is wanted of the last layer, if not None."""

    spec: RewiredSpec
    sites: tuple[LayerSite, ...]
    inputs: StepInputs
    kv: Sequence[Any]
    rows: torch.Tensor | None = None
    calls: int = field(default=0, init=False)

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks) -> torch.Tensor:
        """Write the layer's new keys and values, then attend to all that its group keeps."""
        self.calls += 1
        site, inputs, kv = self.sites[module.layer_idx], self.inputs, self.kv[module.layer_idx]
        spec, sinks = self.spec, masks.sinks
        found = (masks.window, masks.soft_cap, k.shape[1], k.shape[2], v.shape[2], 0 if sinks is None else len(sinks))
        of_sinks = spec.num_heads if spec.layers[module.layer_idx].sinks else 0
        planned = (site.window, spec.attention_soft_cap, spec.num_kv_heads, spec.head_size, spec.head_size, of_sinks)
        if found != planned:
            names = "window, soft cap, KV heads, key size, value size, sinks"
            raise refused(f"{spec.classname}, layer {module.layer_idx}", f"{names}: {found}, the plan says {planned}")
        site.write(kv, k, v, inputs.slot_mapping[site.group])
        out = torch.empty_like(q)
        site.attend(
            out,
            q,
            kv,
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_tables[site.group],
            inputs.max_query_len,
            inputs.max_seq_len,
            masks.scale,
            masks.window,
            masks.soft_cap,
            *(() if sinks is None else (sinks,)),
        )
        return out


@dataclass(slots=True)
class EncoderStep:
    """Bidirectional attention within each row."""

    spec: RewiredSpec
    call: Callable[..., Any]
    inputs: StepInputs
    calls: int = field(default=0, init=False)

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks) -> torch.Tensor:
        """Attend to all tokens of the row."""
        self.calls += 1
        if masks.window or masks.soft_cap or masks.sinks is not None:
            more = "" if masks.sinks is None else ", attention sinks"
            raise refused(
                self.spec.classname, f"an encoder layer with window {masks.window} and soft cap {masks.soft_cap}{more}"
            )
        out = torch.empty_like(q)
        self.call(out, q, k, v, self.inputs.query_start, self.inputs.max_query_len, masks.scale)
        return out


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    vllm_core_step: AttentionStep | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Serve transformers' call: query [1, Hq, T, D], key and value [1, Hk, T, D] in, [1, T, Hq, D] and no weights out."""
    name = type(module).__name__
    if vllm_core_step is None:
        raise refused(name, "the model does not hand keyword arguments on to its attention")
    if attention_mask is not None or others.get("position_bias") is not None:
        raise refused(name, "the model brings a mask or bias of its own")
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    sinks: torch.Tensor | None = others.get("s_aux")
    masks = Masks(scale, sliding_window or 0, softcap or 0.0, None if sinks is None else sinks.float())
    return vllm_core_step.attend(module, q, k, v, masks)[None], None


def register() -> None:
    """Make `NAME` known to transformers, through its public registry; doing it again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
