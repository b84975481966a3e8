"""What is asked of an engine: seeded requests as token ids, and dense shapes that need no checkpoint.

Drawn with the standard library alone, so that any engine can be given the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_core.errors import ConfigError

VOCABULARY = 10000
"""Prompts use the first token ids alone."""

Request = tuple[list[int], int]
"""Token ids of a prompt, and how many tokens to generate."""

Rate = Literal["out_per_s", "in_per_s", "seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that come at once. Lengths are tokens, lowest and highest; all prompts begin with the same `shared` ones.

    `rate` is the figure that it is known by; `temperature` 0 is greedy. No request ends before its tokens.
    """

    name: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    shared: int = 0
    temperature: float = 0.0
    rate: Rate = "out_per_s"
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        lows = (self.requests, self.prompt[0], self.output[0], self.vocabulary)
        if min(lows) < 1 or self.shared < 0 or self.prompt[0] > self.prompt[1] or self.output[0] > self.output[1]:
            raise ValueError(f"workload {self.name!r} has no requests: {self.title}, token ids below {self.vocabulary}")

    def draw(self, seed: int) -> list[Request]:
        """The requests of one run; the same for the same seed."""
        source = random.Random(seed)

        def length(span: tuple[int, int]) -> int:
            return span[0] if span[0] == span[1] else source.randint(*span)

        def tokens(count: int) -> list[int]:
            return [source.randrange(self.vocabulary) for _ in range(count)]

        shared = tokens(self.shared)
        return [(shared + tokens(length(self.prompt)), length(self.output)) for _ in range(self.requests)]

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self.shared + self.prompt[1] + self.output[1]

    @property
    def title(self) -> str:
        """For people: how many, how long."""
        prompt, output = (str(low) if low == high else f"{low} to {high}" for low, high in (self.prompt, self.output))
        shared = f"{self.shared} shared + " if self.shared else ""
        return f"{self.requests} x {shared}{prompt} in, {output} out"


WORKLOADS: Mapping[str, Workload] = {
    one.name: one
    for one in (
        Workload(name="throughput", requests=256, prompt=(100, 1024), output=(100, 1024), temperature=0.6),
        Workload(name="latency", requests=1, prompt=(128, 128), output=(256, 256)),
        Workload(name="decode64", requests=64, prompt=(128, 128), output=(256, 256)),
        Workload(name="prefill", requests=64, prompt=(2048, 2048), output=(1, 1), rate="in_per_s"),
        Workload(name="prefix", requests=64, prompt=(64, 64), output=(32, 32), shared=2048, rate="seconds"),
    )
}

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}
SHAPE_OPTIONS: Mapping[str, Any] = {
    "load_format": "dummy",
    "dummy_bound": 1e-3,
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "device_memory_utilization": 0.85,
}
"""What a shape is run with, unless the user says otherwise. Weights of 0 would make products faster than real ones are."""


def engine_options(model: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Options of an engine on ``model``; a shape's config is written into ``folder``.

    A shape is always made of dummy weights: another load format raises ConfigError.
    """
    if model not in SHAPES:
        return {**options, "model": model}
    if options.get("load_format", "dummy") != "dummy":
        raise ConfigError(
            "Shape has no weights",
            on=model,
            found=f"load_format {options['load_format']}",
            expected="load_format dummy",
            fix="leave --load-format out, or name the folder of a model",
        )
    place = folder / model
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(_COMMON | dict(SHAPES[model])), encoding="utf-8")
    return {**SHAPE_OPTIONS, **options, "model": str(place)}
