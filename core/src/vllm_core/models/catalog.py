"""Which module describes which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from vllm_core.errors import ModelConfigError, nearest
from vllm_core.models import bert, gemma3, llama, mixtral, null, qwen2, qwen3, qwen3_moe
from vllm_core.models.fields import Fields
from vllm_core.models.spec import ModelSpec


class _Describe(Protocol):
    def __call__(self, config: Mapping[str, Any], *, dtype: str, pooling: str | None) -> ModelSpec:
        """Read a specification."""


_MODULES = (llama, qwen2, qwen3, gemma3, mixtral, qwen3_moe, bert, null)
_DESCRIBE: dict[str, _Describe] = {name: module.describe for module in _MODULES for name in module.ARCHITECTURES}


def architectures() -> tuple[str, ...]:
    """The architectures of the agnostic track."""
    return tuple(_DESCRIBE)


def describe(config: Mapping[str, Any], *, dtype: str, pooling: str | None = None) -> ModelSpec:
    """Read a model's specification from its Hugging Face config, without torch.

    ``pooling`` is what the checkpoint says about it: mean, cls or last. Raises ModelConfigError for an architecture
    that is not in the catalog and for missing or wrong values.
    """
    name = Fields(config).architecture
    describe_one = _DESCRIBE.get(name)
    if describe_one is None:
        raise ModelConfigError(
            "Architecture is not in the agnostic track",
            on=name,
            found="no definition",
            expected=f"one of {', '.join(_DESCRIBE)}",
            fix=f"--model-impl transformers may run it; if the name is misspelt, {nearest(name, _DESCRIBE)}",
        )
    return describe_one(config, dtype=dtype, pooling=pooling)
