"""From a specification to a model on a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from vllm_core.api import Device, QuantTensor, StepInputs
from vllm_core.layers.decoder import Decoder
from vllm_core.layers.encoder import Encoder
from vllm_core.layers.linear import BoundOps
from vllm_core.layers.shard import ALONE, Cut, Shard
from vllm_core.models import null
from vllm_core.models.spec import ModelSpec


class Model(Protocol):
    """What the engine asks of a model. Called from the engine's thread."""

    def wanted(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """What is needed of a checkpoint tensor, asked before it is read; None is all of it. Raises WeightsError."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor | QuantTensor]]) -> None:
        """Take the weights: (checkpoint name, host tensor) in any order, whole or as `wanted`, read once.

        Raises WeightsError.
        """

    def load_dummy(self, seed: int, bound: float | None = None) -> None:
        """Draw random weights that depend on ``seed`` and their names alone."""

    def forward(self, inputs: StepInputs, kv: Sequence[Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step; ``kv`` holds what `kv_bind` returned for each layer.

        Returns hidden states [T, H] after the final norm, or, where the model classifies, logits of classes [T, num_labels] in
        its dtype; in a buffer that the next step overwrites. ``rows``, int64 [R] with 0 <= R < T, are the only ones that are
        wanted: a model may return [R, H] of these.
        """

    def logits(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write float32 [R, V] from hidden rows [R, H]. Generating models only."""


def build_model(
    spec: ModelSpec,
    device: Device,
    ops: BoundOps,
    *,
    max_tokens: int,
    max_model_len: int | None = None,
    shard: Shard = ALONE,
    max_rows: int | None = None,
) -> Model:
    """Build the model and allocate its workspace for steps of up to ``max_tokens`` tokens; weights come after.

    ``max_model_len`` is the longest sequence in tokens; rotary tables are made for it. ``shard`` says which part of the
    model this worker computes, ``max_rows`` how many rows logits are asked for at once. Raises MemoryBudgetError.
    """
    if spec.architecture in null.ARCHITECTURES:
        return null.NullModel(spec, device, max_tokens=max_tokens)
    if spec.kind == "encoder":
        return Encoder(spec, device, ops, max_tokens=max_tokens, shard=shard)
    length = max_model_len or spec.max_position
    return Decoder(spec, device, ops, max_tokens=max_tokens, max_model_len=length, shard=shard, max_rows=max_rows)
