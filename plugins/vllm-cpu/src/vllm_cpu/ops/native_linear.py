"""Products and embeddings through the C ABI; weights stay packed. Oracles: `vllm_core.ops.linear`, `vllm_core.ops.embedding`.

What is constant at a call site is one C struct, made at its first call; a call then passes seven numbers, which are kept too:
steps of one size come with the same tensors again and again.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vllm_core.api import QuantStack, QuantTensor, UnsupportedError, Weight
from vllm_cpu import recording
from vllm_cpu.native import CLinearCall, CMatrix, load

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int64: 4}
FORMATS = {
    "q4_0": 3,
    "q4_1": 4,
    "q5_0": 5,
    "q5_1": 6,
    "q8_0": 7,
    "q4_k": 10,
    "q5_k": 11,
    "q6_k": 12,
    "int8_channel": 13,
    "int4_group": 14,
}
GATES = {"silu": 1, "gelu": 2, "gelu_tanh": 3}
_STATUS = {1: "unsupported", 2: "invalid", 3: "failed"}

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def _bound(name: str, *arguments: Any) -> Any:
    library = load().library
    assert library is not None, "offered without a library"
    # A handle of its own: two users of one symbol may give it different argument types.
    return ctypes.CFUNCTYPE(_I32, *arguments)((name, library))


_linear = _bound("vllm_linear", _P, _P, _I64, _P, _I64, _I64, _P)
_pack_linear, _pack_embedding = struct.Struct("PPqPqqP").pack, struct.Struct("PqiPiqPqdP").pack
"""The arguments of `_linear` and `_embedding` as a recording has them: those of native/replay.cpp."""
_embedding = _bound("vllm_embedding", _P, _I64, _I32, _P, _I32, _I64, _P, _I64, ctypes.c_double, _P)


Last: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None, Any, tuple[int | None, ...]]"
"""Output, input, norm and kind of a weight's last call, and the numbers that it passed."""


