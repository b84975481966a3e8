"""/classify: classes by name with their probabilities, and models that have none."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_core.models.labels import Labels

pytestmark = pytest.mark.anyio

PATH = "/classify"


@pytest.fixture
def classifier(pooling_engine: Any) -> Any:
    pooling_engine.labels = Labels(("good", "bad", "long"), "softmax")
    return pooling_engine


async def test_each_input_has_its_likeliest_class_and_all_probabilities(classifier: Any, make_client: Any) -> None:
    """The engine's logits are 0.5, -0.25 and the length."""
    answer = (await make_client(classifier).post(PATH, {"model": "fake", "input": ["a", "abc"]})).json()
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 0
    rows = answer.pop("data")
    assert answer == {"object": "list", "model": "fake", "usage": {"prompt_tokens": 4, "total_tokens": 4}}
    assert [(row["index"], row["label"], row["num_classes"]) for row in rows] == [(0, "long", 3), (1, "long", 3)]
    assert rows[0]["probs"] == pytest.approx([0.3204, 0.1513, 0.5283], abs=1e-3)
    assert sum(rows[1]["probs"]) == pytest.approx(1)
    assert rows[1]["probs"][2] > rows[0]["probs"][2]


async def test_token_ids_are_classified_too(classifier: Any, make_client: Any) -> None:
    answer = await make_client(classifier).post(PATH, {"input": [1, 2, 3]})
    assert len(answer.json()["data"]) == 1


async def test_a_model_without_classes_refuses(pooling_engine: Any, make_client: Any) -> None:
    answer = await make_client(pooling_engine).post(PATH, {"input": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "without classes" in answer.json()["error"]["message"]


async def test_a_generating_model_names_the_runner(client: Any) -> None:
    answer = await client.post(PATH, {"input": "a"})
    assert answer.status_code == 400
    assert "runner" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("value", "param"), [([], "input"), (["a", 1], "input[1]"), (None, "input")])
async def test_wrong_input_is_named(classifier: Any, make_client: Any, value: Any, param: str) -> None:
    answer = await make_client(classifier).post(PATH, {"input": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert classifier.calls == []
