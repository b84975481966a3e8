"""vllm-core: an LLM inference engine that knows no hardware.

    from vllm_core import LLM, SamplingParams

Names are loaded on first use: importing this package loads neither torch nor pydantic nor any plugin.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_core.version import __version__

if TYPE_CHECKING:
    from vllm_core.async_llm import AsyncLLM
    from vllm_core.llm import LLM
    from vllm_core.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from vllm_core.sampling_params import PoolingParams, SamplingParams

_HOMES = {
    "LLM": "vllm_core.llm",
    "AsyncLLM": "vllm_core.async_llm",
    "SamplingParams": "vllm_core.sampling_params",
    "PoolingParams": "vllm_core.sampling_params",
    "RequestOutput": "vllm_core.outputs",
    "CompletionOutput": "vllm_core.outputs",
    "ClassificationOutput": "vllm_core.outputs",
    "ClassificationRequestOutput": "vllm_core.outputs",
    "EmbeddingOutput": "vllm_core.outputs",
    "EmbeddingRequestOutput": "vllm_core.outputs",
    "ScoringOutput": "vllm_core.outputs",
    "ScoringRequestOutput": "vllm_core.outputs",
}

__all__ = [
    "AsyncLLM",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LLM",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'vllm_core' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
