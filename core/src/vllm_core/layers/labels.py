"""The head of a model that classifies: from hidden states to logits of classes.

It is applied to every token of a step, of which pooling takes one a sequence: its products are small beside a layer's, and the
engine pools what a forward returns whatever that is.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_core.api import Device
from vllm_core.layers.linear import BoundOps, PackedLinear
from vllm_core.layers.weights import WeightLoader
from vllm_core.models.spec import ModelSpec
from vllm_core.ops.dtypes import TORCH_DTYPES


class LabelHead:
    """A linear layer; BERT's pooler, another one with a tanh behind it, comes first where the model has it."""

    def __init__(self, spec: ModelSpec, device: Device, ops: BoundOps, max_tokens: int) -> None:
        self._spec = spec
        self._dtype: torch.dtype = TORCH_DTYPES[spec.dtype]
        self._linear = ops.get("linear", "linear")
        self._classifier = PackedLinear(device, ops)
        self._out = device.allocate("workspace", (max_tokens, spec.num_labels), self._dtype)
        self._pooler: PackedLinear | None = None
        if spec.label_pooler:
            self._pooler = PackedLinear(device, ops)
            self._cap = ops.get("soft_cap", "tail")
            self._wide = device.allocate("workspace", (max_tokens, spec.hidden_size), torch.float32)
            self._pooled = device.allocate("workspace", (max_tokens, spec.hidden_size), self._dtype)

    def expect(self, loader: WeightLoader) -> None:
        """Register the weights by their Hugging Face names. Every worker keeps all of them."""
        spec, hidden, bert = self._spec, self._spec.hidden_size, self._pooler is not None
        if self._pooler is not None:
            self._pooler.expect(loader, {"pooler.dense": hidden}, hidden, self._dtype, bias=True)
        name = "classifier" if bert else "score"
        self._classifier.expect(loader, {name: spec.num_labels}, hidden, self._dtype, bias=bert)

    def run(self, hidden: Any) -> Any:
        """Logits [T, num_labels] in the model's dtype of hidden states [T, H], valid until the next step."""
        count = len(hidden)
        if self._pooler is not None:
            wide, pooled = self._wide[:count], self._pooled[:count]
            self._linear(wide, hidden, self._pooler.packed)
            self._cap(wide, 1.0)  # 1 tanh(x / 1)
            pooled.copy_(wide)
            hidden = pooled
        out = self._out[:count]
        self._linear(out, hidden, self._classifier.packed)
        return out
