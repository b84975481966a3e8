"""Models that classify, against transformers on random weights; and what configs say of classes."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from vllm_core.errors import ModelConfigError, RequestError
from vllm_core.models import catalog, labels
from vllm_core.models.labels import Labels, check_use
from vllm_core.ops.pooling import pool

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForSequenceClassification", {"num_labels": 3}),
    "mistral": ("MistralForSequenceClassification", {"num_labels": 2, "sliding_window": 9}),
    "qwen2": ("Qwen2ForSequenceClassification", {"num_labels": 4}),
    "qwen3": ("Qwen3ForSequenceClassification", {"num_labels": 5, "head_dim": 24}),
    "qwen3-one": ("Qwen3ForSequenceClassification", {"num_labels": 1, "head_dim": 16, "tie_word_embeddings": True}),
    "bert": ("BertForSequenceClassification", {"num_labels": 3, "num_key_value_heads": 4}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: Any, reference: Any) -> Any:
    architecture, changes = CASES[request.param]
    return reference(architecture, **changes)


def pooled(sequences: Any, rows: list[tuple[int, list[int]]]) -> torch.Tensor:
    """As the engine's tail does it: float32 [S, labels] of a step."""
    outputs = sequences.step(rows)
    starts = torch.tensor([0, *(len(part) for part in outputs)]).cumsum(0).int()
    spec = sequences.spec
    out = torch.empty(len(rows), spec.pooled_size)
    pool(out, torch.cat(outputs), starts, spec.pooling, spec.normalize_pooled)
    return out


def test_logits_equal_transformers(case: Any, build: Any) -> None:
    draw = random.Random(1)
    prompts = [draw.choices(range(3, 67), k=length) for length in (17, 1, 30, 4)]
    sequences = build(case.config, case.weights())
    found = pooled(sequences, list(enumerate(prompts)))
    with torch.inference_mode():
        wanted = torch.cat([case.model(torch.tensor([prompt])).logits for prompt in prompts])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_every_site_that_the_head_calls_is_planned(name: str, reference: Any, build: Any) -> None:
    """What was not planned for has no provider."""
    architecture, changes = CASES[name]
    case = reference(architecture, **changes)
    sequences = build(case.config, case.weights())
    planned = {(site.op, site.role) for site in sequences.spec.call_sites("float32")}
    assert build.ops.sites <= planned


@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_bfloat16_stays_close(name: str, reference: Any, build: Any) -> None:
    architecture, changes = CASES[name]
    case = reference(architecture, **changes)
    prompts = [(0, [5, 6, 7, 8]), (1, [9, 10])]
    exact, rounded = (pooled(build(case.config, case.weights(), dtype=dtype), prompts) for dtype in ("float32", "bfloat16"))
    assert torch.nn.functional.cosine_similarity(exact, rounded).min() > 0.99


def test_workers_that_share_a_model_give_the_same_logits(build: Any, build_workers: Any, reference: Any) -> None:
    case = reference("LlamaForSequenceClassification", num_labels=3, intermediate_size=72)
    rows = [(0, [5, 6, 7, 8]), (1, [9, 10])]
    alone = torch.cat(build(case.config, case.weights()).step(rows))
    shared = build_workers(case.config, 2, lambda model: cut(model, case.weights()))
    for parts in shared.run(lambda part: part.step(rows)):
        torch.testing.assert_close(torch.cat(parts), alone, atol=1e-5, rtol=1e-5)


def cut(model: Any, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """What a worker reads of a checkpoint."""
    found = []
    for name, tensor in weights:
        part = model.wanted(name, tuple(tensor.shape))
        found.append((name, tensor if part is None else part.take(tensor)))
    return found


def test_probabilities_are_those_of_the_problem() -> None:
    assert Labels(("a", "b"), "softmax").probabilities([0.0, 0.0]) == [0.5, 0.5]
    assert Labels(("a", "b"), "softmax").probabilities([1000.0, 0.0]) == [1.0, 0.0]
    assert Labels(("a", "b"), "sigmoid").probabilities([0.0, -1000.0]) == [0.5, 0.0]
    assert Labels(("a",), "sigmoid").probabilities([-40.0]) == [pytest.approx(math.exp(-40.0), rel=1e-9, abs=0)]
    assert Labels(("a",), "none").probabilities([3.5]) == [3.5]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Labels(("LABEL_0", "LABEL_1"), "softmax")),
        ({"num_labels": 1}, Labels(("LABEL_0",), "sigmoid")),
        ({"id2label": {"1": "bad", "0": "good"}}, Labels(("good", "bad"), "softmax")),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, Labels(("a", "b"), "sigmoid")),
        ({"id2label": {"0": "score"}, "problem_type": "regression"}, Labels(("score",), "none")),
    ],
)
def test_names_and_problem_come_from_the_config(config: dict[str, Any], expected: Labels) -> None:
    assert labels.read(config) == expected


@pytest.mark.parametrize(
    ("config", "on"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ({"id2label": {}}, "id2label"),
        ({"id2label": {"0": 1}}, "id2label"),
        ({"id2label": ["a", "b"]}, "id2label"),
        ({"num_labels": 10**9}, "id2label"),
        ({"num_labels": 0}, "num_labels"),
        ({"problem_type": "other"}, "problem_type"),
    ],
)
def test_a_wrong_config_is_named(config: dict[str, Any], on: str) -> None:
    with pytest.raises(ModelConfigError, match=on):
        labels.read(config)


def test_a_classifier_is_no_embedder_and_the_other_way_round() -> None:
    with pytest.raises(RequestError, match="classify"):
        check_use(Labels(("a",), "none"), wants_classes=False)
    with pytest.raises(RequestError, match="without classes"):
        check_use(None, wants_classes=True)
    check_use(None, wants_classes=False)


def test_all_kinds_of_a_decoder_are_in_the_catalog() -> None:
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        assert {f"{family}ForCausalLM", f"{family}Model", f"{family}ForSequenceClassification"} <= set(catalog.architectures())
