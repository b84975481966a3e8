"""The classes of a model that classifies: their names, and how its logits become probabilities. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from vllm_core.errors import RequestError
from vllm_core.models.fields import Fields
from vllm_core.outputs import ClassificationOutput, ClassificationRequestOutput, EmbeddingRequestOutput

SUFFIX = "ForSequenceClassification"
MOST = 1 << 16
Kind: TypeAlias = Literal["softmax", "sigmoid", "none"]
_PROBLEMS: dict[str, Kind] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of the classes in the order of the logits. `kind` is what makes probabilities of them, for a regression none."""

    names: tuple[str, ...]
    kind: Kind

    def probabilities(self, logits: Sequence[float]) -> list[float]:
        """One for each class; the values themselves for a regression."""
        if self.kind == "none":
            return list(logits)
        if self.kind == "sigmoid":
            return [_sigmoid(value) for value in logits]
        top = max(logits)
        parts = [math.exp(value - top) for value in logits]
        total = sum(parts)
        return [part / total for part in parts]


def classified(output: EmbeddingRequestOutput, labels: Labels) -> ClassificationRequestOutput:
    """What the engine pooled, as classes."""
    logits = output.outputs.embedding
    probs = labels.probabilities(logits) if logits else []
    return ClassificationRequestOutput(
        output.request_id, output.prompt_token_ids, ClassificationOutput(probs), output.finished, output.error
    )


def check_use(labels: Labels | None, *, wants_classes: bool) -> None:
    """Raises RequestError where a model that classifies is asked for vectors, or another one for classes."""
    if (labels is not None) == wants_classes:
        return
    raise RequestError(
        "Model is used for something else",
        on="model",
        found="a model without classes" if wants_classes else f"a model of {len(labels.names) if labels else 0} classes",
        expected="a model with a head for classes of whole texts" if wants_classes else "a model whose vectors mean something",
        fix="use embed(), or /v1/embeddings and /score" if wants_classes else "use classify(), or /classify",
    )


def classifies(architecture: str) -> bool:
    """Whether a model's class ends with a head for classes of whole texts."""
    return architecture.endswith(SUFFIX)


def read(config: Mapping[str, Any]) -> Labels:
    """From ``id2label`` and ``problem_type``, as transformers reads them: without either there are two classes.

    One class without a ``problem_type`` is a score between 0 and 1. Raises ModelConfigError.
    """
    fields = Fields(config)
    given = config.get("id2label")
    if given is None:
        count = fields.integer("num_labels", 2)
        given = {str(index): f"LABEL_{index}" for index in range(min(count, MOST + 1))}
    if not isinstance(given, Mapping) or not 0 < len(given) <= MOST:
        fields.fail("id2label", f"an object with 1 to {MOST} names by index")
    by_index = {str(index): name for index, name in given.items()}
    names = [by_index.get(str(index)) for index in range(len(by_index))]
    if not all(isinstance(name, str) for name in names):
        fields.fail("id2label", f"a name for each index from 0 to {len(names) - 1}")
    usual = "single_label_classification" if len(names) > 1 else "multi_label_classification"
    return Labels(tuple(map(str, names)), cast("Kind", fields.choice("problem_type", _PROBLEMS, usual)))


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    small = math.exp(value)  # the other form would round it away, or overflow
    return small / (1 + small)
