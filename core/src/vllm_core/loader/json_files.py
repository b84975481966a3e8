"""JSON files of a model folder: bounded in size, and objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_core.errors import ModelConfigError, ModelError

_MAX_BYTES = 32 << 20


def read_object(path: Path, error: type[ModelError] = ModelConfigError) -> dict[str, Any]:
    """Read a JSON object. Raises ``error`` where the file is too large, is no JSON, or holds something else."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise _wrong(error, path, f"{size} bytes", f"at most {_MAX_BYTES} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as cause:
        raise _wrong(error, path, f"no JSON: {cause}", "a JSON object") from cause
    if not isinstance(value, dict):
        raise _wrong(error, path, f"a JSON {type(value).__name__}", "a JSON object")
    return value


def read_optional(path: Path, error: type[ModelError] = ModelConfigError) -> dict[str, Any]:
    """`read_object`, or an empty object where the file does not exist."""
    return read_object(path, error) if path.is_file() else {}


def _wrong(error: type[ModelError], path: Path, found: str, expected: str) -> ModelError:
    return error("File cannot be read", on=str(path), found=found, expected=expected, fix="fetch the file again")
