"""Embeddings of a real encoder, and of decoders with last-token pooling, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_core import LLM, PoolingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

TEXTS = [
    "A man is eating food.",
    "Someone is having a meal.",
    "The stock market fell sharply on Tuesday.",
    "café, naïve, 東京, 🙂",
    "x",
    "word " * 200,
]


def reference(folder: Path, texts: list[str]) -> torch.Tensor:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = []
    for text in texts:
        batch = tokenizer(text, return_tensors="pt", truncation=False)
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(hidden.mean(dim=0), dim=0))
    return torch.stack(rows)


def test_a_real_encoder_gives_the_references_vectors(model_file: Callable[[str], Path]) -> None:
    folder = model_file("all-minilm-l6-v2")
    with LLM(str(folder), dtype="float32") as llm:
        together = torch.tensor([o.outputs.embedding for o in llm.embed(TEXTS, use_tqdm=False)])
        alone = torch.tensor([llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS])
    expected = reference(folder, TEXTS)
    distance = 1 - torch.nn.functional.cosine_similarity(together, expected)
    print(f"largest cosine distance {float(distance.max()):.2e}")
    assert float(distance.max()) < 1e-3
    assert torch.allclose(together, alone, atol=1e-5)
    assert torch.allclose(together.norm(dim=1), torch.ones(len(TEXTS)), atol=1e-5)


def test_dimensions_cut_the_vector_and_keep_its_length_one(model_file: Callable[[str], Path]) -> None:
    with LLM(str(model_file("all-minilm-l6-v2")), dtype="float32") as llm:
        (whole,) = llm.embed("text", use_tqdm=False)
        (cut,) = llm.embed("text", PoolingParams(dimensions=64), use_tqdm=False)
    expected = torch.nn.functional.normalize(torch.tensor(whole.outputs.embedding[:64]), dim=0)
    assert torch.allclose(torch.tensor(cut.outputs.embedding), expected, atol=1e-6)


def test_a_decoder_pools_its_last_token(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        architectures=["Qwen3Model"],
    )
    model = Qwen3Model(config).eval().to(torch.float32)
    model.save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    prompts = [[1, 2, 3], [5], list(range(100)), [7, 7, 7, 7]]
    with LLM(str(tmp_path), dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
        found = torch.tensor([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)])
    with torch.inference_mode():
        last = torch.stack([model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts])
    expected = torch.nn.functional.normalize(last, dim=1)
    assert torch.allclose(found, expected, atol=1e-4)