class Packed:
    """A weight as the library reads it: its parts' addresses, and the tensors that own them."""

    __slots__ = ("_activation", "_bias", "_calls", "_kept", "_parts", "k", "last", "n", "readers")

    last: Last

    def __init__(self, weight: Weight, bias: Tensor | None, readers: Sequence[str], activation: int = 0) -> None:
        parts = weight.parts if isinstance(weight, QuantStack) else (weight,)
        self._kept = [_usable(part) for part in parts]
        self._parts = (CMatrix * len(parts))(*(matrix_of(part) for part in self._kept))
        self._bias = None if bias is None else bias.float().contiguous()
        self._calls: dict[Any, tuple[CLinearCall, int]] = {}
        self.n, self.k = (int(size) for size in weight.shape)
        self.readers = tuple(readers)
        self._activation = activation
        self.last = (None, None, None, None, ())

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return self.n

    def call(self, x: torch.dtype, out: torch.dtype, *, add: bool = False, gate: int = 0) -> int:
        """Address of the call's struct without a norm."""
        found = self._calls.get((x, out, add, gate))
        return found[1] if found is not None else self._make((x, out, add, gate), x, out, add=add, gate=gate)

    def normed(self, x: torch.dtype, out: torch.dtype, norm: Tensor, eps: float, gate: int = 0) -> int:
        """Address of the call's struct with an RMS norm of x before the product."""
        key = (x, out, norm.data_ptr(), eps, gate)
        found = self._calls.get(key)
        return found[1] if found is not None else self._make(key, x, out, gate=gate, norm=norm, eps=eps)

    def _make(
        self,
        key: Any,
        x: torch.dtype,
        out: torch.dtype,
        *,
        add: bool = False,
        gate: int = 0,
        norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> int:
        call = CLinearCall(
            parts=self._parts,
            num_parts=len(self._parts),
            n=self.n,
            k=self.k,
            bias=None if self._bias is None else self._bias.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            eps=eps,
            norm_dtype=0 if norm is None else DTYPES[norm.dtype],
            gate=gate,
            add=int(add),
            activation=self._activation,
            x_dtype=DTYPES[x],
            out_dtype=DTYPES[out],
        )
        self._calls[key] = (call, ctypes.addressof(call))
        return ctypes.addressof(call)


def matrix_of(weight: Tensor | QuantTensor) -> CMatrix:
    """The C struct of a weight whose tensors are contiguous."""
    if isinstance(weight, Tensor):
        rows, columns = weight.shape
        row_bytes = columns * weight.element_size()
        return CMatrix(data=weight.data_ptr(), n=rows, k=columns, row_bytes=row_bytes, format=DTYPES[weight.dtype])
    rows, columns = weight.shape
    scale = weight.scale
    return CMatrix(
        data=weight.data.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        zero=None if weight.zero is None else weight.zero.data_ptr(),
        n=rows,
        k=columns,
        row_bytes=weight.data.shape[1] * weight.data.element_size(),
        format=FORMATS[weight.format],
        group=columns // scale.shape[1] if weight.format == "int4_group" and scale is not None else 0,
    )


def linear_pack(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed:
    """Keep the weight as it is. Raises UnsupportedError for groups that the kernels do not read."""
    return Packed(weight, bias, readers)


def linear_pack_int8(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed:
    """As `linear_pack`; a few rows of inputs are rounded to eight bits, a scale for each 32."""
    return Packed(weight, bias, readers, activation=1)


def linear(out: Tensor, x: Tensor, weight: Packed) -> None:
    """``out[T,N] = x[T,K] @ weight.T + bias``."""
    last_out, last_x, _, kind, numbers = weight.last
    if out is not last_out or x is not last_x or kind is not None:
        numbers = _keep(weight, out, x, None, None, weight.call(x.dtype, out.dtype))
    _run(numbers, out, x, weight)


def linear_add(residual: Tensor, delta: Tensor, x: Tensor, weight: Packed) -> None:
    """``residual += linear(x)``."""
    last_out, last_x, _, kind, numbers = weight.last
    if residual is not last_out or x is not last_x or kind is not _ADD:
        numbers = _keep(weight, residual, x, None, _ADD, weight.call(x.dtype, residual.dtype, add=True))
    _run(numbers, residual, x, weight)


def rms_norm_linear(out: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Packed) -> None:
    """``out = linear(rms_norm(x))``; the normed rows are not rounded to x's dtype."""
    last_out, last_x, last_norm, kind, numbers = weight.last
    if out is not last_out or x is not last_x or norm is not last_norm or kind != eps:
        numbers = _keep(weight, out, x, norm, eps, weight.normed(x.dtype, out.dtype, norm, eps))
    _run(numbers, out, x, weight, norm)


def rms_norm_gated_linear(
    out: Tensor, wide: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Packed, kind: str
) -> None:
    """``out = gated_activation(linear(rms_norm(x)), kind)``."""
    last_out, last_x, last_norm, last_kind, numbers = weight.last
    if out is not last_out or x is not last_x or norm is not last_norm or last_kind != (eps, kind):
        call = weight.normed(x.dtype, out.dtype, norm, eps, GATES[kind])
        numbers = _keep(weight, out, x, norm, (eps, kind), call)
    _run(numbers, out, x, weight, norm)


def product(out: Tensor, x: Tensor, weight: Packed, gate: int = 0) -> None:
    """``out = x @ weight.T``, gated by one of `GATES`, of tensors that no later call brings again: nothing is kept."""
    call = weight.call(x.dtype, out.dtype, gate=gate)
    _run((call, out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0), x.shape[0], None), out, x, weight)


def _run(numbers: tuple[int | None, ...], out: Tensor, x: Tensor, *kept: Any) -> None:
    if status := _linear(*numbers):
        raise _refused("vllm_linear", x, status)
    if (recorder := recording.now()) is not None:
        packed, failed = _pack_linear(*numbers[:-1], 0), partial(_refused, "vllm_linear", x)
        note = recording.NativeCall("linear", recording.LINEAR, _linear, numbers, packed, failed, (out, x, *kept))
        recorder.add(note)


_ADD = object()
"""Kind of a call that adds to what is there; one with a norm is its epsilon, with a gate that and the gate's name."""


def _keep(weight: Packed, out: Tensor, x: Tensor, norm: Tensor | None, kind: Any, call: int) -> tuple[int | None, ...]:
    """The numbers of this call, kept with its tensors, so that none of these goes and another takes its address."""
    numbers = (call, out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0), x.shape[0], None)
    weight.last = (out, x, norm, kind, numbers)
    return numbers


_tables: dict[int, tuple[Any, CMatrix]] = {}


def embedding(out: Tensor, ids: Tensor, weight: Weight, scale: float) -> None:
    """``out[T,H] = weight[ids] * scale``."""
    embedding_shard(out, ids, weight, 0, scale)


def embedding_shard(out: Tensor, ids: Tensor, weight: Weight, first: int, scale: float) -> None:
    """``out[T,H] = weight[ids - first] * scale``, 0 where another worker holds the row."""
    data = weight if isinstance(weight, Tensor) else weight.data  # type: ignore[union-attr]
    known = _tables.get(data.data_ptr())
    if known is None or known[0] is not weight:
        assert not isinstance(weight, QuantStack), "tables are not stacked"
        known = _tables[data.data_ptr()] = (weight, matrix_of(weight))
    table = ctypes.addressof(known[1])
    rows = out.data_ptr(), out.stride(0), DTYPES[out.dtype], ids.data_ptr(), DTYPES[ids.dtype], len(ids)
    if status := _embedding(*rows, table, first, scale, None):
        raise _refused("vllm_embedding", out, status)
    if (recorder := recording.now()) is not None:
        packed, failed = _pack_embedding(*rows, table, first, scale, 0), partial(_refused, "vllm_embedding", out)
        arguments, kept = (*rows, table, first, scale, None), (out, ids, *known)
        note = recording.NativeCall("embedding", recording.EMBEDDING, _embedding, arguments, packed, failed, kept)
        recorder.add(note)


def _usable(weight: Tensor | QuantTensor) -> Tensor | QuantTensor:
    """The weight with contiguous tensors, and scales in float32."""
    if isinstance(weight, Tensor):
        return weight.contiguous()
    group = weight.shape[1] // weight.scale.shape[1] if weight.format == "int4_group" and weight.scale is not None else 32
    if weight.format not in FORMATS or group % 32:
        raise UnsupportedError(
            "Weights are in a form that has no kernel",
            on=f"linear_pack, {weight.format} {weight.shape}",
            found=f"groups of {group} inputs",
            expected=f"one of {', '.join(FORMATS)}, groups of a multiple of 32",
            fix="--deny-provider vllm-cpu-native",
        )
    scale = None if weight.scale is None else weight.scale.float().contiguous()
    zero = None if weight.zero is None else weight.zero.contiguous()
    return QuantTensor(weight.format, weight.shape, weight.data.contiguous(), scale, zero)


def _refused(name: str, x: Tensor, status: int) -> UnsupportedError:
    return UnsupportedError(
        "Native op failed",
        on=f"{name}, {x.dtype} {tuple(x.shape)}",
        found=f"status {status} ({_STATUS.get(status, 'unknown')})",
        expected="status 0",
        fix="--deny-provider vllm-cpu-native, and report it to the library's authors",
    )
