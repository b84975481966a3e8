"""What all decoders with experts read the same way from their configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_core.models.fields import Fields
from vllm_core.models.spec import ExpertSpec, ModelSpec


def with_experts(
    spec: ModelSpec, fields: Fields, *, count: str, inner: int, renormalize: bool, sparse: Sequence[bool]
) -> ModelSpec:
    """A dense decoder with experts in the layers that are ``sparse``; ``count`` is the config's key for their number.

    Configs written by transformers 5 may call it ``num_local_experts``. Raises ModelConfigError.
    """
    if not any(sparse):
        return spec
    key = count if fields.config.get(count) is not None else "num_local_experts"
    number, chosen = fields.integer(key), fields.integer("num_experts_per_tok")
    if chosen > number:
        fields.fail("num_experts_per_tok", f"at most {key} ({number})")
    layers = tuple(replace(layer, sparse=here) for layer, here in zip(spec.layers, sparse, strict=True))
    experts = ExpertSpec(count=number, chosen=chosen, intermediate_size=inner, renormalize=renormalize)
    # Where no layer is dense nobody needs memory, or a share, of an MLP of that size.
    dense = spec.intermediate_size if not all(sparse) else inner
    return replace(spec, layers=layers, experts=experts, intermediate_size=dense)
