"""`LLM.classify` and `AsyncLLM.classify`: the classes of a checkpoint, as transformers finds them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vllm_core import AsyncLLM
from vllm_core.errors import ConfigError, ModelConfigError, RequestError

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "LlamaForSequenceClassification": {"num_labels": 3},
    "Qwen3ForSequenceClassification": {"num_labels": 4, "head_dim": 16, "problem_type": "multi_label_classification"},
    "BertForSequenceClassification": {"num_labels": 1, "problem_type": "regression"},
}


@pytest.fixture(scope="module", params=CASES)
def classifier(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small random model in a folder, and transformers' own."""
    folder, cls = tmp_path_factory.mktemp("classifier"), getattr(transformers, request.param)
    torch.manual_seed(1)
    model = cls(cls.config_class(**SIZES, **CASES[request.param])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder, model


def prompts() -> list[list[int]]:
    draw = random.Random(2)
    return [draw.choices(range(1, 97), k=length) for length in (9, 1, 40, 3, 17)]


def expected(model: Any, prompt: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].float()
    kind = model.config.problem_type
    found = logits if kind == "regression" else logits.sigmoid() if kind else logits.softmax(-1)
    values: list[float] = found.tolist()
    return values


def test_classes_equal_transformers(classifier: Any, engines: Any) -> None:
    folder, model = classifier
    llm = engines(folder, skip_tokenizer_init=True)
    outputs = llm.classify(prompts(), use_tqdm=False)
    for output, prompt in zip(outputs, prompts(), strict=True):
        assert output.outputs.probs == pytest.approx(expected(model, prompt), abs=1e-4)
        assert output.outputs.num_classes == model.config.num_labels
    with pytest.raises(RequestError, match="classify"):
        llm.embed([[1, 2]], use_tqdm=False)


def test_a_classifier_does_not_generate(classifier: Any, engines: Any) -> None:
    with pytest.raises(ConfigError, match="cannot generate"):
        engines(classifier[0], skip_tokenizer_init=True, runner="generate")


def test_a_model_without_classes_refuses(llama: Any, engines: Any) -> None:
    llm = engines(llama, runner="pooling")
    with pytest.raises(RequestError, match="without classes"):
        llm.classify([[1, 2]], use_tqdm=False)


def test_names_that_do_not_fit_are_an_error_before_weights_are_read(classifier: Any, engines: Any, tmp_path: Path) -> None:
    config = json.loads((classifier[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "7": "b"}}))
    with pytest.raises(ModelConfigError, match="id2label"):
        engines(tmp_path, skip_tokenizer_init=True)


@pytest.mark.anyio
@pytest.mark.parametrize("classifier", ["BertForSequenceClassification"], indirect=True)
async def test_the_engine_process_classifies_too(classifier: Any) -> None:
    folder, model = classifier
    llm = AsyncLLM(model=str(folder), skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes=1 << 23)
    await llm.start()
    try:
        found = await llm.classify(prompts()[0], "one")
        assert found.outputs.probs == pytest.approx(expected(model, prompts()[0]), abs=1e-4)
        assert llm.labels is not None
        assert len(llm.labels.names) == model.config.num_labels
    finally:
        process = llm._process
        llm.shutdown()
        assert process is not None
        await process.wait()
