"""Weights of a Hugging Face folder: one safetensors file, or shards with an index. Tensors come one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from vllm_core.errors import WeightsError
from vllm_core.loader.json_files import read_object

if TYPE_CHECKING:
    import torch

    from vllm_core.layers.shard import Wanted

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def find(folder: Path) -> dict[str, list[str] | None]:
    """Files of the folder in order, each with the tensors to take from it (None: all).

    Raises WeightsError where there are none, where an index is broken, or names a file that is missing or outside.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(names) == 1:
        return {names[0]: None}
    raise WeightsError(
        "Model has no weights",
        on=str(folder),
        found=f"{len(names)} safetensors files and no index" if names else _what_else(folder),
        expected=f"{SINGLE}, or {INDEX} with its shards",
        fix="fetch the weights as safetensors, or use --load-format dummy for random ones",
    )


def iterate(folder: Path, wanted: Wanted | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, or what is ``wanted`` of it, in file order, in its own dtype.

    Raises WeightsError for a damaged file or a missing tensor.
    """
    from safetensors import SafetensorError, safe_open

    for name, chosen in find(folder).items():
        path = folder / name
        try:
            with safe_open(path, framework="pt") as file:
                for key in _present(path, file.offset_keys(), chosen):
                    yield key, file.get_tensor(key) if wanted is None else _read(file, key, wanted)
        except SafetensorError as cause:
            raise _unreadable(path, cause) from cause


def names(folder: Path) -> list[str]:
    """Names of all tensors that `iterate` yields. Raises WeightsError as it does."""
    from safetensors import SafetensorError, safe_open

    found: list[str] = []
    for name, chosen in find(folder).items():
        if chosen is not None:
            found += chosen
            continue
        try:
            with safe_open(folder / name, framework="pt") as file:
                found += file.keys()
        except SafetensorError as cause:
            raise _unreadable(folder / name, cause) from cause
    return found


def _unreadable(path: Path, cause: Exception) -> WeightsError:
    return WeightsError(
        "Weights cannot be read",
        on=str(path),
        found=f"{path.stat().st_size} bytes: {cause}",
        expected="a whole safetensors file",
        fix="fetch the file again",
    )


def _read(file: Any, key: str, wanted: Wanted) -> torch.Tensor:
    part = file.get_slice(key)
    shape = tuple(part.get_shape())
    cut = wanted(key, shape)
    if cut is None:
        whole: torch.Tensor = file.get_tensor(key)
        return whole
    return cut.fill(part[(slice(None),) * cut.dim + (cut.inside(shape),)])


def _present(path: Path, keys: list[str], wanted: list[str] | None) -> list[str]:
    if wanted is None:
        return keys
    missing = sorted(set(wanted) - set(keys))
    if missing:
        raise WeightsError(
            "Tensor is missing",
            on=f"{missing[0]} in {path}",
            found=f"{len(keys)} tensors, without {len(missing)} that the index promises",
            expected=f"the tensors of {INDEX}",
            fix="fetch the shard and the index again, of the same revision",
        )
    chosen = set(wanted)
    return [key for key in keys if key in chosen]


def _indexed(folder: Path) -> dict[str, list[str] | None]:
    path = folder / INDEX
    mapping = read_object(path, WeightsError).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise _broken_index(path, f"weight_map of type {type(mapping).__name__}", "tensor names with their files")
    shards: dict[str, list[str] | None] = {}
    for tensor, name in mapping.items():
        parts = PurePosixPath(name).parts
        # Only plain names: an index must not reach outside its folder.
        if len(parts) != 1 or parts[0] in ("..", ".", "/") or "\\" in name or not name.endswith(".safetensors"):
            raise _broken_index(path, repr(name), "names of safetensors files in the same folder")
        names = shards.setdefault(name, [])
        assert names is not None, "shards of an index list their tensors"
        names.append(tensor)
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise WeightsError(
            "Shard is missing",
            on=str(folder / missing[0]),
            found=f"{len(shards) - len(missing)} of {len(shards)} files",
            expected=f"every file that {INDEX} names",
            fix="fetch the missing files",
        )
    return dict(sorted(shards.items()))


def _broken_index(path: Path, found: str, expected: str) -> WeightsError:
    return WeightsError("Index of the weights is broken", on=str(path), found=found, expected=expected, fix="fetch it again")


def _what_else(folder: Path) -> str:
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    return f"only {', '.join(others[:3])}" if others else "no safetensors file"
