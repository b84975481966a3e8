"""A model that computes nothing: what is left of a step is the engine's own cost (`vllm-core bench host`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_core.models.fields import Fields
from vllm_core.models.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    import torch

    from vllm_core.api import Device, QuantTensor, StepInputs

ARCHITECTURES = ("NullForCausalLM",)

TOKEN = 0
"""The only token that it ever says."""


def describe(config: Mapping[str, Any], *, dtype: str, pooling: str | None) -> ModelSpec:
    """One full KV group with tiny heads, so that block tables are used as in a real model."""
    fields = Fields(config)
    return ModelSpec(
        architecture=fields.architecture,
        kind="decoder",
        dtype=dtype,
        vocab_size=fields.integer("vocab_size", 8, least=TOKEN + 1),
        hidden_size=8,
        intermediate_size=8,
        num_heads=8,
        num_kv_heads=1,
        head_size=8,
        max_position=fields.integer("max_position_embeddings", 131072),
        layers=(LayerSpec(),),
        tied_embeddings=True,
    )


class NullModel:
    """`forward` returns a buffer untouched; `logits` writes zeros."""

    def __init__(self, spec: ModelSpec, device: Device, *, max_tokens: int) -> None:
        from vllm_core.ops.dtypes import TORCH_DTYPES

        self._whole = device.allocate("workspace", (max_tokens, spec.hidden_size), TORCH_DTYPES[spec.dtype])
        self._hidden, self._num_tokens = self._whole, max_tokens

    def wanted(self, name: str, shape: tuple[int, ...]) -> None:
        """Nothing is read, so nothing is cut."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor | QuantTensor]]) -> None:
        """There are no weights: whatever the checkpoint holds is not read."""

    def load_dummy(self, seed: int, bound: float | None = None) -> None:
        """There are no weights."""

    def forward(self, inputs: StepInputs, kv: Sequence[Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return [T, H] of zeros."""
        if inputs.num_tokens != self._num_tokens:
            self._num_tokens = inputs.num_tokens
            self._hidden = self._whole[: inputs.num_tokens]
        return self._hidden

    def logits(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the same logits to every row of ``out``: all 0, of which the first is the largest."""
        out.zero_()
