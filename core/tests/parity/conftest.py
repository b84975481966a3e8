"""Real models against what transformers generated for the same prompts (see record.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_core import LLM, SamplingParams
from vllm_core.outputs import RequestOutput

NEAR_TIE = 1e-4
"""Where the reference's two best logits lie closer than this, the other token is as right, and the rest is not compared."""

FILES = {
    "smollm2-135m-instruct": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m": "gemma-3-270m-q4_k_m.gguf",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


class Reference:
    """The record of one model; `compare` counts near-ties and fails on anything else."""

    def __init__(self, name: str) -> None:
        self.rows: list[dict[str, Any]] = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
        self.near_ties = 0

    @property
    def prompts(self) -> list[list[int]]:
        return [row["prompt_token_ids"] for row in self.rows]

    def compare(self, index: int, tokens: Sequence[int]) -> None:
        row = self.rows[index]
        assert len(tokens) == len(row["token_ids"]), f"prompt {index}: {len(tokens)} tokens"
        for at, (found, expected) in enumerate(zip(tokens, row["token_ids"], strict=True)):
            if found != expected:
                gap = row["gaps"][at]
                assert gap <= NEAR_TIE, f"prompt {index}, token {at}: {found} instead of {expected}, logits {gap} apart"
                self.near_ties += 1
                print(f"near-tie: prompt {index}, token {at}, logits {gap} apart")
                return

    def compare_all(self, outputs: Sequence[RequestOutput], order: Sequence[int]) -> None:
        for index, output in zip(order, outputs, strict=True):
            self.compare(index, output.outputs[0].token_ids)


@pytest.fixture(scope="module", params=list(FILES))
def reference(request: pytest.FixtureRequest, model_file: Callable[[str], Path]) -> Iterator[tuple[Reference, Path]]:
    path = model_file(FILES[request.param])
    record = Reference(request.param)
    yield record, path
    print(f"{request.param}: {record.near_ties} near-ties")


@pytest.fixture
def engine(reference: tuple[Reference, Path]) -> Iterator[Callable[..., LLM]]:
    """Make an engine of the reference's model with options of the test."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        values = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 29, "max_num_seqs": 16}
        made.append(LLM(str(reference[1]), **{**values, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
