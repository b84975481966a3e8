"""The head of a GGUF file: metadata and the table of tensors. Needs neither torch nor numpy.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The `gguf` package's reader makes
several numpy views of each array element, which takes seconds for a vocabulary; this one takes tens of milliseconds.
Every count and length of the file is checked against what the file holds before it is believed.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from vllm_core.errors import ModelConfigError, WeightsError

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Types of tensors that can be read: name, elements per block, bytes per block."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_KEYS, _MAX_TENSORS, _MAX_ARRAY, _MAX_DIMS = 1 << 16, 1 << 20, 1 << 24, 4
_MAX_NAME, _MAX_TEXT = 1 << 16, 1 << 24
_U64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in torch's order, `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata by key (arrays are lists) and tensors by name, in file order."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def formats_of(header: GGUFHeader) -> dict[str, int]:
    """Quantised formats of the file's tensors, by the names of `vllm_core.api.FORMATS`, and the number of weights in each."""
    found: dict[str, int] = {}
    for info in header.tensors.values():
        kind, block, _ = GGML_TYPES[info.ggml_type]
        if block > 1:
            found[kind.lower()] = found.get(kind.lower(), 0) + math.prod(info.shape)
    return found


def read_header(path: Path) -> GGUFHeader:
    """Read the head of the file.

    Raises WeightsError if it is no GGUF file, is damaged, is shorter than its tensors need, or holds a tensor of a
    type that cannot be decoded; ModelConfigError if it is one part of a split model.
    """
    size = path.stat().st_size
    if size < 24:
        raise _cut(path, size, 24, "the file's head")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        num_tensors, num_keys = _counts(cursor)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.text(_MAX_NAME)
            if key in metadata:
                cursor.damaged(f"metadata key {key!r} twice", "each key once")
            metadata[key] = cursor.value(cursor.scalar("I"))
        tensors = _tensor_table(cursor, num_tensors, metadata)
    if metadata.get("split.count", 0) not in (0, 1):
        raise ModelConfigError(
            "GGUF file is one part of several",
            on=str(path),
            found=f"part {metadata.get('split.no', 0) + 1} of {metadata['split.count']}",
            expected="a whole model in one file",
            fix="join the parts with `llama-gguf-split --merge`",
        )
    return GGUFHeader(path, metadata, tensors)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4)
    if magic != b"GGUF":
        cursor.damaged(f"{magic!r} at the start", "b'GGUF'")
    version = cursor.scalar("I")
    if version not in (2, 3):
        big_endian = version in (2 << 24, 3 << 24)
        cursor.damaged("a big-endian file" if big_endian else f"version {version}", "little-endian GGUF version 2 or 3")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
        cursor.damaged(f"{num_tensors} tensors and {num_keys} keys", f"at most {_MAX_TENSORS} and {_MAX_KEYS}")
    return num_tensors, num_keys


def _tensor_table(cursor: _Cursor, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
        cursor.damaged(f"alignment {alignment!r}", "1 to 65536")
    entries: dict[str, TensorInfo] = {}
    for _ in range(count):
        info = _tensor_entry(cursor)
        if info.name in entries:
            cursor.damaged(f"tensor {info.name!r} twice", "each tensor once")
        entries[info.name] = info
    start = -(-cursor.position // alignment) * alignment
    placed = {
        name: TensorInfo(name, info.shape, info.ggml_type, start + info.offset, info.size_bytes)
        for name, info in entries.items()
    }
    last = max(placed.values(), key=lambda info: info.offset + info.size_bytes, default=None)
    if last is not None and last.offset + last.size_bytes > cursor.size:
        raise _cut(cursor.path, cursor.size, last.offset + last.size_bytes, f"{count} tensors, the last one {last.name!r}")
    return placed


def _tensor_entry(cursor: _Cursor) -> TensorInfo:
    name = cursor.text(_MAX_NAME)
    num_dims = cursor.scalar("I")
    if num_dims > _MAX_DIMS:
        cursor.damaged(f"tensor {name!r} of {num_dims} dimensions", f"at most {_MAX_DIMS}")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    ggml_type, offset = cursor.scalar("I"), cursor.scalar("Q")
    if ggml_type not in GGML_TYPES:
        raise WeightsError(
            "Tensor has a type that cannot be read",
            on=f"{name} in {cursor.path}",
            found=_type_name(ggml_type),
            expected=f"one of {', '.join(kind for kind, _, _ in GGML_TYPES.values())}",
            fix="take a file of another quantization, such as Q4_K_M or Q8_0",
        )
    kind, block_elements, block_bytes = GGML_TYPES[ggml_type]
    if (shape[-1] if shape else 1) % block_elements:
        cursor.damaged(f"tensor {name!r} of shape {shape} as {kind}", f"rows of a multiple of {block_elements} values")
    return TensorInfo(name, shape, ggml_type, offset, math.prod(shape) // block_elements * block_bytes)


def _type_name(ggml_type: int) -> str:
    from gguf.constants import GGMLQuantizationType

    known = {int(member): member.name for member in GGMLQuantizationType}
    return f"{known.get(ggml_type, 'unknown')} (type {ggml_type})"


class _Cursor:
    """Reads forward through the head; nothing past the end of the file is ever touched."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.size, self.position = path, len(data), 0
        self._data = data

    def damaged(self, found: str, expected: str) -> NoReturn:
        """Raise WeightsError: the file contradicts itself or the format."""
        raise WeightsError(
            "GGUF file cannot be read",
            on=f"{self.path}, near byte {self.position}",
            found=found,
            expected=expected,
            fix="download the file again; if it stays so, convert the model anew",
        )

    def take(self, size_bytes: int) -> bytes:
        """The next bytes. Raises WeightsError where the file ends before."""
        self._need(size_bytes)
        start, self.position = self.position, self.position + size_bytes
        return self._data[start : self.position]

    def scalar(self, code: str) -> Any:
        """The next number, by its `struct` code."""
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def text(self, limit: int) -> str:
        """The next string, of at most ``limit`` bytes."""
        length = self.scalar("Q")
        if length > limit:
            self.damaged(f"a string of {length} bytes", f"at most {limit}")
        return self._decode(self.take(length))

    def value(self, kind: int) -> Any:
        """The next metadata value of type ``kind``."""
        if kind == _STRING:
            return self.text(_MAX_TEXT)
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            self.damaged(f"a value of type {kind}", "types 0 to 12")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > _MAX_ARRAY:
            self.damaged(f"an array of {count} elements", f"at most {_MAX_ARRAY}")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            self.damaged(f"an array of type {kind}", "an array of numbers or strings")
        code = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has hundreds of thousands: this loop is what a start waits for.
        data, position, size = self._data, self.position, self.size
        values = []
        for _ in range(count):
            start = position + 8
            if start > size:
                self._need(start - self.position)
            position = start + _U64(data, position)[0]
            if position > size:
                self._need(position - self.position)
            values.append(data[start:position])
        self.position = position
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError:
            return [self._decode(value) for value in values]  # which says where

    def _decode(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.damaged(f"a string that is not UTF-8: {raw[:40]!r}", "UTF-8")

    def _need(self, size_bytes: int) -> None:
        if self.position + size_bytes > self.size:
            raise _cut(self.path, self.size, self.position + size_bytes, "the file's head alone")


def _cut(path: Path, found: int, expected: int, what: str) -> WeightsError:
    return WeightsError(
        "GGUF file is cut off",
        on=str(path),
        found=f"{found} bytes",
        expected=f"at least {expected} bytes, for {what}",
        fix="download the file again",
    )
