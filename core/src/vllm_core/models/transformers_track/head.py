"""A model's body, which runs the layers, and what stands in its place while the head alone runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast


def body_of(model: Any, whole: bool) -> Any:
    """What runs the layers: ``model`` as a ``whole``, or the part below its language-model head."""
    return model if whole else model.get_decoder()


class GivenRows(nn.Module):
    """Stands where the body was: returns `hidden` [1, R, H], whatever it is called with."""

    hidden: torch.Tensor

    def forward(self, *_: Any, **__: Any) -> _BodyOutput:
        """The rows that were set."""
        return _BodyOutput(last_hidden_state=self.hidden)


@dataclass
class _BodyOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    """Every field that some causal forward reads of its body's output."""

    cross_attentions: None = None
