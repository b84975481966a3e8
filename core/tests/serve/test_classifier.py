"""A checkpoint with classes, served: its probabilities are transformers' own."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.model

KEY = "test-key"
TEXTS = ["What a day!", "Not again.", "word"]
DOCS = Path(__file__).parents[3] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def checkpoint(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small random BERT of three classes with a tokenizer of words."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder, tokenizer = tmp_path_factory.mktemp("classifier"), model_file("all-minilm-l6-v2")
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    names = {0: "joy", 1: "anger", 2: "neither"}
    config = transformers.BertConfig(**sizes, vocab_size=30522, max_position_embeddings=128, id2label=names)
    torch.manual_seed(3)
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    return folder, model


def expected(folder: Path, model: Any, text: str) -> list[float]:
    import tokenizers
    import torch

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    with torch.inference_mode():
        found: list[float] = model(torch.tensor([tokenizer.encode(text).ids])).logits.softmax(-1)[0].tolist()
    return found


def test_classes_over_http_and_the_example_of_the_docs(checkpoint: Any, serve_model: Any, tmp_path: Path) -> None:
    folder, model = checkpoint
    with serve_model(folder, tmp_path / "log", "--served-model-name", "mood", "--dtype", "float32") as address:
        options: dict[str, Any] = {"headers": {"authorization": f"Bearer {KEY}"}, "timeout": 60}
        rows = httpx.post(f"{address}/classify", json={"input": TEXTS}, **options).raise_for_status().json()["data"]
        for row, text in zip(rows, TEXTS, strict=True):
            probs = expected(folder, model, text)
            assert row["probs"] == pytest.approx(probs, abs=1e-4)
            assert row["label"] == ("joy", "anger", "neither")[probs.index(max(probs))]
        refused = httpx.post(f"{address}/v1/embeddings", json={"input": "a"}, **options)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert "/classify" in refused.json()["error"]["message"]
        (example,) = re.findall(r"```bash\n(curl http://127.0.0.1:8002.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
        if shutil.which("curl"):
            command = example.replace("http://127.0.0.1:8002", address).replace("curl ", f"curl -sSf -H 'x-api-key: {KEY}' ")
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
            assert done.stdout.count('"label"') == 2
