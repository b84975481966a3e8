"""Small models written by the tests themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

Write = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Write:
    """Write a GGUF file of a small model; ``metadata`` replaces or (None) removes keys, ``tensors`` are added."""

    def write(
        architecture: str = "llama",
        metadata: Mapping[str, Any] | None = None,
        tensors: Sequence[tuple[str, np.ndarray, gguf.GGMLQuantizationType | None]] = (),
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        keys: dict[str, Any] = {
            "context_length": 128,
            "embedding_length": 64,
            "block_count": 2,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }
        keys = {f"{architecture}.{key}": value for key, value in keys.items()} | dict(metadata or {})
        for key, value in keys.items():
            _add(writer, key, value)
        for tensor_name, values, kind in tensors:
            writer.add_tensor(tensor_name, values, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


@pytest.fixture
def write_folder(tmp_path: Path) -> Write:
    """Write files of a model folder: objects as JSON, text and bytes as they are."""

    def write(files: Mapping[str, Any], name: str = "model") -> Path:
        folder = tmp_path / name
        for file, content in files.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = content if isinstance(content, bytes) else content if isinstance(content, str) else json.dumps(content)
            path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
        return folder

    return write


@pytest.fixture
def four_parts() -> Callable[[Exception], None]:
    """Check that an error says what failed, on what, what was found and expected, and the fix."""

    def check(error: Exception) -> None:
        for part in ("what", "on", "found", "expected", "fix"):
            assert getattr(error, part), f"{part} is empty in {error!r}"

    return check
